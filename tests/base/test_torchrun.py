import os

import torch.distributed.run

from dfm_nb.base.torchrun import KEPT_BYTES, run_under_torchrun


def test_processes_keep_freed_memory_unless_the_user_decides(monkeypatch):
    first, *others = KEPT_BYTES
    without = {name: value for name, value in os.environ.items() if name not in KEPT_BYTES}
    monkeypatch.setattr(os, "environ", without | {first: "65536"})
    monkeypatch.setattr(torch.distributed.run, "run", lambda args: None)
    assert run_under_torchrun(["--nproc-per-node=1", "-m", "dfm_nb.prepare"]) == 0
    assert os.environ[first] == "65536"
    assert {name: int(os.environ[name]) for name in others} == {name: KEPT_BYTES[name] for name in others}
