import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dfm_nb import inspect, prepare, prepare_dataset
from dfm_nb.base import files
from dfm_nb.base.argv import guard
from dfm_nb.data import preparation, shards
from dfm_nb.data.encoding import to_pixels
from dfm_nb.data.prepared_folder import PreparedFolder
from dfm_nb.data.text_encoders import t5
from dfm_nb.data.tokenizers import cosmos_cv
from tests.data import encoder_files
from tests.processes import commands

pytestmark = pytest.mark.slow  # networks, process groups or whole preparations in most of them

SMALL = ["--source", "synthetic", "--num-images", "36", "--num-clips", "4", "--short-side", "32", "--shard-size", "8"]


def run(out, *extra, argv=SMALL):
    return guard(prepare.main, [*argv, "--output-dir", str(out), *extra])


def parts(folder: Path) -> dict[str, bytes]:
    """Every member of every tar by shard and name."""
    out = {}
    for tar in sorted(folder.glob("*.tar")):
        for e in shards.scan_shard(tar):
            data = tar.read_bytes()
            out |= {f"{tar.name}/{e.key}.{p}": data[o : o + n] for p, (o, n) in e.parts.items()}
    return out


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prep") / "data"
    assert run(folder) == 0
    return folder


def test_folder_holds_what_the_manifest_says(prepared):
    m = json.loads((prepared / "manifest.json").read_text())
    assert m["counts"]["samples"] == 40 and m["counts"]["dropped"] == 0 and m["counts"]["val"] >= 1
    assert m["counts"]["train"] + m["counts"]["val"] == 40
    for s in m["shards"]:
        assert files.sha256(prepared / s["name"]) == s["sha256"]
    clips = [e.read() for tar in sorted(prepared.glob("*.tar")) for e in shards.scan_shard(tar)]
    for c in clips:
        t, h, w = c.meta["num_frames"], c.meta["image_height"], c.meta["image_width"]
        assert list(c.latent.shape) == [1, 16, 1 + (t - 1) // 4, h // 8, w // 8]
        assert c.text_emb.shape == (1, c.meta["text_tokens"], 384) and c.meta["fps"] > 0
    train = np.concatenate([c.latent[0].float().flatten(1) for c in clips], 1)
    np.testing.assert_allclose(train.mean(1), m["latent_mean"], atol=0.15)
    assert m["psnr_db"]["images"] > 15


def test_energon_reads_the_folder_and_its_splits(prepared):
    from dfm_nb.data.stores import EnergonStore

    m = json.loads((prepared / "manifest.json").read_text())
    train, val = EnergonStore(prepared), EnergonStore(prepared, "val")
    assert (len(train), len(val)) == (m["counts"]["train"], m["counts"]["val"])
    assert not set(train.keys) & set(val.keys)
    clip = train.read(3)
    assert clip.key == train.keys[3] and tuple(clip.latent.shape[-3:]) == train.grid(3)
    assert train.empty_text.shape == (2, 384)


def test_each_split_has_an_index_that_fits_its_shards(prepared):
    from dfm_nb.data.index import open_index
    from dfm_nb.inspect import inspect_dataset

    m = json.loads((prepared / "manifest.json").read_text())
    for split in ("train", "val"):
        assert len(open_index(prepared, split)) == m["counts"][split]
    assert open_index(prepared, "test") is None
    assert inspect_dataset(prepared, verify=True, samples=0)["faults"] == []


def test_energons_own_command_reads_the_folder(prepared):
    done = commands().run("energon", "info", prepared, "--dataset-config", "info.yaml")
    assert done.returncode == 0 and "CrudeSample" in done.stdout


def test_complete_folder_is_left_alone(prepared):
    before = (prepared / "manifest.json").stat().st_mtime_ns
    assert run(prepared) == 0
    assert (prepared / "manifest.json").stat().st_mtime_ns == before


def test_folder_of_another_data_set_is_refused(prepared, capsys):
    assert run(prepared, "--seed", "5") == 2
    assert "already holds another data set" in capsys.readouterr().err


def test_unfinished_folder_needs_resume(prepared, tmp_path, capsys):
    import shutil

    shutil.copytree(prepared, tmp_path / "d")
    for name in ("manifest.json", "rank0-000001.tar"):
        (tmp_path / "d" / name).unlink()
    assert run(tmp_path / "d") == 2
    assert "--resume" in capsys.readouterr().err
    assert run(tmp_path / "d", "--resume") == 0
    assert parts(tmp_path / "d") == parts(prepared)


def test_two_ranks_prepare_the_same_samples(prepared, tmp_path):
    launch = ["--standalone", "--nproc-per-node=2", "-m", "dfm_nb.prepare"]
    done = commands().run("torchrun", *launch, *SMALL, "--output-dir", tmp_path / "d")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[INFO] Rank 1 of 2 processing 20 samples, from 20 to 40" in done.stdout
    keys = lambda f: sorted(k.split("/")[1] for k in parts(f))  # noqa: E731
    assert keys(tmp_path / "d") == keys(prepared)


def contents(folder: Path) -> dict[str, bytes]:
    """Whatever a preparation leaves for readers."""
    names = ("*.tar", "*.tar.idx", "*.arrow", "*.safetensors", "split.yaml")
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for name in names for p in folder.rglob(name)}
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["arguments"]["resume"], manifest["files"]["manifest.json"]
    return found | {"manifest": json.dumps(manifest).encode()}


