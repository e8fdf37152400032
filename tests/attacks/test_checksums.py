"""Damage to any file of a checkpoint is found in every form of its path, and named; the one before it is used."""

import shutil

import pytest

from dfm_nb.base.files import seal
from dfm_nb.checkpoints import folders, loading
from tests.attacks.checkpoint_files import NAME, copy_run
from tests.json_files import read_json
from tests.refusals import refused

CHECKSUMS = folders.CHECKSUMS


@pytest.fixture
def folder(tmp_path):
    """The newer of two checkpoints of a run."""
    old = copy_run(tmp_path / "run")
    return shutil.copytree(old, old.with_name("iter_0000006"))


def why_refused(folder) -> str:
    return str(refused(str(folder), folders.verify, folder, error=folders.CheckpointError))


FILES = "checksums.json config.yaml state.json index.json rank-00000.safetensors manifest.json".split()
FILES += ["tokenizer.safetensors", "text_empty.safetensors"]


@pytest.mark.parametrize("file", FILES)
def test_flipped_byte_is_found_in_every_form_of_the_path(folder, file, caplog):
    run, content = folder.parents[1], bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 4
    (folder / file).write_bytes(content)
    assert file in why_refused(folder) or file == CHECKSUMS  # a flipped name in it is that of a file which is missing
    if file != "rank-00000.safetensors":
        return
    for form in (".", "checkpoints"):
        caplog.clear()
        assert folders.find(run / form).name == NAME
        assert sum(file in said for said in caplog.messages) == 1
    for form in ("iter_0000006", "iter_6"):
        refused("iter_0000006", folders.find, run / "checkpoints" / form, error=folders.CheckpointError)
    shutil.rmtree(run / "checkpoints" / NAME)
    refused(str(run), folders.find, run, error=folders.CheckpointError)


ODD = ["", "{}", "[]", '{"a": 1}', '{"a": {"bytes": 1}}', "[" * 100_000, '{"../x": {}}', "\xff"]


@pytest.mark.parametrize("text", ODD, ids=lambda t: t[:12] or "empty")
def test_odd_listing_is_one_sentence(folder, text):
    (folder / CHECKSUMS).write_bytes(text.encode("latin-1"))
    why_refused(folder)


@pytest.mark.parametrize("file", ["index.json", "state.json", "rank-00000.safetensors"])
def test_entry_cannot_be_taken_out(folder, file):
    files = read_json(folder / CHECKSUMS)
    del files[CHECKSUMS], files[file]
    seal(folder / CHECKSUMS, files)
    assert file in why_refused(folder)


def test_unfinished_newest_one_is_named(folder, caplog):
    (folder / CHECKSUMS).unlink()
    assert folders.find(folder.parents[1]).name == NAME
    assert sum("iter_0000006 is incomplete" in said for said in caplog.messages) == 1


def test_run_finds_its_checkpoints_where_its_configuration_put_them(folder, tmp_path, caplog):
    """Of another version, which has more keys; a relative path would lead elsewhere, so the run wrote a whole one."""
    run, saved = folder.parents[1], folder.parent.rename(tmp_path / "saved")
    text = (run / "config.yaml").read_text().replace("checkpoint_dir: null", f"checkpoint_dir: {saved}\n  newer: 1")
    (run / "config.yaml").write_text(text)
    assert folders.find(run) == saved / folder.name
    assert loading.settings_of(run) == loading.settings_of(saved)
    assert any("checkpoint.newer" in message for message in caplog.messages)
