"""The run folder: what a training run leaves behind, and how others read it while it is being written.

    RUN/config.yaml  metrics.jsonl  log.txt  run.pid  loss.png  checkpoints/  samples/iter_0000100/

What enters: records (dicts with an `iteration`), log lines, file names. What leaves: those files, read back.
Guarantees: a record is one `write` of one line, so a reader never sees half of one and a kill tears at most the last
line, which the next start removes; after `Metrics.truncate(k)` the file holds exactly the records up to iteration k, so
a resumed run continues one sequence; one live process writes to a folder. Cost: one system call a record.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import orjson

log = logging.getLogger("dfm_nb")

MEDIA = (".mp4", ".png", ".gif", ".webp")
_ITERATION = re.compile(r"iter_(\d+)")


def iteration_name(iteration: int) -> str:
    """`iter_0000100`: sorts by iteration as text."""
    return f"iter_{iteration:07d}"


@dataclass(frozen=True)
class Run:
    """Paths of a run folder; making one touches nothing, `create` and `open` look at the disk."""

    path: Path

    @classmethod
    def create(cls, path: str | Path) -> Run:
        """The folder, made if need be; an existing run is opened, to be resumed.

        Raises
        ------
        NotADirectoryError : the path is a file.
        FileExistsError : the folder holds a data set.
        """
        folder = Path(path).expanduser()
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"the run folder {folder} is a file; give the name of a folder")
        if (folder / ".nv-meta").exists() or (folder / "manifest.json").exists():
            raise FileExistsError(f"{folder} holds a data set, not a run; choose another --run-dir")
        run = cls(folder.resolve())
        for sub in (run.path, run.checkpoints, run.samples):
            sub.mkdir(parents=True, exist_ok=True)
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """A run that exists; FileNotFoundError says what is missing."""
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no run folder {folder}; dfm pretrain --run-dir {folder} makes one")
        run = cls(folder.resolve())
        if not (run.config_file.exists() or run.metrics_file.exists() or run.checkpoints.is_dir()):
            raise FileNotFoundError(
                f"{folder} is not a run folder: it has no config.yaml, metrics.jsonl or checkpoints/"
            )
        return run

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log_file(self) -> Path:
        return self.path / "log.txt"

    @property
    def pid_file(self) -> Path:
        return self.path / "run.pid"

    @property
    def loss_png(self) -> Path:
        return self.path / "loss.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def sample_folder(self, iteration: int) -> Path:
        """`samples/iter_0000100`, made if need be."""
        folder = self.samples / iteration_name(iteration)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def newest_samples(self) -> tuple[int, list[Path]] | None:
        """The last iteration that has samples, and its pictures and clips by name; None when there are none yet."""
        for iteration, folder in reversed(iteration_folders(self.samples)):
            media = sorted(p for p in folder.iterdir() if p.suffix in MEDIA and not p.name.startswith("."))
            if media:
                return iteration, media
        return None

    def save_config(self, text: str) -> None:
        """Write `config.yaml`, whole or not at all."""
        write_atomically(self.config_file, text.encode())

    # ---- who writes here ------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Write `run.pid` for this process; FileExistsError when another live process on this host has the folder."""
        owner = self.owner()
        if owner is not None and owner["pid"] != os.getpid():
            raise FileExistsError(
                f"process {owner['pid']} is writing to {self.path}; wait for it, stop it, or choose another --run-dir"
            )
        record = {"pid": os.getpid(), "host": socket.gethostname(), "started_s": _started_s(os.getpid())}
        write_atomically(self.pid_file, orjson.dumps(record))

    def release(self) -> None:
        """Remove `run.pid` if it is ours."""
        record = _read_json(self.pid_file)
        if record and record.get("pid") == os.getpid() and record.get("host") == socket.gethostname():
            self.pid_file.unlink(missing_ok=True)

    def owner(self) -> dict[str, Any] | None:
        """The live process that has claimed the folder (`pid`, `host`, `started_s`), or None.

        Only processes of this host can be seen; a claim from another host counts as gone. A reused pid is told apart
        by its start time.
        """
        record = _read_json(self.pid_file)
        if not record or record.get("host") != socket.gethostname():
            return None
        started = _started_s(int(record["pid"]))
        return record if started is not None and abs(started - float(record["started_s"])) < 1 else None


