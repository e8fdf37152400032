"""Files from elsewhere: http(s) with time limits, retries and a bound on size, and the hub through its own cache.

An attempt ends within `total_s` + `timeout_s` whatever the server does. Faults that may pass (time-outs, 429, 5xx, a
cut body) are tried again with growing pauses, others are not. What cannot be had is a `SampleError` that names the URL.
A server of the internet cannot redirect to this machine or its network: a table chooses URLs, a server must not.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import requests
from urllib3 import Retry
from urllib3.exceptions import IncompleteRead, ProtocolError, ReadTimeoutError
from urllib3.util import parse_url

from dfm_nb import __version__
from dfm_nb.base.records import SampleError

RETRIED_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
LONGEST_PAUSE_S = 60.0
PAGES = ("application/json", "application/xhtml+xml", "application/xml")
HEADERS = {"User-Agent": f"dfm_nb/{__version__}", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class Limits:
    """timeout_s: without a byte from the server; total_s: one attempt; retries: further attempts after the first;
    backoff_s: the first pause, doubled each time; max_bytes: of one file."""

    timeout_s: float = 20.0
    total_s: float = 600.0
    retries: int = 3
    backoff_s: float = 1.0
    max_bytes: int = 512 << 20


DEFAULT_LIMITS = Limits()


class _Passing(Exception):
    """A fault that may pass; `pause_s` is what the server asked for."""

    def __init__(self, reason: str, said: str, pause_s: float = 0.0):
        super().__init__(said)
        self.reason, self.pause_s = reason, pause_s


def _is_public(url: str) -> bool:
    """Whether all addresses of the URL's host are of the internet. True for a name that only a proxy can resolve."""
    try:
        found = socket.getaddrinfo((parse_url(url).host or "").strip("[]"), None)
    except OSError:
        return True
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    return all((getattr(a, "ipv4_mapped", None) or a).is_global for a in addresses)


class _Adapter(requests.adapters.HTTPAdapter):
    """Goes from a public address to public ones only, and looks at the clock before each read of a socket.

    A time-out restarts with every byte, and the status, the headers and the sizes of chunks are read by byte.
    """

    _from_public = False  # the first URL is the table's own

    def __init__(self, deadline: float):
        super().__init__()
        self._deadline = deadline

    def send(self, request: Any, *args: Any, **kwargs: Any) -> requests.Response:  # called at each hop
        public = _is_public(request.url)
        if self._from_public and not public:
            said = f"{request.url} is an address of this machine or its network, to which a redirect led"
            raise SampleError("refused", said)
        self._from_public = public
        response = super().send(request, *args, **kwargs)
        if response.is_redirect:
            response._content = b""  # requests would read the body of a redirect, however long
        return response

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        timed = {"response_class": staticmethod(self._response)}  # what http.client reads an answer with
        pool.ConnectionCls = type("Timed", (pool.ConnectionCls,), timed)
        return pool

    def _response(self, *args: Any, **kwargs: Any) -> HTTPResponse:
        response = HTTPResponse(*args, **kwargs)
        socket_file: Any = response.fp.raw  # type: ignore[attr-defined]
        read = socket_file.readinto

        def readinto(buffer: Any) -> int | None:
            if time.monotonic() > self._deadline:
                raise TimeoutError
            return read(buffer)

        socket_file.readinto = readinto
        return response


def download(url: str, path: Path, limits: Limits, accept_text: bool = False) -> str:
    """Fetch `url` into `path`; returns the content type (lower case, without parameters, "" when not told).

    Parameters
    ----------
    accept_text : take text too; otherwise a text or JSON answer is an error page in the place of a picture.

    Raises
    ------
    SampleError : `not_found` (404, 410), `refused` (other 4xx, redirects), `wrong_type` (a page), `too_large`,
        `bad_url`, `unreachable`, `timed_out`, `truncated`, `server_error`.
    """
    for attempt in range(limits.retries + 1):
        try:
            return _attempt(url, path, limits, accept_text)
        except BaseException as fault:
            path.unlink(missing_ok=True)
            if not isinstance(fault, _Passing):
                raise
            if attempt == limits.retries:
                tries = "1 attempt" if attempt == 0 else f"{attempt + 1} attempts"
                raise SampleError(fault.reason, f"{url} could not be fetched in {tries}: {fault}") from None
            # not urllib3's own retries: those end with the headers, and bodies break off too
            time.sleep(min(max(limits.backoff_s * 2**attempt, fault.pause_s), LONGEST_PAUSE_S))
    raise AssertionError


