"""`dfm_nb.train` with the fault that `FAULT` names: rank 1 hangs, stops or dies once, or the disk is full."""

import os
import resource
import signal
import time

from dfm_nb import train
from dfm_nb.base.argv import guard
from dfm_nb.data.loader import PackedLoader

next_step, calls, fault = PackedLoader.next_step, [], os.environ["FAULT"]


def faulty(self):
    calls.append(None)
    second = os.environ["RANK"] == "1"
    while second and fault == "hang" and len(calls) == 5:
        time.sleep(0.1)
    if second and fault == "stop" and len(calls) == 5:
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "die" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(calls) == 10:
        if second:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2)  # torchrun must see the death itself first, not what it does to rank 0
    return next_step(self)


if __name__ == "__main__":
    PackedLoader.next_step = faulty
    if fault == "full disk":  # a limit on the size of files stands for it
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FILE_BYTES"]), resource.RLIM_INFINITY))
    raise SystemExit(guard(train.main))
