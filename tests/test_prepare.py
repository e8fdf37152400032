import json
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from dfm_nb import prepare
from dfm_nb.base import files, plugins
from dfm_nb.base.argv import guard
from dfm_nb.checkpoints.loading import different_encoders
from dfm_nb.data import preparation, shards
from dfm_nb.data.captioning import Edit, write_edit
from dfm_nb.data.prepared_folder import PreparedFolder
from dfm_nb.inspect import InspectOptions, inspect_dataset
from dfm_nb.offline import minilm
from tests.frames import noise
from tests.json_files import read_json, write_lines
from tests.processes import commands

pytestmark = pytest.mark.slow  # networks, process groups or whole preparations in most of them

SMALL = "--source synthetic --num-images 36 --num-clips 4 --short-side 32 --shard-size 8".split()


def run(out, *extra, argv=SMALL):
    return guard(prepare.main, [*argv, "--output-dir", str(out), *extra])


def parts(folder: Path) -> dict[str, bytes]:
    """Every member of every tar by shard and name."""
    out = {}
    for tar in sorted(folder.glob("*.tar")):
        for e in shards.samples_of(tar):
            out |= {f"{tar.name}/{e.key}.{part}": content for part, content in e.parts().items()}
    return out


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prep") / "data"
    assert run(folder) == 0
    return folder


def test_a_source_without_a_usable_sample_may_be_mended(tmp_path, wrong_use):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(b"no picture")
    argv = ["--source", f"folder:{tmp_path / 'in'}", "--short-side", "32"]
    assert "a.png" in wrong_use(run, tmp_path / "out", argv=argv)
    Image.new("RGB", (32, 32)).save(tmp_path / "in/a.png")
    assert run(tmp_path / "out", argv=argv) == 0


def test_folder_holds_what_the_manifest_says(prepared):
    m = read_json(prepared / "manifest.json")
    assert m["counts"]["samples"] == 40 and m["counts"]["dropped"] == 0 and m["counts"]["val"] >= 1
    assert m["counts"]["train"] + m["counts"]["val"] == 40
    listed = files.read_listing(prepared / "checksums.json")
    assert {s["name"] for s in m["shards"]} == {name for name in listed if name.endswith(".tar")}
    files.check(prepared, listed, listed, "")
    clips = [e.read() for tar in sorted(prepared.glob("*.tar")) for e in shards.samples_of(tar)]
    for c in clips:
        t, h, w = c.meta["num_frames"], c.meta["image_height"], c.meta["image_width"]
        assert list(c.latent.shape) == [1, 16, 1 + (t - 1) // 4, h // 8, w // 8]
        assert c.text_emb.shape == (1, c.meta["text_tokens"], 384) and c.meta["fps"] > 0
    train = np.concatenate([c.latent[0].float().flatten(1) for c in clips], 1)
    np.testing.assert_allclose(train.mean(1), m["latent_mean"], atol=0.15)
    assert m["psnr_db"]["images"] > 15
    assert inspect_dataset(prepared, verify=True, samples=0)["faults"] == []


def test_complete_folder_is_left_alone_and_another_data_set_is_refused(prepared, tmp_path, wrong_use):
    """Also when the folder was copied without its records."""
    before = (prepared / "manifest.json").stat().st_mtime_ns
    assert run(prepared) == 0 and (prepared / "manifest.json").stat().st_mtime_ns == before
    shutil.copytree(prepared, tmp_path / "d", ignore=shutil.ignore_patterns(".dfm"))
    assert run(tmp_path / "d") == 0 and not (tmp_path / "d" / ".dfm").exists()
    for folder in (prepared, tmp_path / "d"):
        assert "source.seed" in wrong_use(run, folder, "--seed", "5")


def contents(folder: Path) -> dict[str, bytes]:
    """Whatever a preparation leaves for readers."""
    names = ("*.tar", "*.tar.idx", "*.arrow", "*.safetensors", "split.yaml")
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for name in names for p in folder.rglob(name)}
    manifest = read_json(folder / "manifest.json")
    del manifest["arguments"]["resume"]
    return found | {"manifest": json.dumps(manifest).encode()}


