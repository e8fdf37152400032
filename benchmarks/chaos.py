"""`make chaos`: preparation, training and text under kills, full disks and damaged files.

    python benchmarks/chaos.py [--kills 100] [--seed 0] [--output-dir DIR]

Kills. The real commands on two processes are ended by SIGKILL and started again until they are done. The victim is
every process at once, one rank (the others must end by themselves, and the command must name it), or the launcher (its
processes must be gone within five seconds). A third of the instants lie in start-up, the others evenly over the work,
half of them where a file is being written. The end must equal the uninterrupted one, bit for bit: losses of training,
shards of a preparation, .bin and .idx of text. What lies under a final name in between must be whole.

Full disks. Each command on file systems from too small to almost large enough (limits on the size of files where none
can be mounted): one sentence, no temporary, the last good output stays. With room, the same command ends the same.

Damage. Every file of a checkpoint and of a data folder, in several ways: reading it is refused by name, leaves samples
out by name, falls back by name, or gives what the whole files give. Writes results/chaos.{json,md}.
"""

import contextlib
import functools
import io
import json
import logging
import multiprocessing
import multiprocessing.context
import os
import pkgutil
import random
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import dfm_nb
from benchmarks import report
from dfm_nb.base.argv import USER_ERRORS
from dfm_nb.base.metrics import read_metrics

VICTIMS, KINDS = ("every process", "one rank", "launcher"), ("start-up", "work", "writing")
SHARES = {"prepare": 0.22, "train": 0.3, "text": 0.48}
"""Of the kills."""

IMPORTED_LATE = "torch._dynamo torch.distributed.run torch.utils.tensorboard matplotlib.pyplot megatron.energon.flavors"
GONE_S = 5
"""Within which no process of a killed launcher is left."""

END_S = 60
"""Within which a command ends that has lost a rank."""


# ---- the three commands -------------------------------------------------------------------------------------------


@dataclass
class Area:
    """A command, and what its output folder says."""

    name: str
    words: str  # after `dfm`, with "FOLDER" for the output's
    total: int  # of `done`
    done: Callable[[Path], int]  # steps, shards or documents
    writing: tuple[str, ...]  # names of files that are being written
    result: Callable[[Path], dict]  # what must be equal at the end
    damaged: Callable[[Path, dict], list[str]]  # what lies under a final name and is not whole, given that result
    round: int  # kills until it is done and begun again

    def command(self, folder: Path) -> list[str]:
        return f"-m dfm_nb {self.words}".replace("FOLDER", str(folder)).split()

    def written(self, folder: Path) -> set[str]:
        """Files that are being written, with their inodes, as the next life uses the same names."""
        found = set()
        for path in (p for pattern in self.writing for p in folder.glob(pattern)):
            with contextlib.suppress(FileNotFoundError):
                found.add(f"{path.name} {path.stat().st_ino}")
        return found


def files(folder: Path, *patterns: str) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for pattern in patterns for p in folder.glob(pattern)}


def differing(*patterns: str) -> Callable[[Path, dict], list[str]]:
    return lambda d, wanted: [f"{n} is not whole" for n, v in files(d, *patterns).items() if wanted.get(n) != v]


def manifest_and_files(folder: Path) -> dict:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("arguments")  # they have the folder's name
    found = files(folder, "*.tar", "*.tar.idx", "*.index.arrow", "*.safetensors", ".nv-meta/*.yaml")
    return {**found, "manifest.json": manifest}


def preparation(images: int = 60, clips: int = 6) -> Area:
    size = f"--num-images {images} --num-clips {clips} --short-side 32 --shard-size 4"
    return Area(
        name="prepare",
        words=f"prepare --source synthetic {size} --output-dir FOLDER --resume --nproc-per-node=2",
        total=(images + clips) // 4,
        done=lambda d: len(list(d.glob(".dfm/rank*.json"))),
        writing=("*.tmp", ".*.tmp", ".dfm/.*.tmp", ".nv-meta"),
        result=manifest_and_files,
        damaged=differing("*.tar", "*.safetensors"),
        round=8,
    )


