"""Is there a person with a browser in front of this notebook?

Answers for JupyterLab, Voila, papermill, nbconvert, nbmake and plain Python. `DFM_HEADLESS=1` or `0` overrides it.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


def is_headless() -> bool:
    """True when nobody can press a button: papermill, nbmake, nbconvert, a script, a terminal.

    `JPY_SESSION_NAME` does not tell (papermill inherits it); whether the client accepts input requests does.

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
    """Where log lines and bars of text go: stderr; in a kernel stdout, as notebooks show stderr in red."""
    return sys.stdout if getattr(_ipython(), "kernel", None) else sys.stderr


def _ipython():
    ipython = sys.modules.get("IPython")  # a notebook's process has it; training must not bring it in
    return ipython.get_ipython() if ipython else None