def test_another_number_of_processes_goes_on_to_the_same_bytes_if_asked_to(prepared, tmp_path, wrong_use):
    launch = ["--standalone", "--nproc-per-node=2", "-m", "dfm_nb.prepare", *SMALL]
    done = commands().run("torchrun", *launch, "--output-dir", tmp_path / "d")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {k.split("/")[1] for k in parts(tmp_path / "d")} == {k.split("/")[1] for k in parts(prepared)}
    want = contents(tmp_path / "d")
    for name in ["manifest.json", "checksums.json", *sorted(n for n in want if n.endswith(".tar"))[1:]]:
        (tmp_path / "d" / name).unlink()
    assert "--resume" in wrong_use(run, tmp_path / "d")
    assert run(tmp_path / "d", "--resume") == 0 and contents(tmp_path / "d") == want
    assert run(tmp_path / "d") == 0 and contents(tmp_path / "d") == want  # complete, whoever asks


def captioned(source: Path) -> list[str]:
    """A folder of 12 pictures with two captions and tags each; the words that prepare it in three shards."""
    source.mkdir()
    for i in range(12):
        picture(source / f"{i:02d}.png", height=32 + i)
    said = [{"file": f"{i:02d}.png", "text": [f"picture {i}", "grey noise"], "tags": "grey, noise"} for i in range(12)]
    write_lines(source / "metadata.jsonl", said)
    return f"--source folder:{source} --short-side 32 --shard-size 4 --flip --tag-captions 1 --val-fraction 0".split()


def changed(source: Path, folder: Path) -> None:
    """Other captions: of the list, by hand, of one that cannot be mirrored, of one that is set aside and one without.

    The last shard keeps all of its captions.
    """
    rows = [json.loads(line) for line in (source / "metadata.jsonl").read_text().splitlines()]
    rows[0]["text"], rows[1]["text"] = ["one", "two", "three"], "on the left"
    write_lines(source / "metadata.jsonl", rows[:4] + rows[5:])
    (source / "04.txt").write_text("")
    keys = [e.key for tar in sorted(folder.glob("*.tar")) for e in shards.samples_of(tar)]
    write_edit(folder, Edit(key=next(k for k in keys if k.startswith("02-")), caption="by hand"))
    write_edit(folder, Edit(key=next(k for k in keys if k.startswith("06-")), left_out=True))


@pytest.fixture(scope="module")
def reworded(tmp_path_factory):
    """A prepared folder whose captions have changed since; the words of its preparation; what a new one would hold."""
    place = tmp_path_factory.mktemp("texts")
    argv = captioned(place / "source")
    assert run(place / "data", argv=argv) == 0
    changed(place / "source", place / "data")
    shutil.copytree(place / "data", place / "new")
    assert run(place / "new", "--overwrite", "--tokenizer-path", str(place / "data"), argv=argv) == 0
    return place / "data", argv, parts(place / "new")


def test_texts_only_follows_captions_and_keeps_latents(reworded, tmp_path, wrong_use):
    folder = shutil.copytree(reworded[0], tmp_path / "d")
    before = parts(folder)
    assert "--texts-only" in wrong_use(run, folder, argv=reworded[1])
    last = (folder / "rank0-000002.tar").stat().st_mtime_ns
    assert run(folder, "--texts-only", argv=reworded[1]) == 0
    now = parts(folder)
    assert now == reworded[2] != before
    assert all(now[name] == before[name] for name in now if name.endswith(".pth")), "bit-equal"
    assert (folder / "rank0-000002.tar").stat().st_mtime_ns == last, "unchanged shards are not written"
    counts = read_json(folder / "manifest.json")["counts"]
    assert counts["samples"] == 24 - 5 and counts["dropped_by_reason"] == {
        "no_caption": 1,
        "left_out": 1,
        "not_mirrored": 1,
    }
    assert inspect_dataset(folder, verify=True, samples=0)["faults"] == []
    assert run(folder, argv=reworded[1]) == 0, "complete"
    assert run(folder, "--texts-only", argv=reworded[1]) == 0 and parts(folder) == now
    assert run(folder, "--texts-only", "--max-text-tokens", "9", argv=reworded[1]) == 2
    assert run(tmp_path / "none", "--texts-only", argv=reworded[1]) == 2


@pytest.mark.parametrize(
    "fatal, words", list(enumerate([["--texts-only"], ["--resume"]] * 2 + [["--texts-only"]])), ids=str
)
def test_texts_only_that_was_killed_goes_on(reworded, tmp_path, monkeypatch, fatal, words):
    """After the plan, and between each of two shards and its record."""
    folder, left = shutil.copytree(reworded[0], tmp_path / "d"), [fatal]
    replace = files.os.replace

    def dying(*paths):
        replace(*paths)
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(files.os, "replace", dying)
        prepare.main([*reworded[1], "--output-dir", str(folder), "--texts-only"])
    assert not (folder / "checksums.json").exists() and not list(folder.glob(".*.tmp"))
    assert run(folder, *words, argv=reworded[1]) == 0
    assert parts(folder) == reworded[2]
    assert inspect_dataset(folder, verify=True, samples=0)["faults"] == []
    counts = read_json(folder / "manifest.json")["counts"]
    assert counts["dropped_by_reason"]["not_mirrored"] == 1


