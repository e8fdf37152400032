"""Real samples of folders that another writer made."""

import shutil
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest

from dfm_nb.adopt import adopt_dataset
from dfm_nb.evaluation.reference import Real, choose, open_reference


def test_no_more_is_looked_at_than_is_asked_for():
    """A data set may have a hundred million samples."""
    reference = MagicMock(
        is_clip=Mock(return_value=False), read=Mock(side_effect=lambda i: Real(np.zeros(1), "", 1, {}))
    )
    reference.__len__.return_value = 1000
    assert len(choose(reference, 3, 0, 9, seed=0)[0]) == 3 == reference.is_clip.call_count


def test_folder_without_metadata_or_captions_is_named_with_the_way_out(theirs, tmp_path):
    folder = shutil.copytree(theirs / "data", tmp_path / "data")
    tokenizer = {"name": "cosmos_cv"}
    with pytest.raises(FileNotFoundError, match=f"`dfm adopt {folder}"):
        open_reference(str(folder), "train", lambda latent: latent, tokenizer, 32)
    adopt_dataset(folder, "cosmos_cv", "t5")
    with pytest.raises(ValueError, match=f"000000 of {folder} must have a caption"):
        open_reference(str(folder), "train", lambda latent: latent, tokenizer, 32).read(0)
