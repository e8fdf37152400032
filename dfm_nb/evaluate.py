"""`dfm_nb.evaluate`, the name under which torchrun finds `dfm evaluate`; `measure/evaluate.py` is the verb."""

from dfm_nb.base.argv import guard
from dfm_nb.measure.evaluate import main

if __name__ == "__main__":
    raise SystemExit(guard(main))