def test_preparation_that_failed_before_any_work_does_not_claim_the_folder(tmp_path):
    wrong = ["--tokenizer", "cosmos_cv", "--tokenizer-cache-dir", str(tmp_path)]
    assert run(tmp_path / "d", *wrong) == 2 and not (tmp_path / "d").exists()
    assert run(tmp_path / "d", "--tokenizer", "pca", "--num-images", "4") == 0


# ---- bad input ----------------------------------------------------------------------------------------------------


def picture(path: Path, width=40, height=40):
    Image.fromarray(noise(height, width)).save(path)


def test_unusable_and_cropped_files_are_counted_and_named(tmp_path, monkeypatch, capsys):
    """The manifest names the first ones, and one of each reason; all sizes are said."""
    monkeypatch.setattr(preparation, "NAMED_DROPS", 2)
    source = tmp_path / "in"
    source.mkdir()
    for i in range(14):
        picture(source / f"good_{i:02}.png", height=48 + 16 * i, width=48 + 16 * i)
    picture(source / "silent.png")
    (source / "silent.txt").write_text("")
    (source / "broken.png").write_bytes(b"\x89PNG nothing")
    for i in range(3):
        picture(source / f"narrow_{i}.png", width=12)
    picture(source / "wide.png", width=104)
    flags = "--short-side 512 --tokenizer pca --val-fraction 0".split()
    assert run(tmp_path / "d", argv=["--source", f"folder:{source}", *flags]) == 0
    prepared = capsys.readouterr().err
    assert InspectOptions.main([str(tmp_path / "d"), "--samples", "0"]) == 0
    for said in (prepared, capsys.readouterr().out):
        assert "15 images, 0 clips" in said and "1x256x256 (1)" in said and "1x48x112 (1)" in said
    m = read_json(tmp_path / "d" / "manifest.json")
    assert [(x["key"].split("-")[0], x["reason"]) for x in m["lost"]] == [("wide", "cropped_over_5%")]
    assert (
        m["counts"]["samples"] == 15 and m["counts"]["dropped"] == sum(m["counts"]["dropped_by_reason"].values()) == 5
    )
    assert [d["key"].split("-")[0] for d in m["drops"]] == ["broken", "narrow_0", "silent"]
    assert "broken.png" in m["drops"][0]["detail"] and "silent.txt" in m["drops"][2]["detail"]


@pytest.mark.parametrize(
    "words, named",
    [
        ("synthetic --val-fraction 0.6 --test-fraction 0.5", "--val-fraction"),
        ("synthetic --resume --overwrite", "--overwrite"),
        ("synthetic --tag-captions 2", "--tag-captions"),
        ("synthetic --tokenizer-window 17", "cosmos_cv"),
        ("synthetic --tokenizer cosmos_cv --tokenizer-window 50", "1 + 4k"),
        ("syntetic", "'synthetic'"),
    ],
)
def test_mistakes_are_named(tmp_path, wrong_use, words, named):
    error = wrong_use(run, tmp_path / "d", argv=["--source", *words.split()]).strip().splitlines()[-1]
    assert error.startswith("error: ") and named in error


FOREIGN = ("backup.tar", "2024/rank0-1.tar", "my.index.arrow", "contact_sheet.png", ".nv-meta/a.yaml", ".a.docx.tmp")


def test_only_what_the_records_of_a_preparation_name_is_overwritten(prepared, tmp_path, wrong_use):
    shutil.copytree(prepared, tmp_path / "ours")
    for file in (tmp_path / folder / name for folder in ("d", "ours") for name in FOREIGN):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"precious")
    for more in (["--overwrite"], []):
        assert f"{tmp_path / 'd'} holds" in wrong_use(run, tmp_path / "d", *more)
    assert run(tmp_path / "ours", "--overwrite", "--seed", "5") == 0
    assert (tmp_path / "ours" / "rank0-000000.tar").read_bytes() != (prepared / "rank0-000000.tar").read_bytes()
    assert all((tmp_path / folder / name).read_bytes() == b"precious" for folder in ("d", "ours") for name in FOREIGN)


