"""`python -m dfm_nb` is `dfm`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose files are data

from dfm_nb.cli import entry

if __name__ == "__main__":
    entry()