def training(iterations: int, data: str) -> Area:
    """data : the flags that say what is trained on."""
    size = "model.num_layers=2 model.hidden_size=48 model.num_attention_heads=4 dataset.task_encoder_seq_length=160"
    often = "train.eval_interval=0 checkpoint.save_interval=3 checkpoint.keep_last=3 logger.log_interval=50"
    given = f"{data} {size} {often} train.train_iters={iterations}"
    return Area(
        name="train",
        words=f"pretrain --recipe demo {given} --run-dir FOLDER --nproc-per-node=2",
        total=iterations,
        done=last_iteration,
        writing=("checkpoints/iter_*.tmp",),
        result=lambda d: {r["iteration"]: r["loss"] for r in read_metrics(d / "metrics.jsonl") if "loss" in r},
        damaged=damaged_checkpoints,
        round=15,
    )


def text(place: Path, documents: int = 6_000) -> Area:
    """On the source of Python's standard library, which is text that is there."""
    from benchmarks.text_preprocess import train_tokenizer

    corpus, tokenizer = place / f"corpus{documents}.jsonl", place / "tokenizer"
    report.write_library(corpus, documents * 0.002)
    if not tokenizer.exists():
        train_tokenizer(tokenizer, corpus, 2000)
    flags = f"--input {corpus} --tokenizer-model {tokenizer} --chunk-size 50 --append-eod --workers 2"
    return Area(
        name="text",
        words=f"text preprocess {flags} --output-prefix FOLDER/c",
        total=len(corpus.read_text(encoding="utf-8").splitlines()),
        done=documents_done,
        writing=("*.unfinished/*.idx", "*.unfinished/*.meta.json"),
        result=lambda d: files(d, "*.bin", "*.idx"),
        damaged=differing("*.bin", "*.idx"),
        round=10,
    )


def last_iteration(run: Path) -> int:
    """Of the last whole line of metrics.jsonl; 0 without one."""
    with contextlib.suppress(OSError, IndexError):
        return json.loads((run / "metrics.jsonl").read_bytes().split(b"\n")[-2])["iteration"]
    return 0


def documents_done(folder: Path) -> int:
    with contextlib.suppress(OSError, KeyError):  # KeyError: before the first document
        return json.loads((folder / "c.unfinished/progress.json").read_text())["progress"]["counts"]["documents"]
    return 0


def damaged_checkpoints(run: Path, _: dict) -> list[str]:
    from dfm_nb.checkpoints import folders

    found = []
    for folder in (run / "checkpoints").glob("iter_*[0-9]"):
        try:
            folders.verify(folder)
        except folders.CheckpointError as error:
            found.append(str(error))
    return found


# ---- a life -------------------------------------------------------------------------------------------------------


class Forked(subprocess.Popen):
    """A worker that torchrun's agent forks instead of starting another Python: the same but for the imports."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest, **more):  # type: ignore[override]
        self.pid = os.fork()
        if not self.pid:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            words = args[args.index("-m") :]
            os._exit(multiprocessing.Process(target=become, args=(words, env))._bootstrap())  # type: ignore[attr-defined]
        self._child_created = True


def become(words: list[str], environment: dict[str, str]) -> None:
    """In a fork: run `python WORDS` in a session of its own, as torchrun's workers have."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(words[1:])
    sys.modules.pop(words[1], None)  # runpy warns of a module that is there already
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def launch(words: list[str], said: str, environment: dict[str, str], limit: int) -> None:
    """In a fork of the server: be the launcher."""
    out = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    subprocess_handler.Popen = Forked  # type: ignore[attr-defined]
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    become(words, environment)


@functools.cache
def server() -> multiprocessing.context.ForkServerContext:
    """Forks launchers after the imports, which it does once."""
    context = multiprocessing.get_context("forkserver")
    ours = [m.name for m in pkgutil.walk_packages(dfm_nb.__path__, "dfm_nb.") if not m.name.endswith("__main__")]
    context.set_forkserver_preload([*ours, *IMPORTED_LATE.split()])
    first = context.Process(target=time.sleep, args=(0,))
    first.start(), first.join()
    return context