def test_a_folder_is_resumed_or_complete_with_the_same_encoders_alone(prepared, tmp_path, wrong_use, monkeypatch):
    folder, weights = shutil.copytree(prepared, tmp_path / "d"), str(minilm.find_weights())
    (folder / ".dfm" / "encoders.json").unlink()  # the manifest has them too
    assert run(folder, "--text-encoder-path", weights) == 0
    monkeypatch.setattr(minilm, "_checksum", lambda file: "0" * 64)
    assert "text_encoder" in wrong_use(run, folder, "--text-encoder-path", weights)
    shutil.copy(prepared / ".dfm" / "encoders.json", folder / ".dfm")
    (folder / "checksums.json").unlink()
    assert "text_encoder" in wrong_use(run, folder, "--text-encoder-path", weights, "--resume")


def test_second_preparation_waits_for_the_first(tmp_path):
    def enter():
        with PreparedFolder(tmp_path).turn():
            pass

    second = threading.Thread(target=enter)
    with PreparedFolder(tmp_path).turn():
        second.start()
        second.join(0.5)
        assert second.is_alive()
    second.join(60)
    assert not second.is_alive()


# ---- a tuned tokenizer --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def magenta(tmp_path_factory):
    """The words that prepare 24 pictures of colours that `residual` does not know, tuned for 3 seconds."""
    source = tmp_path_factory.mktemp("magenta")
    for i in range(24):
        Image.new("RGB", (32, 32), (255 - i, 0, 255)).save(source / f"{i:02}.png")
    return ["--source", f"folder:{source}", "--short-side", "32", "--tokenizer", "residual", "--fit-tokenizer", "0.05"]


def test_a_tuned_tokenizer_is_better_keeps_the_latents_and_is_tuned_once(
    magenta, tmp_path, monkeypatch, capsys, wrong_use
):
    folder, module = tmp_path / "d", plugins.load("tokenizers", "residual")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "tune", Mock(side_effect=KeyboardInterrupt))
        prepare.main([*magenta, "--output-dir", str(folder)])
    assert not (folder / "tokenizer.safetensors").exists()
    assert run(folder, "--resume", argv=magenta) == 0
    assert "before tuning" in (printed := capsys.readouterr().err) and "after tuning" in printed
    assert run(tmp_path / "plain", argv=magenta[:-2]) == 0
    now, plain = (read_json(f / "manifest.json") for f in (folder, tmp_path / "plain"))
    assert now["psnr_db"]["images"] > plain["psnr_db"]["images"] + 1
    assert now["tokenizer"]["latents"] == plain["tokenizer"]["sha256"] != now["tokenizer"]["sha256"]
    assert parts(folder) == parts(tmp_path / "plain"), "the latents are the same"
    assert different_encoders(tmp_path / "plain", folder) == []
    assert run(tmp_path / "reused", "--reuse", str(folder), argv=magenta[:-2]) == 0
    assert parts(tmp_path / "reused") == parts(folder)
    (folder / "checksums.json").unlink()
    monkeypatch.setattr(module, "tune", Mock(side_effect=AssertionError))
    assert run(folder, "--resume", argv=magenta) == 0
    assert read_json(folder / "manifest.json")["tokenizer"] == now["tokenizer"]
    assert "fit_tokenizer" in wrong_use(run, folder, "--fit-tokenizer", "1", argv=magenta)


def test_without_held_out_samples_nothing_is_tuned(magenta, tmp_path, capsys):
    assert run(tmp_path / "d", "--val-fraction", "0", argv=magenta) == 0
    assert "held-out samples" in capsys.readouterr().err
    packaged = plugins.load("tokenizers", "residual").build().identity()["sha256"]
    assert read_json(tmp_path / "d" / "manifest.json")["tokenizer"]["sha256"] == packaged


def test_a_tuning_that_brings_nothing_is_not_used(magenta, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        plugins.load("tokenizers", "residual"), "tune", lambda tokenizer, *_: tokenizer.decoder.up.weight.zero_()
    )
    assert run(tmp_path / "d", argv=magenta) == 0 and "nothing" in capsys.readouterr().err
    assert "latents" not in read_json(tmp_path / "d" / "manifest.json")["tokenizer"]


def test_only_a_tokenizer_that_can_be_tuned_is_tuned(magenta, tmp_path, wrong_use):
    assert "general" in wrong_use(run, tmp_path / "d", "--tokenizer", "pca", argv=magenta)
