"""Files of Hugging Face's hub: from its cache on this machine, else fetched."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_is_known() -> bool:
    """False when the hub's name cannot be resolved here: its client would try again for a minute."""
    from huggingface_hub import constants

    if getproxies().keys() & {"https", "all"}:
        return True
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443))
    return False


def hub_file(repository: str, name: str, fix: str, **where: Any) -> Path:
    """The local copy of a file.

    Parameters
    ----------
    fix : the end of the message; what to do when the file cannot be had.
    **where : `cache_dir`, `repo_type` and `revision` of `hf_hub_download`.

    Raises
    ------
    FileNotFoundError : it is neither in the cache nor to be fetched.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, **where))
    except Exception as error:  # offline, no such file, no permission, TLS, ...: many types from several libraries
        cache = f" in {where['cache_dir']}" if where.get("cache_dir") else ""
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise FileNotFoundError(f"{name} of {repository} is not{cache} and cannot be fetched ({said}); {fix}") from None