@pytest.mark.parametrize("began, goes_on", [(1, 2), (3, 1)])
def test_another_number_of_processes_goes_on_to_the_same_bytes(tmp_path, began, goes_on):
    def torchrun(processes, out, *extra):
        if processes == 1:
            return run(out, *extra)
        launch = ["--standalone", f"--nproc-per-node={processes}", "-m", "dfm_nb.prepare", *SMALL]
        done = commands().run("torchrun", *launch, "--output-dir", out, *extra)
        assert done.returncode == 0, done.stdout + done.stderr

    torchrun(began, tmp_path / "d")
    want = contents(tmp_path / "d")
    for name in ["manifest.json", *sorted(n for n in want if n.endswith(".tar"))[1:]]:
        (tmp_path / "d" / name).unlink()
    torchrun(goes_on, tmp_path / "d", "--resume")
    assert contents(tmp_path / "d") == want
    torchrun(goes_on, tmp_path / "d")  # complete, whoever asks
    assert contents(tmp_path / "d") == want


def test_many_shards_in_folders_are_one_data_set(tmp_path, monkeypatch):
    from dfm_nb.data.stores import EnergonStore
    from dfm_nb.inspect import inspect_dataset

    monkeypatch.setattr("dfm_nb.data.shard_plan.SHARDS_A_FOLDER", 4)
    folder = tmp_path / "d"
    assert run(folder) == 0
    want = contents(folder)
    assert sorted(p.name for p in folder.iterdir() if p.name[0].isdigit()) == ["0000", "0001"]
    assert len(list((folder / "0000").glob("*.tar"))) == 4 and not list(folder.glob("*.tar*"))
    store = EnergonStore(folder)
    assert store.read(0).key == store.keys[0]
    assert inspect_dataset(folder, verify=True, samples=0)["faults"] == []
    done = commands().run("energon", "info", folder, "--dataset-config", "info.yaml")
    assert done.returncode == 0, done.stderr
    for name in ("manifest.json", "0001/rank0-000005.tar"):
        (folder / name).unlink()
    (folder / "0001" / "rank0-000005.tar.17.tmp").write_bytes(b"of a process that was killed")
    assert run(folder, "--resume") == 0
    assert contents(folder) == want and not list(folder.rglob("*.tmp"))
    # what a link leads to is not the preparation's
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rank0-000000.tar").write_bytes(b"somebody's")
    (folder / "0002").symlink_to(tmp_path / "other")
    monkeypatch.undo()
    assert run(folder, "--overwrite") == 0
    assert len(list(folder.glob("*.tar"))) == 6 and not list(folder.glob("000[01]/*"))
    assert (tmp_path / "other" / "rank0-000000.tar").read_bytes() == b"somebody's"