def iteration_folders(parent: Path) -> list[tuple[int, Path]]:
    """The `iter_N` folders below `parent`, by iteration."""
    if not parent.is_dir():
        return []
    found = [(_ITERATION.fullmatch(p.name), p) for p in parent.iterdir() if p.is_dir()]
    return sorted((int(m[1]), p) for m, p in found if m)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that readers see whole or not at all: a temporary file in the same folder, synced, then renamed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mode = os.stat(path).st_mode & 0o777 if path.exists() else 0o644
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _started_s(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


# ---- metrics ------------------------------------------------------------------------------------------------------


class Metrics:
    """Append-only writer of `metrics.jsonl`; open it in one process only.

    Parameters
    ----------
    path : the file; made if need be. A torn last line, left by a kill, is removed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._drop_torn_line()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def _drop_torn_line(self) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(self.path, whole)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record as one line; floats are written so that they read back bit for bit, NaN and Inf as null.

        Parameters
        ----------
        record : JSON-able, NumPy scalars included; it needs a whole-number `iteration`.
        """
        assert isinstance(record.get("iteration"), int), f"a metrics record needs an integer iteration: {record}"
        line = orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        written = os.write(self._fd, line)
        if written != len(line):  # a full disk: leave no half line behind
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(28, "No space left on device", str(self.path))

    def truncate(self, iteration: int) -> int:
        """Keep the records up to and including `iteration`; returns how many later ones were dropped."""
        records = list(read_metrics(self.path))
        kept = [r for r in records if r["iteration"] <= iteration]
        if len(kept) < len(records):
            os.close(self._fd)
            write_atomically(self.path, b"".join(orjson.dumps(r, option=orjson.OPT_APPEND_NEWLINE) for r in kept))
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        return len(records) - len(kept)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def read_metrics(path: str | Path, offset: int = 0) -> list[dict[str, Any]]:
    """The whole records of a metrics file, also while it is being written; a file that is not there has none.

    Parameters
    ----------
    path : `metrics.jsonl`, or a run folder.
    offset : bytes to skip; use `tail_metrics` to follow a file.
    """
    return tail_metrics(path, offset)[0]


def tail_metrics(path: str | Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Records after `offset` bytes, and the offset for the next call; a file that shrank is read from its start.

    Raises
    ------
    ValueError : a line that is not JSON, with its number.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        offset = 0 if offset > os.fstat(file.fileno()).st_size else offset
        file.seek(offset)
        data = file.read()
    data = data[: data.rfind(b"\n") + 1]
    return list(_records(data, path)), offset + len(data)


def _records(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not a JSON object ({error}); remove the line") from None
        if not isinstance(record, dict) or "iteration" not in record:
            raise ValueError(f"{path}, line {number} must be an object with an iteration; got {line[:60]!r}")
        yield record


def series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Iterations and values of the records that have a number under `key` (null, NaN and Inf are left out)."""
    points = [
        (r["iteration"], r[key]) for r in records if isinstance(r.get(key), (int, float)) and math.isfinite(r[key])
    ]
    return [i for i, _ in points], [v for _, v in points]


# ---- log lines ----------------------------------------------------------------------------------------------------


class _Console(logging.StreamHandler):
    """Writes above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        try:
            tqdm.write(self.format(record), file=self.stream)
            self.flush()
        except Exception:
            self.handleError(record)


def start_logging(run: Run | None = None, rank: int = 0, level: int = logging.INFO) -> logging.Logger:
    """Send the `dfm_nb` logger to the console, and on rank 0 of a run to `log.txt` (with the time before each line).

    Rank 0 shows lines as `[INFO] text`; other ranks show warnings and errors only, as `[WARNING] [rank 3] text`.
    Calling it again replaces the former set-up.
    """
    stop_logging()
    log.setLevel(level)
    log.propagate = False
    console = _Console()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    console.setFormatter(logging.Formatter(f"[%(levelname)s] {prefix}%(message)s"))
    console.setLevel(level if rank == 0 else logging.WARNING)
    log.addHandler(console)
    if run is not None and rank == 0:
        file = logging.FileHandler(run.log_file, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
        log.addHandler(file)
    return log


def stop_logging() -> None:
    """Close the handlers that `start_logging` added."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


def iteration_line(iteration: int, train_iters: int, loss: float, lr: float | None = None, **more: str | float) -> str:
    """`Iteration  100/10000, Loss: 0.312, LR: 1.00e-04, grad norm: 0.8`; further words in the order given.

    Parameters
    ----------
    **more : `grad_norm=0.8` is shown as `grad norm: 0.8`, numbers with four significant digits.
    """
    width = max(4, len(str(train_iters)) - 1)
    parts = [f"Iteration {iteration:>{width}}/{train_iters}", f"Loss: {loss:.3f}"]
    if lr is not None:
        parts.append(f"LR: {lr:.2e}")
    for name, value in more.items():
        shown = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        parts.append(f"{name.replace('_', ' ')}: {shown}")
    return ", ".join(parts)


# ---- the loss curve -----------------------------------------------------------------------------------------------

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, which people with colour-blindness can tell apart."""


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean over `window` values, narrower at both ends."""
    half = max(0, window // 2)
    sums = [0.0]
    for v in values:
        sums.append(sums[-1] + v)
    n = len(values)
    spans = ((max(0, i - half), min(n, i + half + 1)) for i in range(n))
    return [(sums[b] - sums[a]) / (b - a) for a, b in spans]


def plot_loss(
    runs: Mapping[str, Sequence[Mapping[str, Any]]] | Sequence[Mapping[str, Any]],
    output: str | Path,
    title: str = "",
    val_key: str = "val_loss",
) -> Path:
    """Draw loss against iteration as a PNG: every record faintly, a running mean, and validation points.

    Parameters
    ----------
    runs : the records of one run, or {name: records} to lay several over one another.
    output : the PNG's path.
    val_key : the key of the validation loss.

    Raises
    ------
    ValueError : no record has a loss.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    named = runs if isinstance(runs, Mapping) else {"": runs}
    if not any(series(records, "loss")[0] for records in named.values()):
        raise ValueError("there is no loss to draw yet: metrics.jsonl has no record with a finite loss")
    figure = Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, records) in zip(PALETTE * (len(named) // len(PALETTE) + 1), named.items()):
        x, y = series(records, "loss")
        window = max(1, len(y) // 40)
        if window > 1:
            axes.plot(x, y, color=colour, alpha=0.22, linewidth=0.8)
        axes.plot(x, smooth(y, window), color=colour, linewidth=1.8, label=name or "training loss")
        x_val, y_val = series(records, val_key)
        if x_val:
            label = f"{name} (validation)" if name else "validation loss"
            axes.plot(x_val, y_val, "o", color=PALETTE[1] if not name else colour, markersize=4.5, label=label,
                      markeredgecolor="white", markeredgewidth=0.6, zorder=3)  # fmt: skip
    axes.set(xlabel="iteration", ylabel="EDM loss", title=title)
    _limit_height(axes, [v for records in named.values() for v in series(records, "loss")[1]])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    output = Path(output)
    figure.savefig(output.with_name(f".{output.name}"), format="png")
    os.replace(output.with_name(f".{output.name}"), output)
    return output


def _limit_height(axes: Any, values: list[float]) -> None:
    """Cut a few early spikes off so that the curve fills the plot; start at 0 unless that wastes half of it."""
    ranked = sorted(values)
    top = ranked[min(len(ranked) - 1, int(0.995 * len(ranked)))]
    low = ranked[0]
    bottom = 0.0 if low >= 0 and low < top / 2 else low - 0.05 * (top - low)
    if top > bottom:
        axes.set_ylim(bottom, top + 0.06 * (top - bottom))
