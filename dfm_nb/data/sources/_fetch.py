"""Files that fsspec's drivers copy to this machine, with retries and a bound on size.

Transient faults (time-outs, 429, 5xx, a body that ends early) are retried with growing pauses, others are not. A file
that cannot be fetched is a `SampleError` that has its URL.
"""

import contextlib
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from dfm_nb.base.records import SampleError
from dfm_nb.base.urls import web

PAUSES_S = (1.0, 2.0, 4.0)  # before each further attempt
MOST_BYTES = 512 << 20
MAY_PASS = (408, 425, 429)  # of the HTTP statuses below 500
# the last for a method that zipfile does not know
OF_ARCHIVES = (zipfile.BadZipFile, zlib.error, NotImplementedError)


def fetch(server: Any, file: str, path: Path, url: str, most_bytes: int | None = None) -> None:
    """Copy a file of a driver to `path`.

    Parameters
    ----------
    file : as the driver names it. url : as the user knows it, for errors. most_bytes : `MOST_BYTES` if None.

    Raises
    ------
    SampleError : `missing_file`, `too_large`, `refused` (no permission, a bad URL, a redirect into this network), or
        `unreachable`. What was received of the file is left at `path`.
    """
    most_bytes = MOST_BYTES if most_bytes is None else most_bytes

    # a server may announce no size, or a wrong one
    def bounded(announced: int | None, received: int) -> None:
        if received and max(announced or 0, received) > most_bytes:
            raise SampleError("too_large", f"{url} exceeds the limit of {most_bytes / 2**20:g} MiB; use a smaller copy")

    for pause_s in (*PAUSES_S, None):
        try:
            return server.get_file(file, str(path), callback=fsspec.Callback(hooks={"bound": bounded}))
        except SampleError:
            raise
        except (FileNotFoundError, KeyError):  # KeyError: of a zip
            raise SampleError("missing_file", f"{url} does not exist; correct the name or remove it") from None
        except Exception as error:  # each driver raises types of its own
            status = getattr(error, "status", None)
            refused = isinstance(error, (ValueError, PermissionError, *OF_ARCHIVES))
            refused = refused or (isinstance(status, int) and status < 500 and status not in MAY_PASS)
            if refused or pause_s is None:
                said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                reason = "refused" if refused else "unreachable"
                raise SampleError(reason, f"{url} could not be fetched: {said}") from None
        time.sleep(pause_s)


@contextlib.contextmanager
def fetched(url: str, suffix: str = "", server: Any = None, file: str = "") -> Iterator[Path]:
    """A copy of an http(s) URL, or of a driver's file, for the block; errors in it name the URL, not the copy."""
    with tempfile.TemporaryDirectory(prefix="dfm-") as folder:
        path = Path(folder, "file").with_suffix(suffix)
        fetch(server or web(), file or url, path, url)
        try:
            yield path
        except ValueError as error:
            said = str(error).replace(str(path), url)
            raise SampleError(error.reason, said) if isinstance(error, SampleError) else ValueError(said) from None
