"""`make chaos`: preparation, training and text under kills, full disks and damaged files.

    python benchmarks/chaos.py [--kills 100] [--seed 0] [--output-dir DIR]

Kills. The real commands on two processes are ended by SIGKILL and started again until they are done. The victim is
every process at once, one rank (the others must end by themselves, and the command must name it), or the launcher (its
processes must be gone within five seconds). Some instants lie in start-up, the others evenly over the work, half of
them where a file is being written. The end must equal the uninterrupted one, bit for bit: losses of training, shards
of a preparation, .bin and .idx of text. What lies under a final name in between must be whole.

Full disks. Each command on file systems from too small to almost large enough (limits on the size of files where none
can be mounted): one sentence, no temporary, the last good output stays. With room, the same command ends the same.

Damage. Every file of a checkpoint and of a data folder, in several ways: reading it is refused by name, leaves samples
out by name, falls back by name, or gives what the whole files give. Writes results/chaos.{json,md}.
"""

from __future__ import annotations

import argparse
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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import dfm_nb
from benchmarks import report
from dfm_nb.base.argv import USER_ERRORS, torchrun_argv
from dfm_nb.base.metrics import read_metrics

VICTIMS = ("every process", "one rank", "launcher")
SHARES = {"prepare": 0.22, "train": 0.3, "text": 0.48}
"""Of the kills."""

IMPORTED_LATE = (
    "torch._dynamo",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
    "transformers.models.auto.modeling_auto",
    "megatron.energon.flavors",
)

GONE_S = 5
"""Within which no process of a killed launcher is left."""

END_S = 60
"""Within which a command ends that has lost a rank."""


# ---- the three commands -------------------------------------------------------------------------------------------


@dataclass
class Area:
    """A command, and what its output folder says."""

    name: str
    words: list[str]  # after `dfm`, with "FOLDER" for the output's
    total: int  # of `done`
    done: Callable[[Path], int]  # steps, shards or documents
    writing: Callable[[Path], set[str]]  # files that are being written
    result: Callable[[Path], dict]  # what must be equal at the end
    damaged: Callable[[Path, dict], list[str]]  # what lies under a final name and is not whole, given that result
    round: int  # kills until it is done and begun anew
    module: str = ""  # that torchrun can start, too

    def command(self, folder: Path, torchrun: bool = False) -> list[str]:
        words = [w.replace("FOLDER", str(folder)) for w in self.words]
        if torchrun:
            return torchrun_argv(self.module, words[1:], 2)
        nproc = ["--nproc-per-node=2"] if self.module else []
        return [sys.executable, "-m", "dfm_nb", words[0], *words[1:], *nproc]


def files(folder: Path, *patterns: str) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for pattern in patterns for p in folder.glob(pattern)}


