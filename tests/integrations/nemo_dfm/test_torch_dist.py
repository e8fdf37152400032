"""Folders of megatron-core are read as tensors or refused in one sentence; nothing in them runs."""

import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dfm_nb.checkpoints import exported
from dfm_nb.checkpoints.tensor_files import CheckpointError
from dfm_nb.integrations.nemo_dfm.weights import load_foreign
from tests.attacks.checkpoint_files import Evil
from tests.refusals import refused

WEIGHT = "decoder.layers.weight"
RAN = Path(tempfile.gettempdir(), f"dfm-ran-{os.getpid()}")


@pytest.fixture
def folder(tmp_path):
    """As torch's own writer makes it."""
    state = {WEIGHT: torch.arange(12.0).view(3, 4), "half": torch.ones(2).bfloat16(), "rng": Evil(RAN)}
    save({**state, "optimizer.state": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path


def test_tensors_are_read_and_objects_passed_over(folder):
    found = load_foreign(folder)
    assert found.keys() == {WEIGHT, "half"} and torch.equal(found[WEIGHT], torch.arange(12.0).view(3, 4))
    assert found["half"].dtype is torch.bfloat16 and not RAN.exists()


def declared_as(index, kind):
    index.state_dict_metadata[WEIGHT] = kind


def place_of_weight(index, **values):
    vars(next(v for k, v in index.storage_data.items() if k.fqn == WEIGHT)).update(values)


def all_as_the_object(index):
    (evil,) = (v for k, v in index.storage_data.items() if k.fqn == "rng")
    place_of_weight(index, **vars(evil))


INDEXES = {
    "nothing": lambda index: declared_as(index, None),
    "folder above": lambda index: place_of_weight(index, relative_path="../__0_0.distcp"),
    "negative offset": lambda index: place_of_weight(index, offset=-1),
    "transformed": lambda index: place_of_weight(index, transform_descriptors=["stream.zstd"]),
    "a pickle for a tensor": all_as_the_object,
    "part outside": lambda index: setattr(index.state_dict_metadata[WEIGHT], "size", torch.Size([4, 3])),
    "larger": lambda index: setattr(index.state_dict_metadata[WEIGHT], "size", torch.Size([1 << 40])),
    "a command": lambda _: pickle.dumps(Evil(RAN)),
    "cut": lambda index: pickle.dumps(index)[:-100],
    # BUILD of {"poison": 1} sets attributes of whatever the unpickler handed out
    "attributes of a class": lambda _: b"\x80\x04cos\nsystem\n}\x8c\x06poisonK\x01sb.",
}


@pytest.mark.parametrize("change", INDEXES.values(), ids=INDEXES)
def test_index_of_more_than_tensors_is_one_sentence(folder, change):
    path = folder / ".metadata"
    index: Metadata = pickle.loads(path.read_bytes())
    changed = change(index)
    path.write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(index))
    refused(r"\.metadata", load_foreign, folder, error=CheckpointError)
    assert not RAN.exists()
    assert not hasattr(exported.Record, "poison")


def test_weight_declared_as_bytes_is_not_read(folder):
    index = pickle.loads((folder / ".metadata").read_bytes())
    declared_as(index, BytesStorageMetadata())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert load_foreign(folder).keys() == {"half"} and not RAN.exists()


@pytest.mark.parametrize("at", [0.1, 0.5])
def test_file_that_is_cut_off_is_refused(folder, at):
    (file,) = folder.glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: int(at * len(content))])
    refused("", load_foreign, folder, error=CheckpointError)
