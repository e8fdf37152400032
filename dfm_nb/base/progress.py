"""Progress bars: tqdm's widget in front of a person with a notebook, its line of text everywhere else."""

from __future__ import annotations

from typing import Any

from dfm_nb.base.headless import is_headless, message_stream


def tqdm(*args: Any, **settings: Any) -> Any:
    """`tqdm.tqdm(...)` in the form for where it runs. A headless notebook's text goes to the terminal as it comes."""
    if is_headless():
        from tqdm import tqdm as bar
    else:
        from tqdm.notebook import tqdm as bar
    return bar(*args, **{"file": message_stream(), **settings})
