"""Progress bars: tqdm's widget in an interactive notebook, its line of text everywhere else."""

from typing import Any

from dfm_nb.base.headless import is_headless, message_stream

LOG_S = 60.0
"""Seconds between the lines of a bar in a log, where each update is a line; a shorter bar writes none."""


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
