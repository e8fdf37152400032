"""A data set on a server: the same samples as from the disk, whole files only, bounded space, what a server may do."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from dfm_nb.data.prepared_folder import seal_folder
from dfm_nb.data.remote import OWN, RemoteFolder
from dfm_nb.data.stores import ShardStore
from tests import tiny_run
from tests.processes import commands
from tests.refusals import refused
from tests.servers import Quiet, serving
from tests.test_train import losses


class Handler(Quiet):
    """Serves a folder; `server.faults` lists what happens first to each file, `server.sent` the bytes of whole ones."""

    def do_GET(self):
        server = self.server
        if server.down:
            return self.send_error(503)
        name = self.path.lstrip("/")
        with server.lock:
            faults = server.pending.setdefault(name, list(server.faults))
            fault = faults.pop(0) if faults else None
        path = Path(self.translate_path(self.path))
        if fault == "busy":
            return self.send_error(503)
        if fault == "page" or not path.is_file():
            return self.send_error(404 if fault is None else 500)
        body = path.read_bytes()
        if fault == "false":
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
        if fault == "cut":
            return self.connection.close()
        with server.lock:
            server.sent[name] = server.sent.get(name, 0) + len(body)
            shards_sent = sum(n.endswith(".tar") for n in server.sent)
            server.down = server.down or shards_sent >= server.shards_before_down


@pytest.fixture
def place(shards_of_four, tmp_path):
    return shutil.copytree(shards_of_four, tmp_path / "served")


@pytest.fixture
def server(place, monkeypatch):
    monkeypatch.setattr("dfm_nb.data.sources._location.PAUSES_S", [0.01] * 4)
    monkeypatch.setattr(ShardStore, "cache_bytes", 0)
    own = {"faults": [], "pending": {}, "sent": {}, "lock": threading.Lock(), "down": False, "shards_before_down": 1000}
    with serving(partial(Handler, directory=str(place)), **own) as httpd:
        yield httpd


def open_remote(server, cache, cache_gib=64.0):
    remote = RemoteFolder(server.url, cache, cache_gib)
    return remote, ShardStore(remote.folder, remote=remote)


def tars(cache: Path) -> list[Path]:
    return sorted((cache / OWN).rglob("*.tar"))


def same(a, b, indices) -> bool:
    return all(a.read(i).key == b.read(i).key and a.read(i).latent.equal(b.read(i).latent) for i in indices)


# ---- what it gives ------------------------------------------------------------------------------------------------


def test_samples_are_those_of_the_folder_and_few_bytes_are_read_in_vain(server, place, tmp_path):
    _, store = open_remote(server, tmp_path / "cache", cache_gib=1)
    local = ShardStore(place)
    assert store.fingerprint == local.fingerprint and len(store) == len(local)
    assert same(store, local, range(len(local)))
    used = sum(local.entry(i).size for i in range(len(local)))
    sent = sum(n for name, n in server.sent.items() if name.endswith(".tar"))
    assert sent == sum((place / s.name).stat().st_size for s in local.shards)
    assert sent < 1.3 * used  # a tar's own headers


def test_readers_at_once_fetch_a_shard_once(server, tmp_path):
    opened = [open_remote(server, tmp_path / "cache") for _ in range(6)]
    with ThreadPoolExecutor(12) as pool:
        keys = list(pool.map(lambda n: opened[n % 6][1].read(n // 6).key, range(6 * len(opened[0][1]))))
    assert keys[::6] == opened[0][1].keys
    sizes = {p.name: p.stat().st_size for p in tars(tmp_path / "cache")}
    assert {n: server.sent[n] for n in sizes} == sizes


def test_space_is_bounded_and_only_our_own_files_go(server, place, tmp_path, caplog):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "mine.tar").write_bytes(b"not of a server")
    room = 2.5 * max(p.stat().st_size for p in place.glob("*.tar"))
    _, store = open_remote(server, cache, cache_gib=room / 2**30)
    local, most = ShardStore(place), 0
    for i in [*range(len(local)), *range(len(local))]:
        assert store.read(i).key == local.read(i).key
        most = max(most, sum(p.stat().st_size for p in tars(cache)))
    assert most <= room and len(tars(cache)) < len(local.shards)
    assert (cache / "mine.tar").read_bytes() == b"not of a server"
    assert caplog.text.count("raise dataset.cache_gib") == 1
    refused("dataset.cache_gib", open_remote, server, tmp_path / "tiny", cache_gib=1e-6)


def test_a_data_set_that_has_changed_is_another(server, place, tmp_path):
    first, _ = open_remote(server, tmp_path / "cache")
    whole = (place / "checksums.json").read_bytes()
    other = b"1" if whole[-20:-19] == b"0" else b"0"
    (place / "checksums.json").write_bytes(whole[:-20] + other + whole[-19:])
    refused(r"checksums\.json", open_remote, server, tmp_path / "cache")
    (place / "manifest.json").write_text((place / "manifest.json").read_text() + "\n")
    seal_folder(place, {name: entry for name, entry in json.loads(whole).items() if name.endswith(".tar")})
    second, store = open_remote(server, tmp_path / "cache")
    assert first.folder != second.folder and store.read(0)


# ---- what a server may do -----------------------------------------------------------------------------------------


def test_faults_that_pass_cost_attempts_and_nothing_else(server, place, tmp_path):
    server.faults = ["busy", "cut", "page"]
    _, store = open_remote(server, tmp_path / "cache")
    assert same(store, ShardStore(place), range(len(store)))
    for tar in tars(tmp_path / "cache"):
        assert tar.read_bytes() == (place / tar.name).read_bytes()
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.name.endswith(".tmp")]


@pytest.mark.parametrize("fault, said", [("busy", "503"), ("cut", "could not be fetched"), ("false", "checksums.json")])
def test_faults_that_stay_are_named_and_leave_no_file(server, tmp_path, fault, said):
    _, store = open_remote(server, tmp_path / "cache")
    last = len(store) - 1
    server.faults, server.pending = [fault] * 9, {}
    assert server.url in str(refused(said, store.read, last))
    held = tars(tmp_path / "cache")
    assert held and store.entry(last).shard not in held
    server.faults, server.pending = [], {}
    assert store.read(last)


@pytest.mark.parametrize("name", ["train.index.arrow", "manifest.json", "checksums.json"])
def test_folder_that_lacks_a_file_names_it(server, place, tmp_path, name):
    (place / name).unlink()
    refused(name, open_remote, server, tmp_path / "a")


# ---- training -----------------------------------------------------------------------------------------------------


def pretrain(*words):
    return commands().run("dfm", "pretrain", "--recipe", "demo", *words)


@pytest.mark.slow
def test_training_from_a_server_equals_that_from_the_disk_and_ends_in_a_sentence(server, place, tmp_path):
    settings = [*tiny_run.SIZE, "train.train_iters=4", "logger.log_interval=1", "validation.samples=false"]
    settings += ["checkpoint.save_interval=1", "train.eval_interval=2"]
    assert pretrain("--dataset-path", place, "--run-dir", tmp_path / "disk", *settings).returncode == 0
    settings.append(f"dataset.cache_dir={tmp_path / 'cache'}")
    words = ["--dataset-path", server.url, "--run-dir", tmp_path / "net", *settings]
    server.shards_before_down = 4
    broken = pretrain(*words)
    assert broken.returncode == 2 and "503" in broken.stderr and "Traceback" not in broken.stderr, broken.stderr
    server.down, server.shards_before_down = False, 1000
    done = pretrain(*words)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "net") == losses(tmp_path / "disk") and len(losses(tmp_path / "net")) == 4
    assert (tmp_path / "net" / "checkpoints" / "iter_0000004" / "tokenizer.safetensors").is_file()