def _attempt(url: str, path: Path, limits: Limits, accept_text: bool) -> str:
    deadline = time.monotonic() + limits.total_s
    adapter = _Adapter(deadline)
    try:
        with requests.Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, adapter)
            with session.get(url, stream=True, timeout=limits.timeout_s, headers=HEADERS) as response:
                return _receive(url, response, path, limits, accept_text)
    except (requests.Timeout, ReadTimeoutError):
        late = f"not finished after {limits.total_s:g} s" if time.monotonic() > deadline else ""
        raise _Passing("timed_out", late or f"the server sent nothing for {limits.timeout_s:g} s") from None
    except (IncompleteRead, ProtocolError):
        raise _Passing("truncated", "the connection ended before the file did") from None
    except requests.ConnectionError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise SampleError("refused", f"{url}: the server's certificate is not valid ({_brief(error)})") from None
        raise _Passing("unreachable", _brief(error)) from None
    except requests.TooManyRedirects:
        raise SampleError("refused", f"{url} could not be fetched: it redirects without end; correct the URL") from None
    except (requests.RequestException, UnicodeError) as error:  # the schema, the host's name, ...
        raise SampleError("bad_url", f"{url!r} is not a URL that can be fetched ({_brief(error)})") from None


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _receive(url: str, response: requests.Response, path: Path, limits: Limits, accept_text: bool) -> str:
    """Save the body and return its kind; urllib3 itself raises when it is shorter than announced."""
    said = f"HTTP {response.status_code} {response.reason}"
    if response.status_code in RETRIED_STATUS:
        raise _Passing("server_error", said, Retry().get_retry_after(response.raw) or 0.0)
    if not response.ok:
        reason = "not_found" if response.status_code in (404, 410) else "refused"
        raise SampleError(reason, f"{url} could not be fetched: {said}; correct the URL or remove the row")
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if not accept_text and (kind.startswith("text/") or kind in PAGES):
        raise SampleError("wrong_type", f"{url} gives {kind}, not an image or a video; point to the file itself")
    received, announced = 0, response.raw.length_remaining or 0
    with path.open("wb") as file:
        while chunk := response.raw.read1(1 << 16):
            received += len(chunk)
            if max(received, announced) > limits.max_bytes:
                bound = f"{limits.max_bytes / 2**20:g} MiB"
                raise SampleError("too_large", f"{url} is over the bound of {bound}; use a smaller copy")
            file.write(chunk)
    return kind


def hub_file(url: str) -> Path:
    """The local copy of `hf://datasets/OWNER/NAME[@REVISION]/PATH`, fetched into the hub's cache when it is not there.

    Raises
    ------
    ValueError : a malformed URL. FileNotFoundError : it is neither in the cache nor to be had.
    """
    from huggingface_hub import hf_hub_download

    found = re.fullmatch(r"hf://datasets/([^/]+/[^/@]+)(?:@([^/]*))?/(.+)", url)
    if not found:
        raise ValueError(f"a hub file is hf://datasets/OWNER/NAME/PATH; got {url}")
    repository, revision, filename = found.groups()
    try:
        return Path(hf_hub_download(repository, filename, repo_type="dataset", revision=revision or None))
    except Exception as error:  # offline, no such file, no permission, TLS, ...: many types from several libraries
        said = f"{type(error).__name__}: {_brief(error).partition('. ')[0]}"
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise FileNotFoundError(f"{url} is not in the hub's cache and could not be fetched{offline}: {said}") from None