def names(folder: Path, *patterns: str) -> set[str]:
    """With their inodes, as the next life uses the same names."""
    found = set()
    for path in (p for pattern in patterns for p in folder.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{path.name} {path.stat().st_ino}")
    return found


def differing(*patterns: str) -> Callable[[Path, dict], list[str]]:
    return lambda d, wanted: [f"{n} is not whole" for n, v in files(d, *patterns).items() if wanted.get(n) != v]


def preparation(images: int = 60, clips: int = 6) -> Area:
    def result(folder: Path) -> dict:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest.pop("arguments"), manifest["files"].pop("manifest.json")  # they have the folder's name
        return files(folder, "*.tar", "*.tar.idx", "*.index.arrow", "*.safetensors", ".nv-meta/*.yaml") | {
            "manifest.json": manifest
        }

    size = ["--num-images", str(images), "--num-clips", str(clips), "--short-side", "32", "--shard-size", "4"]
    return Area(
        name="prepare",
        words=["prepare", "--source", "synthetic", *size, "--output-dir", "FOLDER", "--resume"],
        total=(images + clips) // 4,
        done=lambda d: len(list(d.glob(".dfm/rank*.json"))),
        writing=lambda d: names(d, "*.tmp", ".*.tmp", ".dfm/.*.tmp", ".nv-meta"),
        result=result,
        damaged=differing("*.tar", "*.safetensors"),
        round=8,
        module="dfm_nb.prepare",
    )


def training(iterations: int, data: list[str]) -> Area:
    """data : the flags that say what is trained on."""
    size = ["model.num_layers=2", "model.hidden_size=48", "model.num_attention_heads=4", "train.eval_interval=0"]
    often = ["checkpoint.save_interval=3", "checkpoint.keep_last=3", "logger.log_interval=50"]
    steps = ["dataset.task_encoder_seq_length=160", f"train.train_iters={iterations}"]
    return Area(
        name="train",
        words=["pretrain", "--recipe", "demo", *data, *size, *often, *steps, "--run-dir", "FOLDER"],
        total=iterations,
        done=last_iteration,
        writing=lambda d: names(d, "checkpoints/iter_*.tmp"),
        result=lambda d: {r["iteration"]: r["loss"] for r in read_metrics(d / "metrics.jsonl") if "loss" in r},
        damaged=damaged_checkpoints,
        round=15,
        module="dfm_nb.train",
    )


def text(place: Path, documents: int = 6_000) -> Area:
    """On the source of Python's standard library, which is text that is there."""
    from benchmarks.text_preprocess import train_tokenizer

    corpus, library = place / f"corpus{documents}.jsonl", sorted(Path(os.__file__).parent.glob("**/*.py"))
    written = 0
    with corpus.open("w", encoding="utf-8") as out:
        while written < documents:
            for path in library:
                source = path.read_text(encoding="utf-8", errors="replace")
                for start in range(0, len(source), 2000):
                    out.write(json.dumps({"text": source[start : start + 2000]}) + "\n")
                    written += 1
                if written >= documents:
                    break
    tokenizer = place / "tokenizer"
    if not tokenizer.exists():
        (few := place / "few.jsonl").write_text("".join(corpus.open(encoding="utf-8").readlines()[:2000]))
        train_tokenizer(tokenizer, few, 2000)
    flags = ["--input", str(corpus), "--tokenizer-model", str(tokenizer), "--chunk-size", "100"]
    return Area(
        name="text",
        words=["text", "preprocess", *flags, "--output-prefix", "FOLDER/c", "--append-eod", "--workers", "2"],
        total=written,
        done=documents_done,
        writing=lambda d: names(d, "*.idx.part", "*.meta.json.part"),
        result=lambda d: files(d, "*.bin", "*.idx"),
        damaged=differing("*.bin", "*.idx"),
        round=10,
    )


def last_iteration(run: Path) -> int:
    """Of the last whole line of metrics.jsonl; 0 without one."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            return json.loads(line)["iteration"]
    return 0


def documents_done(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return json.loads((folder / "c.progress.json").read_text())["progress"]["documents"]
    return 0


def damaged_checkpoints(run: Path, _: dict) -> list[str]:
    from dfm_nb.checkpoints import weights

    found = []
    for folder in (run / "checkpoints").glob("iter_*[0-9]"):
        try:
            weights.verify(folder)
        except weights.CheckpointError as error:
            found.append(str(error))
    return found


# ---- a life -------------------------------------------------------------------------------------------------------


class Forked(subprocess.Popen):
    """A worker that torchrun's agent forks instead of starting Python anew: the same but for the imports."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest, **more):  # type: ignore[override]
        self.pid = os.fork()
        if not self.pid:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            become(args[args.index("-m") :], env)
        self._child_created = True


def become(words: list[str], environment: dict[str, str]) -> NoReturn:
    """In a fork: run `python WORDS` in a session of its own, as torchrun's workers have, and end."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    code: object = 1
    try:
        sys.argv = list(words[1:])
        sys.modules.pop(words[1], None)  # runpy warns of a module that is there already
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


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
    context.set_forkserver_preload([*ours, *IMPORTED_LATE])
    first = context.Process(target=time.sleep, args=(0,))
    first.start(), first.join()
    return context


class Life:
    """The command on its way. whole : started as a user does, imports and all; else forked after them.

    limit : bytes of its largest file; 0 for none.
    """

    def __init__(self, command: list[str], said: Path, whole: bool = False, limit: int = 0):
        self.said, self.started = said, time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        said.write_bytes(b"")
        self._process: Any
        if whole:
            with said.open("ab") as out:
                self._process = subprocess.Popen(
                    command, stdout=out, stderr=out, env=environment, start_new_session=True
                )
        else:
            self._process = server().Process(target=launch, args=(command[1:], str(said), environment, limit))
            self._process.start()

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    def end(self, limit_s: float | None = None) -> int | None:
        """Wait for its end; the exit code, None when the time is up before."""
        if isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)
        else:
            self._process.join(limit_s)
        return self.code()

    def family(self) -> list[psutil.Process]:
        """The launcher and all below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
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

    def wait_for(self, condition: Callable[[], object], limit_s: float = 240) -> None:
        """Until the condition holds, the life ends or the time is up."""
        deadline = time.monotonic() + limit_s
        while not condition() and self.code() is None and time.monotonic() < deadline:
            time.sleep(0.008)

    def pause(self, seconds: float) -> None:
        self.wait_for(lambda: False, seconds)

    def kill(self, victim: str, ranks: dict[int, psutil.Process], rng: random.Random) -> dict[str, Any]:
        """What came of it: rank (of the victim), exit code, seconds until all were gone, faults."""
        family, rank = self.family(), None
        if victim == "one rank":
            rank, worker = rng.choice(list(ranks.items()))
            victims = [worker]
        else:
            victims = family if victim == "every process" else family[:1]
        began, faults = time.monotonic(), []
        for p in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        if self.end(END_S) is None:
            faults.append(f"the command did not end within {END_S} s of the loss of rank {rank}")
            self._process.kill()
            self.end()
        left = psutil.wait_procs(family, timeout=GONE_S)[1]
        if left:
            faults.append(f"{len(left)} processes were left {GONE_S} s after the command's end")
        for p in left:
            p.kill()
        gone_s = time.monotonic() - began
        return {"rank": rank, "code": self.code(), "gone_s": round(gone_s, 2), "faults": faults}


def sentences(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error:")]


def unclear(said: str, rank: int | None, torchrun: bool) -> list[str]:
    """What is wrong with the words of a command that has lost a rank."""
    wanted = rf"the process of rank {rank} was ended by SIGKILL|a worker process ended"
    if torchrun:
        wanted += rf"|local_rank: {rank}\b(.*\n)*?.*SIGKILL"
    faults = [] if re.search(wanted, said) else [f"the loss of rank {rank} is not named"]
    # torchrun's own report ends in one
    return faults + (["a traceback"] if "Traceback" in said and not torchrun else [])


# ---- kills --------------------------------------------------------------------------------------------------------


def run_through(command: list[str], said: Path, limit: int = 0) -> int:
    """To the end; the exit code."""
    return Life(command, said, limit=limit).end() or 0


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


def live(
    life: Life,
    area: Area,
    folder: Path,
    victim: str,
    kind: str,
    goal: int,
    times: tuple[float, float],
    rng: random.Random,
) -> None:
    """Until it is time for the kill. goal : of `done`; times : of `uninterrupted`."""
    before, writing = area.done(folder), area.writing(folder)
    life.wait_for(lambda: victim != "one rank" or len(life.ranks()) == 2)
    if kind == "start-up":
        life.wait_for(lambda: area.done(folder) > before, rng.uniform(0.05, 1) * times[0])
        return
    life.wait_for(lambda: area.done(folder) >= max(before + 1, goal) or area.done(folder) >= area.total)
    if goal >= area.total:
        life.pause(rng.uniform(0, times[1]))
    elif kind == "writing":
        life.wait_for(lambda: area.writing(folder) - writing, 20)
        life.pause(rng.uniform(0, 0.06))
    else:
        life.pause(rng.uniform(0, 0.03))


def kills(
    area: Area,
    place: Path,
    count: int,
    wanted: dict,
    times: tuple[float, float],
    rng: random.Random,
    finish: Callable[[list[str], Path], int] = run_through,
) -> dict[str, Any]:
    """`count` kills in rounds that each end in `wanted`; what happened at each."""
    victims = [VICTIMS[i % 3] for i in range(count)]
    often = "writing" if area.module else "work"  # text gets its files at its end, where each round has a kill
    kinds = [("start-up", "work", often, "work", often)[i % 5] for i in range(count)]
    rng.shuffle(victims), rng.shuffle(kinds)
    record: list[dict] = []
    faults: list[str] = []
    turn = 0
    while len(record) < count:
        folder, said = place / f"{area.name}{turn}", place / f"{area.name}.txt"
        planned = min(area.round, count - len(record))
        for k in range(planned):
            i = len(record)
            goal = area.total * (k + 1) // planned
            torchrun, whole = bool(area.module) and i % 4 == 3, i % 10 == 4
            before, writing = area.done(folder), area.writing(folder)
            life = Life(area.command(folder, torchrun), said, whole)
            live(life, area, folder, victims[i], kinds[i], goal, times, rng)
            ranks = life.ranks()
            if life.code() is not None or (victims[i] == "one rank" and not ranks):
                code = life.end()  # nothing is left to kill
                break
            row = {"victim": victims[i], "torchrun": torchrun, "whole": whole, **life.kill(victims[i], ranks, rng)}
            at = area.done(folder)
            hit = "writing" if area.writing(folder) - writing else "work" if at > before else "start-up"
            new = [*row.pop("faults"), *area.damaged(folder, wanted)]
            if row["victim"] == "one rank" and row["code"]:  # else it had no work left
                new += unclear(said.read_text(errors="replace"), row["rank"], torchrun)
            if new:
                shutil.copy(said, place / f"{area.name}-kill{i + 1}.said")
            faults += [f"{area.name}, kill {i + 1} ({victims[i]}, {hit}): {fault}" for fault in new]
            record.append(row | {"hit": hit, "at": at, "round": turn})
            print(f"{area.name} kill {i + 1}: {victims[i]}, {hit} at {at}", *new, flush=True)
        else:
            code = finish(area.command(folder), said)
        if code or area.result(folder) != wanted:
            shutil.copy(said, place / f"{area.name}-round{turn}.said")
            faults.append(f"{area.name}, round {turn}: " + (f"exit code {code}" if code else "another result"))
        faults += [f"{area.name}, round {turn}: {name} is left" for name in temporaries(folder)]
        turn += 1
        print(f"{area.name}: round {turn} done after {len(record)} kills", flush=True)
    return {"kills": len(record), "rounds": turn, "faults": faults, "each_kill": record}


def temporaries(folder: Path) -> list[str]:
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.name.endswith((".tmp", ".part"))]


# ---- full disks ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk(place: Path, size: int, largest: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A file system of `size` bytes at `place`; else a limit on files, in proportion to the `largest`.

    Gives that limit, 0 for none, and a function that makes room.
    """
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o"]
    mounted = not subprocess.run([*mount, f"size={size}", "tmpfs", place], capture_output=True).returncode

    def make_room() -> None:
        if mounted:
            subprocess.run([*mount, "remount,size=4g", "tmpfs", place], check=True)

    try:
        yield (0 if mounted else largest), make_room
    finally:
        if mounted:
            subprocess.run(["umount", "-l", place], check=True)
        shutil.rmtree(place)


def full_disks(area: Area, place: Path, clean: Path, wanted: dict, shares: tuple[float, ...]) -> dict[str, Any]:
    """The command on disks of these shares of what it needs."""
    sizes = [-(-p.stat().st_size // 4096) * 4096 if p.is_file() else 4096 for p in clean.rglob("*")]
    faults, reached = [], 0
    for share in shares:
        where, said = place / f"{area.name}-disk-{share}", place / f"{area.name}-disk.txt"
        folder = where / "out"
        with disk(where, int(sum(sizes) * share), int(max(sizes) * share)) as (limit, make_room):
            folder.mkdir()
            code = run_through(area.command(folder), said, limit)
            words = said.read_text(errors="replace")
            new = []
            if code:
                reached += 1
                found = sentences(words)
                new += [] if len(set(found)) == 1 else [f"{len(set(found))} sentences, exit code {code}"]
                new += [] if re.search("room|space|full|may not grow", " ".join(found)) else ["no word of the disk"]
                new += ["a traceback"] if "Traceback" in words else []
                new += [f"{n} is left" for n in temporaries(folder) if n.endswith(".tmp")]
            new += area.damaged(folder, wanted)
            make_room()
            again = run_through(area.command(folder), said)
            new += [] if not again and area.result(folder) == wanted else ["with room it does not end the same"]
        if new:
            (place / f"{where.name}.said").write_text(words)
        faults += [f"{area.name} on {share:.0%} of its disk: {fault}" for fault in new]
        print(f"{area.name} on {share:.0%} of its disk: {'; '.join(new) or 'as it must'}", flush=True)
    return {"disks": len(shares), "too_small": reached, "faults": faults}


# ---- damage -------------------------------------------------------------------------------------------------------


def flipped(at: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1 << int(at * 1000) % 8
        path.write_bytes(content)

    return change


def made_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damages(flips: int, rng: random.Random) -> dict[str, Callable[[Path], None]]:
    """Changes of one file by name."""
    places = [0.0, 1.0, *(rng.random() for _ in range(flips - 2))]
    return {
        **{f"a bit flipped at {at:.1%}": flipped(at) for at in places},
        "cut in half": lambda p: os.truncate(p, p.stat().st_size // 2),
        "cut by a byte": lambda p: os.truncate(p, max(0, p.stat().st_size - 1)),
        "empty": lambda p: os.truncate(p, 0),
        "a folder": made_folder,
        "gone": lambda p: p.unlink(),
    }


@contextlib.contextmanager
def damaged(path: Path, change: Callable[[Path], None]) -> Iterator[None]:
    """The file is changed within the block and as it was after it."""
    content = path.read_bytes()
    change(path)
    try:
        yield
    finally:
        if path.is_dir():
            path.rmdir()
        path.write_bytes(content)


class Heard(logging.Handler):
    """What the package's logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def outcome(read: Callable[[], tuple[Any, list[str]]], path: Path, good: Any, less: Callable[[Any, str], str]) -> str:
    """How reading a damaged `path` ends, in one or two words; capitals for what must not be.

    Parameters
    ----------
    read : gives a value and what it said beside the log. good : the value of the undamaged.
    less : how a value is less than that, given all that was said; "" when it is not told.
    """
    from dfm_nb.base.log import log

    heard = Heard()
    log.addHandler(heard)
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
    return less(value, "\n".join([*heard.lines, *said])) or "SILENT"


def read_samples(data: Path) -> tuple[Any, list[str]]:
    """What training takes from a folder: samples, statistics, the empty caption, and what goes into checkpoints."""
    from dfm_nb.base.records import SampleError
    from dfm_nb.checkpoints.weights import read_assets
    from dfm_nb.data.prepared_folder import STATISTICS
    from dfm_nb.data.stores import EnergonStore

    found: dict[str, Any] = {}
    said = []
    for split in ("train", "val"):
        store = EnergonStore(data, split, progress=True)
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
        assets[" manifest.json"] = {name: said_of_it[name] for name in (*STATISTICS, "tokenizer", "text_encoder")}
    return found | assets, said


def fewer_samples(good: dict) -> Callable[[Any, str], str]:
    def less(value: Any, said: str) -> str:
        missing = good.keys() - value.keys()
        if "has no manifest.json" in said or "tokenizer.safetensors is gone" in said:
            return "named, and goes on"
        same = all(good.get(key) == v for key, v in value.items())
        told = len(said.splitlines()) >= len(missing)
        return "samples left out" if same and told and not any(k.startswith(" ") for k in missing) else ""

    return less


def verify(data: Path) -> tuple[Any, list[str]]:
    """`dfm inspect --verify`: its faults."""
    from dfm_nb.inspect import inspect_dataset

    faults = inspect_dataset(data, verify=True, samples=0, json=True)["faults"]
    return faults, faults


def weights_of(path: Path) -> tuple[Any, list[str]]:
    """What `dfm generate` loads: the name of the checkpoint and its numbers."""
    from dfm_nb.checkpoints.weights import find_weights
    from dfm_nb.generation.pipeline import Pipeline

    source = find_weights(path)
    pipe = Pipeline.from_checkpoint(source)
    numbers = [p.detach().float().flatten().tolist() for chunk in pipe.chunks for p in chunk.parameters()]
    return [source.identity.get("folder"), numbers], []


def resumed(path: Path) -> tuple[Any, list[str]]:
    """What a resumed training goes on from: the folder and all that is in it."""
    from dfm_nb.base.log import log
    from dfm_nb.checkpoints.weights import usable

    folder = usable(path / "checkpoints", log.warning)
    return [folder and folder.name, files(folder, "*") if folder else None], []


def damage(data: Path, run: Path, flips: int, rng: random.Random) -> dict[str, Any]:
    """Every file of the folder and of the run's newest checkpoint, in every way; counts and what must not be."""
    counts: dict[str, Counter] = {}
    faults: list[str] = []
    newest = max((run / "checkpoints").glob("iter_*"))

    def each(what: str, folder: Path, read: Callable[[], tuple[Any, list[str]]], less=lambda *_: "") -> None:
        good, _ = read()
        less = fewer_samples(good) if less is fewer_samples else less
        found = counts.setdefault(what, Counter())
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in ("lock", "contact_sheet.png")):
            for name, change in damages(flips, rng).items():
                with damaged(path, change):
                    word = outcome(read, path, good, less)
                found[word.split(":")[0].lower()] += 1
                if word[:2].isupper():
                    faults.append(f"{what}, {path.relative_to(folder)} {name}: {word}")
        print(f"{what}: {dict(found)}", flush=True)

    def before(value: Any, said: str) -> str:
        return "the one before" if value[0] not in (None, newest.name) and newest.name in said else ""

    each("training on the folder", data, lambda: read_samples(data), fewer_samples)
    each("dfm inspect --verify", data, lambda: verify(data), lambda faults, _: "refused" if faults else "")
    each("generating from the checkpoint", newest, lambda: weights_of(newest))
    each("generating from the run", newest, lambda: weights_of(run), before)
    each("resuming the run", newest, lambda: resumed(run), before)
    return {"cases": {what: dict(found) for what, found in counts.items()}, "faults": faults}