@pytest.mark.parametrize(
    "wrong, right",
    [
        (["--text-encoder", "minilm", "--text-encoder-path", "NOWHERE"], ["--text-encoder", "minilm"]),
        (["--tokenizer", "cosmos_cv", "--tokenizer-cache-dir", "EMPTY"], ["--tokenizer", "pca"]),
        (["--tokenizer", "residual", "--tokenizer-path", "EMPTY"], ["--tokenizer", "residual"]),
    ],
)
def test_preparation_that_failed_before_any_work_does_not_claim_the_folder(tmp_path, wrong, right):
    (tmp_path / "EMPTY").mkdir()
    wrong = [str(tmp_path / word) if word.isupper() else word for word in wrong]
    assert run(tmp_path / "d", *wrong) == 2 and not (tmp_path / "d").exists()
    assert run(tmp_path / "d", *right, "--num-images", "4") == 0


# ---- bad input ----------------------------------------------------------------------------------------------------


def picture(path: Path, width=40, height=40):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)).save(path)


def test_manifest_names_the_first_drops_and_one_of_each_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "NAMED_DROPS", 2)
    source = tmp_path / "in"
    source.mkdir()
    picture(source / "good.png")
    for i in range(5):
        picture(source / f"narrow_{i}.png", width=12)
    picture(source / "silent.png")
    (source / "silent.txt").write_text("")
    assert run(tmp_path / "d", argv=["--source", f"folder:{source}", "--short-side", "32", "--val-fraction", "0"]) == 0
    m = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert m["counts"]["dropped"] == 6 and m["counts"]["dropped_by_reason"] == {"too_small": 5, "no_caption": 1}
    assert [d["key"].split("-")[0] for d in m["drops"]] == ["narrow_0", "narrow_1", "silent"]


def test_unusable_files_are_counted_and_named(tmp_path, capsys):
    source = tmp_path / "in"
    source.mkdir()
    for i in range(4):
        picture(source / f"good_{i}.png")
    picture(source / "narrow.png", width=12)
    picture(source / "line.png", width=1, height=10000)
    (source / "broken.png").write_bytes(b"\x89PNG nothing")
    picture(source / "latin.png")
    (source / "latin.txt").write_bytes("größer".encode("latin-1"))
    picture(source / "silent.png")
    (source / "silent.txt").write_text("")
    assert run(tmp_path / "d", argv=["--source", f"folder:{source}", "--short-side", "32", "--val-fraction", "0"]) == 0
    m = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert m["counts"]["samples"] == 4 and m["counts"]["dropped"] == 5
    named = " ".join(d["detail"] for d in m["drops"])
    for name in ("broken.png", "latin.txt", "silent.txt"):
        assert name in named
    assert {d["key"].split("-")[0] for d in m["drops"]} == {"narrow", "line", "broken", "latin", "silent"}
    captions = [e.meta["caption"] for t in (tmp_path / "d").glob("*.tar") for e in shards.scan_shard(t)]
    assert sorted(captions) == ["good 0", "good 1", "good 2", "good 3"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--source", "synthetic", "--clip-frames", "5"], "has no use for --clip-frames"),
        (["--source", "synthetic", "--val-fraction", "0.6", "--test-fraction", "0.5"], "nothing for training"),
        (["--source", "synthetic", "--shard-size", "0"], "--shard-size must be at least 1"),
        (["--source", "synthetic", "--resume", "--overwrite"], "pass one of them"),
        (["--source", "folder:EMPTY"], "has no images or videos"),
        (["--source", "folder:NOWHERE"], "NOWHERE is not a"),
        (["--source", "syntetic"], "did you mean 'synthetic'"),
        (["--source", "synthetic", "--tokenizer", "pcaa"], "did you mean 'pca'"),
        (["--source", "synthetic", "--short-side", "40"], "multiples of 16"),
    ],
)
def test_mistakes_end_in_one_sentence(tmp_path, capsys, argv, message):
    (tmp_path / "EMPTY").mkdir()
    argv = [a.replace("EMPTY", str(tmp_path / "EMPTY")).replace("NOWHERE", str(tmp_path / "NOWHERE")) for a in argv]
    assert run(tmp_path / "d", argv=argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_python_takes_the_flags_as_keywords(tmp_path):
    manifest = prepare_dataset(output_dir=str(tmp_path / "d"), num_images=3, num_clips=1, short_side=32)
    assert manifest == json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert manifest["counts"]["samples"] == 4 and manifest["arguments"]["num_images"] == 3
    with pytest.raises(ValueError, match="did you mean 'num_images'"):
        prepare_dataset(output_dir=str(tmp_path / "e"), num_imags=3)


def test_source_without_a_usable_sample_is_an_error(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"no")
    assert run(tmp_path / "d", argv=["--source", f"folder:{tmp_path / 'in'}"]) == 2
    assert "a.png" in capsys.readouterr().err


def test_foreign_tars_are_never_overwritten(tmp_path, capsys):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "backup.tar").write_bytes(b"precious")
    assert run(tmp_path / "d", "--overwrite") == 2
    assert "did not make" in capsys.readouterr().err
    assert (tmp_path / "d" / "backup.tar").read_bytes() == b"precious"


