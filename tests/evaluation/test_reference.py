"""Real samples of folders that another writer made."""

import shutil

import pytest

from dfm_nb.adopt import adopt_dataset
from dfm_nb.evaluation.reference import open_reference


def test_folder_without_metadata_or_captions_is_named_with_the_way_out(theirs, tmp_path):
    folder = shutil.copytree(theirs / "data", tmp_path / "data")
    tokenizer = {"name": "cosmos_cv"}
    with pytest.raises(FileNotFoundError, match=f"`dfm adopt {folder}"):
        open_reference(str(folder), "train", lambda latent: latent, tokenizer, 32)
    adopt_dataset(folder, "cosmos_cv", "t5")
    with pytest.raises(ValueError, match=f"000000 of {folder} must have a caption"):
        open_reference(str(folder), "train", lambda latent: latent, tokenizer, 32).read(0)
