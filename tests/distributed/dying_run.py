"""`dfm_nb.train`, but rank 1 is killed once, before its tenth step: the checkpoint of iteration 4 is whole then."""

import os
import signal
import time

from dfm_nb import train
from dfm_nb.base.argv import guard
from dfm_nb.data.loader import PackedLoader

next_step, calls = PackedLoader.next_step, []


def dies(self):
    calls.append(None)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(calls) == 10:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2)  # torchrun must see the death itself first, not what it does to rank 0
    return next_step(self)


if __name__ == "__main__":
    PackedLoader.next_step = dies
    raise SystemExit(guard(train.main))