def test_overwrite_replaces_a_preparation_and_keeps_what_is_not_its_own(tmp_path):
    assert run(tmp_path / "d") == 0
    (tmp_path / "d" / "notes.txt").write_text("keep")
    assert run(tmp_path / "d", "--overwrite", "--seed", "3", "--num-images", "10") == 0
    m = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert m["source"]["seed"] == 3 and m["counts"]["samples"] == 14
    assert {t.name for t in (tmp_path / "d").glob("*.tar")} == {s["name"] for s in m["shards"]}
    assert (tmp_path / "d" / "notes.txt").read_text() == "keep"


def test_moved_folder_without_records_is_still_known(prepared, tmp_path, capsys):
    import shutil

    shutil.copytree(prepared, tmp_path / "d", ignore=shutil.ignore_patterns(".dfm"))
    assert run(tmp_path / "d") == 0 and not (tmp_path / "d" / ".dfm").exists()
    assert run(tmp_path / "d", "--seed", "5") == 2
    assert "source:" in capsys.readouterr().err


def test_named_tokenizer_is_reused_and_kept_beside_the_shards(prepared, tmp_path, capsys):
    assert run(tmp_path / "d", "--tokenizer-path", str(prepared), "--num-images", "4", "--seed", "9") == 0
    ours, theirs = (json.loads((f / "manifest.json").read_text()) for f in (tmp_path / "d", prepared))
    assert ours["tokenizer"] == theirs["tokenizer"]
    assert (tmp_path / "d" / "tokenizer.safetensors").read_bytes() == (prepared / "tokenizer.safetensors").read_bytes()


def test_resuming_with_other_encoders_is_refused(prepared, tmp_path, capsys):
    import shutil

    shutil.copytree(prepared, tmp_path / "d")
    (tmp_path / "d" / "manifest.json").unlink()
    record = tmp_path / "d" / ".dfm" / "encoders.json"
    record.write_text(record.read_text().replace("53aa51", "000000"))
    assert run(tmp_path / "d", "--resume") == 2
    assert "begun with another text encoder" in capsys.readouterr().err


def test_padded_form_reads_back_at_its_true_length(prepared, tmp_path):
    import io
    import tarfile

    import torch

    assert run(tmp_path / "d", "--tokenizer-path", str(prepared), "--num-images", "2", "--pad-text-tokens", "512") == 0
    entry = shards.scan_shard(tmp_path / "d" / "rank0-000000.tar")[0]
    with tarfile.open(entry.shard) as tar:
        stored = torch.load(io.BytesIO(tar.extractfile(f"{entry.key}.pth").read()), weights_only=True)
    text = shards.decode_pickle(shards.read_parts(entry)["pickle"])
    assert stored.dtype == text.dtype == torch.bfloat16 and text.shape == (1, 512, 384)
    length = entry.meta["text_tokens"]
    assert 4 < length < 64 and text[0, length:].abs().max() == 0 and text[0, length - 1].abs().max() > 0
    assert entry.read().text_emb.shape == (1, length, 384)


def test_existing_readers_take_the_embeddings_length_from_its_first_dim(prepared):
    """What NeMo DFM's DiT task encoder does with an image: pickle, squeeze, shape[0]; pth, squeeze, [C, T, H, W]."""
    import webdataset as wds

    tar = str(next(iter(sorted(prepared.glob("*.tar")))))
    sample = next(iter(wds.WebDataset(tar, shardshuffle=False).decode()))
    text = sample["pickle"].cpu().float().numpy().squeeze(0)
    info = sample["json"]
    assert text.shape == (info["text_tokens"], 384)
    c, t, h, w = sample["pth"].squeeze(0).shape
    assert (c, t, h * 8, w * 8) == (16, 1, info["image_height"], info["image_width"])