class Life:
    """The command on its way, forked after the imports. limit : bytes of its largest file; 0 for none."""

    def __init__(self, command: list[str], said: Path, limit: int = 0):
        self.started = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        said.write_bytes(b"")
        self.process = server().Process(target=launch, args=(command, str(said), environment, limit))
        self.process.start()

    def end(self, limit_s: float | None = None) -> int | None:
        """Wait for its end; the exit code, None when the time is up before."""
        self.process.join(limit_s)
        return self.process.exitcode

    def family(self) -> list[psutil.Process]:
        """The launcher and all below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that do the work: torchrun's by rank, those of text by number."""
        found = []
        for p in self.family()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(p.pid) == p.pid or "--multiprocessing-fork" in p.cmdline():
                    found.append((p.create_time(), p.pid, p))
        return {rank: p for rank, (_, _, p) in enumerate(sorted(found))}

    def wait_for(self, condition: Callable[[], object] = lambda: False, limit_s: float = 240) -> None:
        """Until the condition holds, the life ends or the time is up."""
        deadline = time.monotonic() + limit_s
        while not condition() and self.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.008)

    def kill(self, victim: str, ranks: dict[int, psutil.Process], rng: random.Random) -> dict[str, Any]:
        """What came of it: rank (of the victim), exit code, seconds until all were gone, faults."""
        family, rank = self.family(), None
        victims = family if victim == "every process" else family[:1]
        if victim == "one rank":
            rank, worker = rng.choice(list(ranks.items()))
            victims = [worker]
        began, faults = time.monotonic(), []
        for p in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        if self.end(END_S) is None:
            faults.append(f"the command did not end within {END_S} s of the loss of rank {rank}")
            self.process.kill()
            self.end()
        left = psutil.wait_procs(family, timeout=GONE_S)[1]
        for p in left:
            faults.append(f"process {p.pid} was left {GONE_S} s after the command's end")
            p.kill()
        gone_s = round(time.monotonic() - began, 2)
        return {"victim": victim, "rank": rank, "code": self.process.exitcode, "gone_s": gone_s, "faults": faults}


def unclear(said: str, rank: int | None) -> list[str]:
    """What is wrong with the words of a command that has lost a rank."""
    wanted = rf"the process of rank {rank} was ended by SIGKILL|a worker ended"
    faults = [] if re.search(wanted, said) else [f"the loss of rank {rank} is not named"]
    return faults + (["a traceback"] if "Traceback" in said else [])


# ---- kills --------------------------------------------------------------------------------------------------------


def uninterrupted(area: Area, folder: Path, said: Path) -> tuple[float, float]:
    """Seconds until the first and after the last piece of work."""
    life = Life(area.command(folder), said)
    life.wait_for(lambda: area.done(folder), 600)
    first_s = time.monotonic() - life.started
    life.wait_for(lambda: area.done(folder) >= area.total, 600)
    last = time.monotonic()
    if life.end():
        raise SystemExit(f"the uninterrupted {area.name} failed: {said.read_text()[-2000:]}")
    return first_s, time.monotonic() - last


def live(life: Life, area: Area, folder: Path, kind: str, goal: int, times: tuple[float, float], rng) -> None:
    """Until it is time for the kill. goal : of `done`; times : of `uninterrupted`."""
    before, written = area.done(folder), area.written(folder)
    life.wait_for(lambda: len(life.ranks()) == 2)
    if kind == "start-up":
        life.wait_for(lambda: area.done(folder) > before, rng.uniform(0.05, 1) * times[0])
        return
    life.wait_for(lambda: area.done(folder) >= min(area.total, max(before + 1, goal)))
    if goal >= area.total:  # text gets its files at its end, where each round has a kill
        life.wait_for(limit_s=rng.uniform(0, times[1]))
    elif kind == "writing" and area.name != "text":
        life.wait_for(lambda: area.written(folder) - written, 20)
    life.wait_for(limit_s=rng.uniform(0, 0.05))


