"""Is there a person with a browser in front of this notebook?

It works in JupyterLab, Voila, papermill, nbconvert, nbmake and plain Python. `DFM_HEADLESS=1` or `0` overrides it.
"""

import os
import sys
from typing import TextIO


def is_headless() -> bool:
    """True if nobody can press a button: papermill, nbmake, nbconvert, a script, a terminal.

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
