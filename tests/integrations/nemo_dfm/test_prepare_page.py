"""The page "Prepare Butterfly Dataset": its command with `-m dfm_nb.prepare` for the script, and its result.

What docs/prepare.md has too (512 px, padded text, a table of one's own) is run by tests/docs/test_prepare.py.
"""

import json
import pickle

import pytest
import torch
import webdataset as wds
import yaml


@pytest.mark.slow
def test_each_rank_writes_a_shard_and_a_sample_has_the_parts_that_the_page_shows(small_webdataset):
    folder = small_webdataset
    assert {f"rank{rank}-000000.tar" for rank in range(4)} <= {path.name for path in folder.glob("*.tar")}
    sample = next(iter(wds.WebDataset(str(folder / "rank0-000000.tar"), shardshuffle=False)))
    decoded = next(iter(wds.WebDataset(str(folder / "rank0-000000.tar"), shardshuffle=False).decode()))
    latent, text, meta = decoded["pth"], pickle.loads(sample["pickle"]), json.loads(sample["json"])
    assert latent.dtype == text.dtype == torch.bfloat16
    height, width = meta["image_height"], meta["image_width"]
    assert min(height, width) == 64 and height % 16 == width % 16 == 0
    assert latent.shape == (1, 16, 1, height // 8, width // 8)
    # T5-11B's states are 1,024 wide (the page says 4,096); true lengths unless --pad-text-tokens 512 is given.
    assert text.ndim == 3 and text.shape[0] == 1 and text.shape[1] == meta["text_tokens"] <= 512
    # the DiT page answers energon's questions by hand: split, and 11 for crude samples
    assert "CrudeWebdataset" in yaml.safe_load((folder / ".nv-meta" / "dataset.yaml").read_text())["__class__"]
    assert (folder / ".nv-meta" / "split.yaml").is_file()
