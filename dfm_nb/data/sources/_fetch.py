"""Files of http(s) servers and of the hub, with time limits, retries and a bound on size.

Transient faults (time-outs, 429, 5xx, a body that ends early) are retried with growing pauses, others are not. A file
that cannot be fetched is a `SampleError` that names the URL. A server on the internet cannot redirect to this machine
or its network, and a downloaded table cannot refer to them: its author must not choose what this machine requests.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from urllib3 import Retry
from urllib3.exceptions import HTTPError, ReadTimeoutError

from dfm_nb import __version__
from dfm_nb.base.hub import hub_file
from dfm_nb.base.places import is_public
from dfm_nb.base.records import SampleError

RETRIED_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
LONGEST_PAUSE_S = 60
HEADERS = {"User-Agent": f"dfm_nb/{__version__}", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class Limits:
    """timeout_s: without a byte from the server; total_s: for a body; retries: further attempts after the first;
    backoff_s: the first pause, doubled each time; max_bytes: of one file."""

    timeout_s: float = 20.0
    total_s: float = 600.0
    retries: int = 3
    backoff_s: float = 1.0
    max_bytes: int = 512 << 20


DEFAULT_LIMITS = Limits()


class _Adapter(requests.adapters.HTTPAdapter):
    """Requests addresses of this machine and its network only if `private`, and never after a host on the internet."""

    def __init__(self, private: bool, retries: Retry):
        super().__init__(max_retries=retries)
        self._private = private

    def send(self, request: Any, *args: Any, **kwargs: Any) -> requests.Response:  # called at each hop
        public = is_public(request.url)
        if not public and not self._private:
            raise SampleError("refused", f"{request.url} is an address of this machine or its network")
        self._private = not public
        response = super().send(request, *args, **kwargs)
        if response.is_redirect:
            response.close()  # requests would read the body of a redirect, however long
        return response


def download(url: str, path: Path, limits: Limits, private: bool = True) -> None:
    """Fetch `url` into `path`.

    Parameters
    ----------
    private : whether the URL may be of this machine or its network, as one that the user gave may.

    Raises
    ------
    SampleError : `not_found` (404, 410), `refused` (other 4xx, an address), `too_large`, `bad_url`, or `unreachable`
        (the last attempt failed). What was received of the file is left at `path`.
    """
    for left in reversed(range(limits.retries + 1)):  # `Retry` ends with the headers, and bodies break off too
        try:
            return _attempt(url, path, limits, private)
        except (requests.RequestException, HTTPError, UnicodeError) as error:
            if not (isinstance(error, HTTPError) and left):
                reason = "bad_url" if isinstance(error, ValueError) else "unreachable"
                cause = getattr(error.args[0], "reason", error) if error.args else error  # of urllib3's MaxRetryError
                said = " ".join(str(cause).split())[:300]
                raise SampleError(reason, f"{url} could not be fetched: {said}") from None


def _attempt(url: str, path: Path, limits: Limits, private: bool) -> None:
    retries = Retry(
        limits.retries,
        status_forcelist=RETRIED_STATUS,
        backoff_factor=limits.backoff_s,
        backoff_max=LONGEST_PAUSE_S,
        retry_after_max=LONGEST_PAUSE_S,  # a server may ask for hours
    )
    deadline, received = time.monotonic() + limits.total_s, 0
    with requests.Session() as session:
        session.mount("http://", adapter := _Adapter(private, retries))
        session.mount("https://", adapter)
        with session.get(url, stream=True, timeout=limits.timeout_s, headers=HEADERS) as response:
            if not response.ok:
                said = f"HTTP {response.status_code} {response.reason}"
                reason = "not_found" if response.status_code in (404, 410) else "refused"
                raise SampleError(reason, f"{url} gives {said}; correct it or remove the row")
            announced = response.raw.length_remaining or 0  # urllib3 itself raises when the body is shorter
            with path.open("wb") as file:
                while chunk := response.raw.read1(1 << 16):
                    received += len(chunk)
                    if max(received, announced) > limits.max_bytes:
                        bound = f"{limits.max_bytes / 2**20:g} MiB"
                        raise SampleError("too_large", f"{url} exceeds the limit of {bound}; use a smaller copy")
                    if time.monotonic() > deadline:
                        raise ReadTimeoutError(response.raw, url, f"not finished after {limits.total_s:g} s")
                    file.write(chunk)


def hub_path(url: str) -> Path:
    """The local copy of `hf://datasets/OWNER/NAME[@REVISION]/PATH`.

    Raises
    ------
    ValueError : a malformed URL. FileNotFoundError : it is neither in the cache nor to be had.
    """
    found = re.fullmatch(r"hf://datasets/([^/]+/[^/@]+)(?:@([^/]*))?/(.+)", url)
    if not found:
        raise ValueError(f"a hub file is hf://datasets/OWNER/NAME/PATH; got {url}")
    repository, revision, name = found.groups()
    fix = f"with internet access, run: hf download {repository} {name} --repo-type dataset --local-dir DIR"
    return hub_file(repository, name, fix, repo_type="dataset", revision=revision or None)
