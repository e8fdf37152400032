"""`dfm_nb.train` with a limit on the size of files, `FILE_BYTES`, which stands for a full disk."""

import os
import resource

from dfm_nb import train
from dfm_nb.base.argv import guard

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FILE_BYTES"]), resource.RLIM_INFINITY))
    raise SystemExit(guard(train.main))