def kills(area: Area, place: Path, count: int, wanted: dict, times: tuple[float, float], rng) -> dict[str, Any]:
    """`count` kills in rounds that each end in `wanted`; what happened at each."""
    plan = [(VICTIMS[i % 3], KINDS[(i + i // 3) % 3]) for i in range(count)]
    rng.shuffle(plan)
    record: list[dict] = []
    faults: list[str] = []
    turn = 0
    while len(record) < count:
        folder, said = place / f"{area.name}{turn}", place / f"{area.name}.txt"
        planned = min(area.round, count - len(record))
        for k in range(planned):
            victim, kind = plan[len(record)]
            before, written = area.done(folder), area.written(folder)
            life = Life(area.command(folder), said)
            live(life, area, folder, kind, area.total * (k + 1) // (planned + 1), times, rng)  # not after the end
            ranks = life.ranks()
            if life.process.exitcode is not None or (victim == "one rank" and not ranks):
                times = times[0], 0.7 * times[1]  # measured when the machine was slower
                break  # nothing is left to kill
            row = life.kill(victim, ranks, rng)
            at = area.done(folder)
            hit = "writing" if area.written(folder) - written else "work" if at > before else "start-up"
            new = [*row.pop("faults"), *area.damaged(folder, wanted)]
            if victim == "one rank" and row["code"]:  # else it had no work left
                new += unclear(said.read_text(errors="replace"), row["rank"])
            faults += [f"{area.name}, kill {len(record) + 1} ({victim}, {hit}): {fault}" for fault in new]
            record.append(row | {"hit": hit, "at": at, "round": turn})
            print(f"{area.name} kill {len(record)}: {victim}, {hit} at {at}", *new, flush=True)
        else:
            life = Life(area.command(folder), said)
        code = life.end()
        if code or area.result(folder) != wanted:
            faults.append(f"{area.name}, round {turn}: " + (f"exit code {code}" if code else "another result"))
        faults += [f"{area.name}, round {turn}: {name} is left" for name in temporaries(folder)]
        turn += 1
    return {"kills": len(record), "rounds": turn, "faults": faults, "each_kill": record}


def temporaries(folder: Path) -> list[str]:
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.name.endswith((".tmp", ".unfinished"))]


# ---- full disks ---------------------------------------------------------------------------------------------------


def full_disks(area: Area, place: Path, clean: Path, wanted: dict, shares: tuple[float, ...]) -> dict[str, Any]:
    """The command on disks of these shares of what it needs; where none can be mounted, with a limit on files."""
    sizes = [-(-p.stat().st_size // 4096) * 4096 if p.is_file() else 4096 for p in clean.rglob("*")]
    faults, reached = [], 0
    for share in shares:
        where, said, new = place / f"{area.name}-disk-{share}", place / f"{area.name}-disk.txt", []
        folder = where / "out"
        where.mkdir()
        mount = ["mount", "-t", "tmpfs", "tmpfs", where, "-o"]
        size = f"size={int(sum(sizes) * share)}"
        mounted = not subprocess.run([*mount, size], capture_output=True).returncode
        folder.mkdir()
        code = Life(area.command(folder), said, 0 if mounted else int(max(sizes) * share)).end()
        words = said.read_text(errors="replace")
        if code:
            reached += 1
            found = {line for line in words.splitlines() if line.startswith("error:")}
            new += [] if len(found) == 1 else [f"{len(found)} sentences, exit code {code}"]
            new += [] if re.search("room|space|full|may not grow", " ".join(found)) else ["no word of the disk"]
            new += ["a traceback"] if "Traceback" in words else []
            new += [f"{n} is left" for n in temporaries(folder) if n.endswith(".tmp")]
        new += area.damaged(folder, wanted)
        if mounted:
            subprocess.run([*mount, "remount,size=4g"], check=True)
        again = Life(area.command(folder), said).end()
        new += [] if not again and area.result(folder) == wanted else ["with room it does not end the same"]
        if mounted:
            subprocess.run(["umount", "-l", where], check=True)
        faults += [f"{area.name} on {share:.0%} of its disk: {fault}" for fault in new]
        print(f"{area.name} on {share:.0%} of its disk: {'; '.join(new) or 'as it must'}", flush=True)
    return {"disks": len(shares), "too_small": reached, "faults": faults}


# ---- damage -------------------------------------------------------------------------------------------------------


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1 << int(at * 1000) % 8
    path.write_bytes(content)


def damages(flips: int, rng: random.Random) -> dict[str, Callable[[Path], object]]:
    """Changes of one file by name."""
    places = [0.0, 1.0, *(rng.random() for _ in range(flips - 2))]
    return {f"a bit flipped at {at:.1%}": functools.partial(flip, at=at) for at in places} | {
        "cut in half": lambda p: os.truncate(p, p.stat().st_size // 2),
        "cut by a byte": lambda p: os.truncate(p, max(0, p.stat().st_size - 1)),
        "empty": lambda p: os.truncate(p, 0),
        "a folder": lambda p: (p.unlink(), p.mkdir()),
        "gone": lambda p: p.unlink(),
    }


def outcome(read: Callable[[], tuple[Any, list[str]]], path: Path, good: Any, less: Callable) -> str:
    """How reading a damaged `path` ends, in one or two words; capitals for what must not be.

    Parameters
    ----------
    read : gives a value and what it said beside the log. good : the value of the undamaged.
    less : how a value is less than the good, given all that was said; "" when it is not told.
    """
    from dfm_nb.base.log import log

    log.addHandler(heard := logging.StreamHandler(io.StringIO()))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            value, said = read()
    except USER_ERRORS as error:
        words = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        named = path.name in words or str(path.parent) in words
        return "refused" if named and "\n" not in words else f"UNNAMED: {words[:200]}"
    except Exception as error:
        return f"TRACEBACK: {type(error).__name__}: {str(error)[:200]}"
    finally:
        log.removeHandler(heard)
    if value == good:
        return "no difference"
    return less(good, value, "\n".join([*heard.stream.getvalue().splitlines(), *said])) or "SILENT"


def read_samples(data: Path) -> tuple[Any, list[str]]:
    """What training takes from a folder: samples, statistics, the empty caption, and what goes into checkpoints."""
    from dfm_nb.base.records import SampleError
    from dfm_nb.checkpoints.folders import read_assets
    from dfm_nb.data.prepared_folder import Encoded
    from dfm_nb.data.stores import ShardStore

    found: dict[str, Any] = {}
    said = []
    for split in ("train", "val"):
        store = ShardStore(data, split, progress=True)
        said += [detail for _, detail in store.dropped]
        for index, key in enumerate(store.keys):
            try:
                clip = store.read(index)
                found[key] = [clip.latent.float().tolist(), clip.text_emb.float().tolist(), clip.meta]
            except SampleError as error:
                said.append(error.detail)
        found[f" {split}"] = [store.statistics.mean.tolist(), store.statistics.std.tolist(), store.empty_text.tolist()]
    assets: dict[str, Any] = {f" {name}": content for name, content in read_assets(data).items()}
    if " manifest.json" in assets:
        said_of_it = json.loads(assets[" manifest.json"])
        assets[" manifest.json"] = {name: said_of_it[name] for name in Encoded.model_fields}
    return found | assets, said


def fewer_samples(good: dict, value: dict, said: str) -> str:
    missing = good.keys() - value.keys()
    same = all(good.get(key) == v for key, v in value.items())
    told = len(said.splitlines()) >= len(missing)
    return "samples left out" if same and told and not any(k.startswith(" ") for k in missing) else ""


def verify(data: Path) -> tuple[Any, list[str]]:
    """`dfm inspect --verify`: its faults."""
    from dfm_nb.inspect import inspect_dataset

    return (faults := inspect_dataset(data, verify=True, samples=0, as_json=True)["faults"]), faults


def weights_of(path: Path) -> tuple[Any, list[str]]:
    """What `dfm generate` loads: the name of the checkpoint and its numbers."""
    from dfm_nb.checkpoints.loading import find_weights
    from dfm_nb.generation.pipeline import Pipeline

    source = find_weights(path)
    pipe = Pipeline.from_checkpoint(source)
    numbers = [p.detach().float().flatten().tolist() for chunk in pipe.chunks for p in chunk.parameters()]
    return [source.identity.get("folder"), numbers], []


def resumed(path: Path) -> tuple[Any, list[str]]:
    """What a resumed training goes on from: the folder and all that is in it."""
    from dfm_nb.checkpoints.folders import usable

    folder = usable(path / "checkpoints")
    return [folder and folder.name, files(folder, "*") if folder else None], []


def damage(data: Path, run: Path, flips: int, rng: random.Random) -> dict[str, Any]:
    """Every file of the folder and of the run's newest checkpoint, in every way; counts and what must not be."""
    counts: dict[str, Counter] = {}
    faults: list[str] = []
    newest = max((run / "checkpoints").glob("iter_*"))

    def before(good: Any, value: Any, said: str) -> str:
        return "the one before" if value[0] not in (None, newest.name) and newest.name in said else ""

    table: dict[str, tuple[Path, Callable, Callable]] = {
        "training on the folder": (data, lambda: read_samples(data), fewer_samples),
        "dfm inspect --verify": (data, lambda: verify(data), lambda good, faults, _: "refused" if faults else ""),
        "generating from the checkpoint": (newest, lambda: weights_of(newest), lambda *_: ""),
        "generating from the run": (newest, lambda: weights_of(run), before),
        "resuming the run": (newest, lambda: resumed(run), before),
    }
    for what, (folder, read, less) in table.items():
        (good, _), found = read(), counts.setdefault(what, Counter())
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in ("lock", "contact_sheet.png")):
            content = path.read_bytes()
            for name, change in damages(flips, rng).items():
                change(path)
                word = outcome(read, path, good, less)
                if path.is_dir():
                    path.rmdir()
                path.write_bytes(content)
                found[word.split(":")[0].lower()] += 1
                if word[:2].isupper():
                    faults.append(f"{what}, {path.relative_to(folder)} {name}: {word}")
        print(f"{what}: {dict(found)}", flush=True)
    return {"cases": {what: dict(found) for what, found in counts.items()}, "faults": faults}


# ---- all of it ----------------------------------------------------------------------------------------------------


def table(r: dict) -> str:
    rows, ends = [], []
    for name, found in r["kills"].items():
        for victim in VICTIMS:
            hit = [k for k in found["each_kill"] if k["victim"] == victim]
            where, slowest = Counter(k["hit"] for k in hit), max((k["gone_s"] for k in hit), default=0)
            rows.append([name, victim, len(hit), *(where[kind] for kind in KINDS), slowest])
        disks = r["disks"][name]
        same = "NO" if found["faults"] else "yes"
        ends.append([name, found["rounds"], same, f"{disks['too_small']} of {disks['disks']}"])
    words = sorted({w for found in r["damage"]["cases"].values() for w in found})
    cases = r["damage"]["cases"].items()
    damaged = [[what, sum(found.values()), *(found.get(w, 0) for w in words)] for what, found in cases]
    total = sum(found["kills"] for found in r["kills"].values())
    parts = [
        f"{total} kills, seed {r['seed']}, commit {r['commit']}, {r['seconds'] / 60:.0f} minutes; "
        f"{report.sentence(r['machine'])}.",
        f"{len(r['faults'])} FAULTS:" if r["faults"] else "No faults.",
        "\n".join(f"- {fault}" for fault in r["faults"]),
        report.table(["area", "SIGKILL to", "kills", *KINDS, "all gone after, s, at most"], rows),
        report.table(["area", "ends after kills", "all as uninterrupted", "disks that were too small"], ends),
        report.table(["reading", "cases", *words], damaged),
    ]
    return "\n\n".join(filter(None, parts))


def main() -> int:
    parser = report.arguments(__doc__, kills=100, seed=0, flips=(8, "bits of each damaged file"))
    args = parser.parse_args()
    machine, began = report.machine(), time.monotonic()
    git = ["git", "-C", str(report.ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    rng, killed, disks = random.Random(args.seed), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data = f"--dataset-path {place}/prepare-short"
        areas = {  # and the same with less to do, for the disks
            "prepare": (preparation(), preparation(24, 4)),
            "train": (training(60, data), training(9, data)),
            "text": (text(place, 6000), text(place, 2000)),
        }
        for name, (area, short) in areas.items():
            clean, less, said = place / name, place / f"{name}-short", place / f"{name}.txt"
            uninterrupted(short, less, said)
            times = uninterrupted(area, clean, said)
            disks[name] = full_disks(short, place, less, short.result(less), (0.02, 0.25, 0.6, 0.95))
            killed[name] = kills(area, place, round(args.kills * SHARES[name]), area.result(clean), times, rng)
        damaged = damage(place / "prepare-short", place / "train-short", args.flips, rng)
    result = {"machine": machine, "commit": commit, "seed": args.seed, "seconds": round(time.monotonic() - began, 1)}
    result |= {"faults": [f for part in (*killed.values(), *disks.values(), damaged) for f in part["faults"]]}
    result |= {"kills": killed, "disks": disks, "damage": damaged}
    report.save("chaos", result, table(result), args.output_dir)
    return int(bool(result["faults"]))


if __name__ == "__main__":
    raise SystemExit(main())
