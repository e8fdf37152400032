import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from dfm_nb import inspect, prepare
from dfm_nb.base.argv import guard
from dfm_nb.base.records import EncodedClip
from dfm_nb.data import shards
from tests.data.shard_files import write_shard


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "data"
    argv = [
        "--source",
        "synthetic",
        "--num-images",
        "22",
        "--num-clips",
        "3",
        "--short-side",
        "32",
        "--shard-size",
        "10",
    ]
    assert guard(prepare.main, [*argv, "--output-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "data")


def faults_of(folder, capsys, code=1):
    assert guard(inspect.main, [str(folder), "--verify", "--json", "--samples", "0"]) == code
    return json.loads(capsys.readouterr().out)["faults"]


def rewrite(folder, name="rank0-000000.tar", change=lambda clips: clips, manifest=False):
    """Write a shard anew from changed samples; without its manifest unless asked for."""
    clips = [e.read() for e in shards.scan_shard(folder / name)]
    write_shard(folder / name, change(clips))
    if not manifest:
        (folder / "manifest.json").unlink(missing_ok=True)


def test_table_and_contact_sheet_of_a_prepared_folder(folder, capsys):
    assert inspect.main([str(folder), "--verify"]) == 0
    out = capsys.readouterr().out
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "25 samples in" in out and "verified" in out and f"train {manifest['counts']['train']}" in out
    assert "tokenizer pca" in out and "dB" in out
    sheet = np.asarray(Image.open(folder / "contact_sheet.png"))
    assert sheet.shape[0] > 200 and sheet.std() > 20


def test_contact_sheet_shows_the_decoded_pictures(folder):
    from dfm_nb.data.sources import synthetic

    tokenizer = inspect.build_tokenizer(folder, None, None, None)
    source = synthetic.build(num_images=22, num_clips=3, size_px=32)
    drawn = {source.item_key(i): next(source.read(i)).video[0] for i in range(len(source))}
    alike = []
    for entry in shards.scan_shard(folder / "rank0-000000.tar"):
        picture = inspect.decoded(entry.read(), tokenizer)[0].astype(float)
        assert picture.shape == drawn[entry.key].shape
        alike.append(np.corrcoef(picture.ravel(), drawn[entry.key].ravel())[0, 1])
    assert len(alike) > 5 and np.median(alike) > 0.9 and min(alike) > 0.8


def test_flipped_byte_is_found(folder, capsys):
    tar = folder / "rank0-000000.tar"
    data = bytearray(tar.read_bytes())
    data[len(data) // 3] ^= 1
    tar.write_bytes(data)
    assert any("rank0-000000.tar does not match its checksum" in f for f in faults_of(folder, capsys))


def test_missing_surplus_and_cut_shards_are_found(folder, capsys):
    (folder / "rank0-000001.tar").rename(folder / "other.tar")
    tar = folder / "rank0-000000.tar"
    tar.write_bytes(tar.read_bytes()[:5000])
    said = " ".join(faults_of(folder, capsys))
    assert "rank0-000001.tar is in the manifest but not in the folder" in said
    assert "other.tar is not in the manifest" in said and "rank0-000000.tar has 5000 bytes" in said


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda c: [*c, c[0]], "occurs 2 times"),
        (lambda c: [EncodedClip(c[0].key, c[0].latent * torch.nan, c[0].text_emb, c[0].meta)], "holds NaN or Inf"),
        (lambda c: [EncodedClip(c[0].key, c[0].latent[..., :-1], c[0].text_emb, c[0].meta)], "where its .json says"),
        (lambda c: [EncodedClip(c[0].key, c[0].latent, c[0].text_emb[:, :2], c[0].meta)], "has 2 text tokens"),
    ],
)
def test_wrong_samples_are_named(folder, capsys, change, said):
    rewrite(folder, change=change)
    assert any(said in f for f in faults_of(folder, capsys))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_malicious_pickle_is_named_and_runs_nothing(folder, capsys, monkeypatch):
    mark = folder / "ran"
    encode = shards.encode_parts
    evil = lambda clip: encode(clip) | {"pickle": pickle.dumps(Evil(mark))}  # noqa: E731
    key = shards.scan_shard(folder / "rank0-000000.tar")[0].key
    monkeypatch.setattr(shards, "encode_parts", evil)
    rewrite(folder, change=lambda clips: clips[:1])
    faults = faults_of(folder, capsys)
    assert any(f"sample {key}: its .pickle was refused" in f and "system" in f for f in faults)
    assert guard(inspect.main, [str(folder)]) == 0  # shows what can be shown
    assert not mark.exists()


def test_shards_from_elsewhere_are_shown_in_false_colours(made, tmp_path, capsys):
    (tmp_path / "part").mkdir()
    shutil.copy(made / "rank0-000000.tar", tmp_path / "part" / "theirs.tar")
    assert inspect.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "10 samples in 1 shards" in out and "false colours" in out
    assert np.asarray(Image.open(tmp_path / "contact_sheet.png")).std() > 10
    sheet = tmp_path / "one.png"
    assert (
        inspect.main(
            [str(tmp_path / "part" / "theirs.tar"), "--contact-sheet", str(sheet), "--tokenizer-path", str(made)]
        )
        == 0
    )
    assert "false colours" not in capsys.readouterr().out and sheet.is_file()


def test_json_without_our_fields_is_fine(tmp_path, capsys):
    clip = EncodedClip(
        "a/b.c", torch.zeros(1, 16, 1, 8, 8), torch.zeros(1, 512, 32), {"image_height": 1, "image_width": 512}
    )
    write_shard(tmp_path / "x.tar", [EncodedClip("a", clip.latent, clip.text_emb, clip.meta)])
    assert inspect.main([str(tmp_path), "--verify"]) == 0
    assert "?x1x512 (1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda p: None, "holds no .tar shards"),
        (lambda p: (p / "a.tar").write_bytes(b"x" * 2000), "not a readable tar"),
        (
            lambda p: [(p / "a.tar").write_bytes(b"x"), (p / "manifest.json").write_text("{")],
            "manifest.json is damaged",
        ),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, make, said):
    make(tmp_path)
    assert guard(inspect.main, [str(tmp_path)]) in (1, 2)
    printed = capsys.readouterr()
    assert said in printed.out + printed.err and "Traceback" not in printed.err