# ---- all of it ----------------------------------------------------------------------------------------------------


def table(r: dict) -> str:
    rows = []
    for name, found in r["kills"].items():
        for victim in VICTIMS:
            hit = [k for k in found["each_kill"] if k["victim"] == victim]
            where = Counter(k["hit"] for k in hit)
            slowest = max((k["gone_s"] for k in hit), default=0)
            rows.append([name, victim, len(hit), where["start-up"], where["work"], where["writing"], slowest])
    kills_md = report.table(
        ["area", "SIGKILL to", "kills", "in start-up", "at work", "while writing", "all gone after, s, at most"], rows
    )
    ends = [
        [name, found["rounds"], "yes" if not found["faults"] else "NO", f"{disks['too_small']} of {disks['disks']}"]
        for name, found in r["kills"].items()
        for disks in [r["disks"][name]]
    ]
    ends_md = report.table(["area", "ends after kills", "all as uninterrupted", "disks that were too small"], ends)
    words = sorted({w for found in r["damage"]["cases"].values() for w in found})
    damage_md = report.table(
        ["reading", "cases", *words],
        [
            [what, sum(found.values()), *(found.get(w, 0) for w in words)]
            for what, found in r["damage"]["cases"].items()
        ],
    )
    total = sum(found["kills"] for found in r["kills"].values())
    head = (
        f"{total} kills, seed {r['seed']}, commit {r['commit']}, {r['seconds'] / 60:.0f} minutes; "
        f"{report.sentence(r['machine'])}.\n\n" + (f"{len(r['faults'])} FAULTS:\n\n" if r["faults"] else "No faults.")
    )
    listed = "\n".join(f"- {fault}" for fault in r["faults"])
    return "\n\n".join(filter(None, (head, listed, kills_md, ends_md, damage_md)))


