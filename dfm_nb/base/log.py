"""What a person sees of a running program: log lines and progress bars, in a console, a notebook and `log.txt`."""

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger("dfm_nb")
LOG_S = 60.0
"""Seconds between the lines of a bar in a log, where each update is a line; a shorter bar writes none."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def legible(text: str) -> str:
    r"""Text for a terminal: control and non-UTF-8 characters are escaped as `\x1b`; newlines and tabs stay."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


@functools.cache
def warn_once(text: str, *values: object) -> None:
    """Warn of what may be met again."""
    log.warning(text, *values)


@contextlib.contextmanager
def silent(on: bool = True) -> Iterator[None]:
    """Log nothing within the block: another process says it."""
    log.disabled = on
    try:
        yield
    finally:
        log.disabled = False


def is_headless() -> bool:
    """True if nobody can press a button: papermill, nbmake, nbconvert, a script, a terminal. Not in JupyterLab.

    `DFM_HEADLESS=1` or `0` overrides it.

    It depends on whether the client accepts input requests; `JPY_SESSION_NAME` is not enough (papermill inherits it).

    Raises
    ------
    ValueError : `DFM_HEADLESS` is neither 0 nor 1.
    """
    asked = os.environ.get("DFM_HEADLESS", "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"DFM_HEADLESS must be 0 (widgets) or 1 (text); got {asked!r}")
    if asked:
        return asked == "1"
    if os.environ.get("SERVER_SOFTWARE", "").startswith("voila"):
        return False
    kernel = getattr(_ipython(), "kernel", None)
    return not getattr(kernel, "_allow_stdin", False)


def message_stream() -> TextIO:
    """The stream of log lines and progress bars: stderr; in a kernel stdout, because notebooks show stderr in red."""
    return sys.stdout if getattr(_ipython(), "kernel", None) else sys.stderr


def _ipython():
    ipython = sys.modules.get("IPython")  # loaded in a notebook's process; training must not import it
    return ipython.get_ipython() if ipython else None


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return legible(super().format(record))


class _Console(logging.StreamHandler):
    """Writes above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _LogFile(logging.FileHandler):
    """A line that cannot be written (full disk) ends the program, instead of a traceback for each line."""

    def _open(self) -> Any:
        from dfm_nb.base.files import appending  # which logs

        return appending(Path(self.baseFilename), self.mode, encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            error.filename = self.baseFilename
        raise


def start_logging(run_dir: Path | None = None, rank: int = 0) -> logging.Logger:
    """Send the `dfm_nb` logger to the console, and on rank 0 of a run to `log.txt` (with the time before each line).

    Rank 0 shows lines as `[INFO] text`; other ranks show warnings and errors only, as `[WARNING] [rank 3] text`.
    Calling it again replaces the previous set-up.
    """
    stop_logging()
    log.setLevel(logging.INFO)
    log.propagate = False
    console = _Console(message_stream())
    who = f"[rank {rank}] " if rank else ""
    console.setFormatter(_Formatter(f"[%(levelname)s] {who}%(message)s"))
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.addHandler(console)
    if run_dir is not None and rank == 0:
        file = _LogFile(run_dir / "log.txt", encoding="utf-8")
        file.setFormatter(_Formatter("%(asctime)s [%(levelname)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
        log.addHandler(file)
    return log


def stop_logging() -> None:
    """Close the handlers that `start_logging` added."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


def duration(seconds: float) -> str:
    """`0.4 s`, `45 s`, `12 min`, `3 h 20 min`, `64 days`, `57 years`."""
    if seconds < 90:
        return f"{seconds:.1g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 2 * 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes / 24 / 60:,.0f} days" if minutes < 1e6 else f"{minutes / 24 / 60 / 365:,.0f} years"


def tqdm(*args: Any, **settings: Any) -> Any:
    """`tqdm.tqdm(...)` in the form for its environment. A headless notebook's text goes to the terminal unchanged."""
    stream = message_stream()
    usual: dict[str, Any] = {"file": stream}
    if is_headless():
        from tqdm import tqdm as bar

        if not stream.isatty():
            usual |= dict.fromkeys(("mininterval", "maxinterval", "delay"), LOG_S)
    else:
        from tqdm.notebook import tqdm as bar
    return bar(*args, **usual | settings)