def test_production_encoders_prepare_at_512_px(tmp_path, capsys, make_once):
    """cosmos_cv and t5 through the command, with files of the published architectures."""
    place = tmp_path / "in"
    place.mkdir()
    rng = np.random.default_rng(0)
    for name, (h, w) in {"wide": (600, 900), "tall": (1300, 640), "small": (200, 300)}.items():
        Image.fromarray(np.full((h, w, 3), rng.integers(0, 255, 3), dtype=np.uint8)).save(place / f"{name}.png")
        (place / f"{name}.txt").write_text("a blue butterfly" if name == "wide" else "a red butterfly over a meadow")
    cosmos, weights = make_once("cosmos", encoder_files.save_cosmos), make_once("t5", encoder_files.save_t5)
    argv = ["--source", f"folder:{place}", "--tokenizer", "cosmos_cv", "--tokenizer-cache-dir", str(cosmos)]
    argv += ["--text-encoder", "t5", "--t5-cache-dir", str(weights)]
    assert run(tmp_path / "d", argv=argv) == 0 and run(tmp_path / "tiled", "--tile-px", "256", argv=argv) == 0
    whole, tiled = (
        {e.key.split("-")[0]: e.read() for t in (tmp_path / name).glob("*.tar") for e in shards.scan_shard(t)}
        for name in ("d", "tiled")
    )
    assert {name: list(sample.latent.shape) for name, sample in whole.items()} == {
        "wide": [1, 16, 1, 64, 96],
        "tall": [1, 16, 1, 130, 64],
        "small": [1, 16, 1, 24, 36],
    }
    flat = to_pixels(np.array(Image.open(place / "wide.png"))[None, :512, :768])[None]  # one colour: as resized
    for samples, options in ((whole, {}), (tiled, {"tile_px": 256})):
        wanted = cosmos_cv.build(cosmos, **options).encode(flat).bfloat16()
        np.testing.assert_array_equal(samples["wide"].latent.float(), wanted.float())
    short, long = t5.build(weights).encode(["a blue butterfly", "a red butterfly over a meadow"])
    for name, state in (("wide", short), ("tall", long), ("small", long)):
        np.testing.assert_allclose(whole[name].text_emb[0].float(), state.float(), atol=0.05, rtol=0.05)
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert manifest["short_side"] == 512 and set(manifest["tokenizer"]["files"]) == {"encoder", "decoder"}
    assert guard(inspect.main, [str(tmp_path / "d"), "--verify", "--tokenizer-path", str(cosmos)]) == 0
    assert "verified" in capsys.readouterr().out
    picture = np.asarray(Image.open(tmp_path / "d" / "contact_sheet.png"))
    assert picture.std() > 10
    assert run(tmp_path / "e", "--tile-px", "256") == 2 and "cosmos_cv" in capsys.readouterr().err
    assert run(tmp_path / "e", "--tokenizer-window", "50", argv=argv) == 2
    assert "--tokenizer-window must be 1 + 4k frames" in capsys.readouterr().err


def test_second_preparation_waits_for_the_first(tmp_path):
    code = f"""
from dfm_nb.data.prepared_folder import PreparedFolder
from dfm_nb.data.text_encoders import t5
from dfm_nb.data.tokenizers import cosmos_cv
with PreparedFolder({str(tmp_path)!r}).turn():
    print("in")
"""
    with PreparedFolder(tmp_path).turn():
        other = commands().start("python", "-c", code, stderr=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(8)
    assert other.communicate(timeout=60)[0] == "in\n" and other.returncode == 0


def test_full_disk_is_one_sentence(tmp_path, capsys, monkeypatch):
    import errno

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.ShardWriter, "add", full)
    assert run(tmp_path / "d", "--num-images", "4") == 2
    assert "no space left" in capsys.readouterr().err
    assert not list((tmp_path / "d").glob("*.tar*"))
