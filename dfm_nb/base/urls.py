"""Files at a URL that the user named, by fsspec's drivers: `s3://`, `gs://`, `https://`, `hf://`, chains and .zip.

Which driver and which server is asked follows from what the user wrote alone. Names that come out of data are joined to
a place that is open (`files.lies_inside` refuses `..` and `::`), never opened as URLs of their own.
"""

import contextlib
import functools
import ipaddress
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from dfm_nb.base.files import is_url
from dfm_nb.base.version import __version__

HTTP = ("http://", "https://")
SILENCE_S = 20
TOTAL_S = 600
"""Time limits of a request to a web server: without a byte, and altogether."""


def is_public(url: str) -> bool:
    """Whether all addresses of the URL's host are of the internet. True for a name that only a proxy can resolve."""
    from yarl import URL  # aiohttp's

    try:
        answers = socket.getaddrinfo((URL(url).raw_host or "").partition("%")[0], None)  # without a zone
    except (OSError, ValueError):
        return True
    addresses = [str(address[0]).partition("%")[0] for *_, address in answers]
    return all(map(_is_global, map(ipaddress.ip_address, addresses)))


_HOLD_IPV4 = [ipaddress.IPv6Network(net) for net in ("::/96", "::ffff:0:0/96", "64:ff9b::/96")]
"""IPv6 addresses whose last 32 bits are an IPv4 address: compatible, mapped, NAT64."""


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in net for net in _HOLD_IPV4):
            return _is_global(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.sixtofour or address.teredo:  # tunnels to an IPv4 address
            return False
    return address.is_global and not address.is_multicast


def uses_fsspec(spec: str) -> bool:
    """Whether a driver of fsspec opens it: a URL, a chain of them, or a .zip."""
    return is_url(spec) or spec.lower().endswith(".zip")


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """A driver's error, of which each has its own, as a ValueError of one sentence."""
    try:
        yield
    except Exception as error:
        if "could not be fetched" in str(error):  # it is one already
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{what} could not be fetched: {why}") from None


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's driver for a URL, a chain or a .zip that the user named, and the path in it.

    An archive on a web server is copied first (fsspec's `simplecache`), as not all of these servers give parts of a
    file. A public server's redirect to this machine or its network is refused.

    Raises
    ------
    ValueError : there is no such driver or archive.
    """
    import fsspec  # here, as most commands never do

    chain = url if "::" in url or not url.lower().endswith(".zip") else f"zip://::{url}"
    archive, _, server = chain.rpartition("::")
    if archive and server.startswith(HTTP) and "cache" not in archive:
        chain = f"{archive}::simplecache::{server}"
    protocols = {part.partition("://")[0] for part in chain.split("::")}
    with reported(url):
        if "reference" in protocols:
            raise ValueError("a reference file says where to fetch from, and data may not; name the files themselves")
        settings: dict[str, Any] = {name: {"client_kwargs": _client()} for name in protocols & {"http", "https"}}
        # fsspec takes what a chain's parts get by their protocol, and what a single one gets as it is
        if "::" not in chain:
            settings = settings.get(url.partition("://")[0], {})
        server, path = fsspec.url_to_fs(chain, **settings)
        _read_names(getattr(server, "zip", None))
        return server, path


def _read_names(archive: Any) -> None:
    """Read names of a zip as UTF-8, which many tools write without the mark for it; ValueError if it is encrypted."""
    for info in archive.infolist() if archive else ():
        if info.flag_bits & 1:
            raise ValueError(f"a zip must need no password, and its {info.filename} does; unpack it")
        if not info.flag_bits & 0x800:
            with contextlib.suppress(UnicodeError):  # another encoding, or read before
                info.filename = info.filename.encode("cp437").decode()
                archive.NameToInfo[info.filename] = info


def file_in(root: str, name: str) -> str:
    """A driver's path of a file, by its name in the place `root`."""
    if root.startswith(HTTP):
        name = quote(name)
    return "/".join(filter(None, (root.rstrip("/"), name)))


def web() -> Any:
    """fsspec's driver for http(s) URLs as they are: `::` and .zip have no meaning in them."""
    import fsspec

    server = fsspec.filesystem("https", client_kwargs=_client(), encoded=True)
    server.encode_url = _as_written
    return server


def _as_written(url: str) -> Any:
    """For aiohttp, with what a request may not hold escaped. yarl would ask for / where a signature has %2F."""
    from yarl import URL

    host, rest = re.fullmatch("([^:]*://[^/?#]*)(.*)", url, re.DOTALL).groups()  # type: ignore[union-attr]
    rest = re.sub("%(?![0-9a-fA-F]{2})", "%25", rest)
    return URL(str(URL(host)).rstrip("/") + quote(rest, safe="!#$%&'()*+,/:;=?@[]~"), encoded=True)


@functools.cache
def _client() -> dict[str, Any]:
    """How aiohttp asks: through the environment's proxies, and not from the internet to this machine's network."""
    import aiohttp
    from yarl import URL

    async def refuse_inside(_session: Any, _context: Any, redirect: Any) -> None:
        headers = redirect.response.headers
        target = str(redirect.url.join(URL(headers.get("Location") or headers.get("URI") or "")))  # as aiohttp
        if is_public(str(redirect.url)) and not is_public(target):
            raise ValueError(f"{redirect.url} leads to {target}, an address of this machine or its network")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse_inside)
    return {
        "trust_env": True,
        "trace_configs": [trace],
        "timeout": aiohttp.ClientTimeout(total=TOTAL_S, sock_connect=SILENCE_S, sock_read=SILENCE_S),
        "headers": {"User-Agent": f"dfm_nb/{__version__}", "Accept-Encoding": "identity"},
        "requote_redirect_url": False,
    }
