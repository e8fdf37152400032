"""Progress bars: tqdm's widget in an interactive notebook, its line of text everywhere else."""

from __future__ import annotations

from typing import Any

from dfm_nb.base.headless import is_headless, message_stream


def tqdm(*args: Any, **settings: Any) -> Any:
    """`tqdm.tqdm(...)` in the form for its environment. A headless notebook's text goes to the terminal unchanged."""
    if is_headless():
        from tqdm import tqdm as bar
    else:
        from tqdm.notebook import tqdm as bar
    return bar(*args, **{"file": message_stream(), **settings})