def starved_and_killed(area: Area, short: Area, place: Path, count: int, seed: str) -> tuple[dict, dict]:
    """The `kills` and `full_disks` of an area. short : with less to do, for the disks; done in `NAME-short`."""
    clean = place / area.name
    times = uninterrupted(area, clean, place / f"{area.name}.txt")
    print(f"{area.name}: {times[0]:.1f} s to its first work, {times[1]:.1f} s after its last", flush=True)
    less = place / f"{area.name}-short"
    disks = full_disks(short, place, less, short.result(less), (0.02, 0.25, 0.6, 0.95))
    return kills(area, place, count, area.result(clean), times, random.Random(seed)), disks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    parser.add_argument("--keep", type=Path, help="work here, and leave all there")
    args = parser.parse_args()
    machine, began = report.machine(), time.monotonic()
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    server()
    with contextlib.ExitStack() as stack:
        place = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(exist_ok=True)
        data = ["--dataset-path", str(place / "prepare-short")]
        areas = {  # and the same with less to do
            "prepare": (preparation(), preparation(24, 4)),
            "train": (training(60, data), training(9, data)),
            "text": (text(place, 6000), text(place, 2000)),
        }
        for name, (_, short) in areas.items():
            uninterrupted(short, place / f"{name}-short", place / f"{name}.txt")
        rng = random.Random(args.seed)
        data_and_run = [shutil.copytree(place / f"{n}-short", place / f"{n}-damaged") for n in ("prepare", "train")]
        with ThreadPoolExecutor() as threads, ProcessPoolExecutor(1, server()) as process:
            last = process.submit(damage, *data_and_run, 8, rng)
            waiting = {
                name: threads.submit(
                    starved_and_killed, *two, place, round(args.kills * SHARES[name]), f"{name}{args.seed}"
                )
                for name, two in areas.items()
            }
            found = {name: future.result() for name, future in waiting.items()}
            damage_found = last.result()
    result: dict[str, Any] = {
        "machine": machine,
        "commit": commit,
        "seed": args.seed,
        "seconds": round(time.monotonic() - began, 1),
        "faults": [f for part in (*sum(found.values(), ()), damage_found) for f in part["faults"]],
        "kills": {name: two[0] for name, two in found.items()},
        "disks": {name: two[1] for name, two in found.items()},
        "damage": damage_found,
    }
    report.save("chaos", result, table(result), args.output_dir)
    return int(bool(result["faults"]))


if __name__ == "__main__":
    raise SystemExit(main())
