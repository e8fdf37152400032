"""`python -m dfm_nb` is `dfm`."""

from dfm_nb.cli import entry

if __name__ == "__main__":
    entry()
