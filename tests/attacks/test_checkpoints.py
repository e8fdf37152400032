"""Loading a checkpoint runs no code, whatever its files say. Each attack would make a file."""

import io
import json
import operator
import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from dfm_nb.checkpoints import saving, torch_dist
from dfm_nb.checkpoints import weights as checkpoint
from dfm_nb.config.schema import marked
from tests.attacks.checkpoint_files import NAME, WEIGHT, Evil, as_bytes, change_index, copy_run, reseal
from tests.distributed.layouts import make_trainer


def trainer_like(run: Path):
    from dfm_nb import config as cfg

    c = cfg.from_yaml(run / "config.yaml").config
    same = [f"{k}={json.dumps(operator.attrgetter(k)(c))}" for k in marked("shape")]
    muon = [f"optimizer.optimizer={c.optimizer.optimizer}", "optimizer.use_distributed_optimizer=false"]
    return make_trainer([*same, *muon, f"ema.sigma_rels={list(c.ema.sigma_rels)}".replace(" ", "")])[0]


def generate(run: Path) -> None:
    from dfm_nb.generation.pipeline import Pipeline

    Pipeline.from_checkpoint(run)


def resume(run: Path) -> None:
    saving.load(trainer_like(run).pieces(), run / "checkpoints" / NAME)


def pretrained(run: Path) -> None:
    checkpoint.load_pretrained(trainer_like(run), run)


WAYS = [generate, resume, pretrained]


def refused(way, run: Path, mark: Path) -> None:
    with pytest.raises(ValueError):
        way(run)
    assert not mark.exists()


@pytest.fixture
def run(tmp_path):
    copy_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_stored_checkpoint_opens_every_way(one_rank, run, way):
    way(run)


FORGED = [("tokenizer", [1]), ("tokenizer", "pca"), ("text_encoder", None), ("latent_std", [None])]


@pytest.mark.parametrize("key, value", FORGED, ids=str)
def test_manifest_of_other_types_is_one_sentence(run, key, value):
    path = run / "checkpoints" / NAME / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(checkpoint.CheckpointError, match=rf"manifest.json.*{key}"):
        checkpoint.read_manifest(path.parent)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_weight_declared_as_bytes_runs_nothing(one_rank, run, tmp_path, way):
    as_bytes(run / "checkpoints" / NAME, tmp_path / "ran", WEIGHT, f"ema.0.05.{WEIGHT}")
    refused(way, run, tmp_path / "ran")


def test_pickle_in_place_of_the_common_values_runs_nothing(one_rank, run, tmp_path):
    folder = run / "checkpoints" / NAME
    torch.save({"scheduler": Evil(tmp_path / "ran")}, folder / "common.pt")
    reseal(folder)
    refused(resume, run, tmp_path / "ran")


def test_pickle_in_place_of_a_tensor_runs_nothing(one_rank, run, tmp_path):
    """The index says tensor, and the bytes at its place are a pickle that runs a command."""
    folder = run / "checkpoints" / NAME
    buffer = io.BytesIO()
    torch.save(Evil(tmp_path / "ran"), buffer)
    for file in folder.glob("*.distcp"):
        file.write_bytes(buffer.getvalue())

    def to_the_front(index):
        for info in index.storage_data.values():
            info.offset, info.length = 0, len(buffer.getvalue())

    change_index(folder, to_the_front)
    refused(resume, run, tmp_path / "ran")


class Tensorlike(TensorStorageMetadata):
    pass


def declared_as(index, kind):
    index.state_dict_metadata[WEIGHT] = kind


def place_of_weight(index, **values):
    info = next(v for k, v in index.storage_data.items() if k.fqn == WEIGHT)
    vars(info).update(values)


RAN = Path(tempfile.gettempdir(), f"dfm-ran-{os.getpid()}")
INDEXES = {
    "bytes": lambda index: declared_as(index, BytesStorageMetadata()),
    "nothing": lambda index: declared_as(index, None),
    "folder above": lambda index: place_of_weight(index, relative_path="../__0_0.distcp"),
    "absolute path": lambda index: place_of_weight(index, relative_path="/etc/passwd"),
    "two dots": lambda index: place_of_weight(index, relative_path=".."),
    "number as name": lambda index: place_of_weight(index, relative_path=3),
    "negative offset": lambda index: place_of_weight(index, offset=-1),
    "transformed": lambda index: place_of_weight(index, transform_descriptors=["stream.zstd"]),
    "part outside": lambda index: setattr(index.state_dict_metadata[WEIGHT], "size", torch.Size([1, 2, 2])),
    "no entries": lambda index: index.state_dict_metadata.clear(),
    "entry without place": lambda index: index.state_dict_metadata.pop(WEIGHT) and None,
    "a command": lambda _: pickle.dumps(Evil(RAN)),
    "a subclass": lambda _: pickle.dumps(Tensorlike(None, None, [])),
    "empty": lambda _: b"",
    "cut": lambda index: pickle.dumps(index)[:-100],
    "stack global": lambda _: b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "persistent id": lambda _: b"P0\n.",
    "extension": lambda _: b"\x82\x01.",
    "deep": lambda _: b"(" * 10_000 + b"t" * 9_999 + b".",
}


@pytest.mark.parametrize("change", INDEXES.values(), ids=INDEXES)
def test_index_of_more_than_tensors_is_one_sentence(run, change):
    folder = run / "checkpoints" / NAME
    change_index(folder, change)
    with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata") as error:
        checkpoint.verify(folder)
    assert "\n" not in str(error.value) and not RAN.exists()


@pytest.mark.parametrize("name", ["Metadata", "TensorStorageMetadata", "MetadataIndex"])
def test_index_cannot_set_attributes_of_torchs_classes(run, name):
    """The BUILD opcode sets attributes of whatever object the unpickler handed out."""
    folder = run / "checkpoints" / NAME
    owner = f"torch.distributed.checkpoint.metadata\n{name}\n".encode()
    state = b"(N}\x8c\x06poisonK\x01st"  # (None, {"poison": 1})
    change_index(folder, lambda _: b"\x80\x04c" + owner + state + b"b.")
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.verify(folder)
    assert not hasattr(getattr(torch.distributed.checkpoint.metadata, name), "poison")
    assert not any(hasattr(record, "poison") for record in torch_dist._RECORDS.values())


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_exported_file_that_is_a_pickle_runs_nothing(one_rank, tmp_path, suffix):
    file = tmp_path / f"model{suffix}"
    torch.save({WEIGHT: Evil(tmp_path / "ran")}, file)
    refused(generate, file, tmp_path / "ran")
    file.write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    refused(generate, file, tmp_path / "ran")
