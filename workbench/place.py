"""Where a notebook's relative paths start, and the results it publishes.

JupyterLab, nbmake and nbconvert start in `notebooks/`, papermill in the caller's folder; `project_folder` makes them
agree.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

from dfm_nb.base.log import is_headless
from dfm_nb.base.markup import Html, fill

FIRST = "00_tour.ipynb"
FILM = fill("<script>{}</script>", Html(Path(__file__).with_name("film.js").read_text()))
JUPYTER = Path(__file__).with_name("jupyter")
"""For Jupyter: the kernel, with the current folder last on its module path, and defaults of JupyterLab."""
RESULT_TYPE = "application/vnd.dfm-nb.result+json"
"""Media type of `publish`."""


def add_to_jupyter(variable: str) -> None:
    """Put `JUPYTER` first in one of Jupyter's environment variables of folders."""
    before = os.environ.get(variable, "").split(os.pathsep)
    os.environ[variable] = os.pathsep.join(dict.fromkeys([str(JUPYTER), *filter(None, before)]))


def project_folder() -> None:
    """Change to the folder that holds `notebooks/`, if the kernel started inside it, and print the folder.

    With it comes the script that keeps the page of Run All at what was made last, until the reader scrolls or clicks.

    >>> project_folder()      # doctest: +SKIP
    """
    here = Path.cwd()
    if (here / FIRST).is_file():
        os.chdir(here.parent)
    text = f"relative paths start at {Path.cwd()}"
    if is_headless():
        print(text)
    else:
        from IPython.display import display

        display({"text/plain": text, "text/html": fill("<div>{}</div>{}", text, FILM)}, raw=True)


def trained_or_packaged(*runs: str | Path) -> str:
    """The first of these runs that has a model, otherwise the name of the packaged one; prints which.

    >>> pipe = Pipeline.from_pretrained(trained_or_packaged("runs/nb/train"))      # doctest: +SKIP
    """
    from dfm_nb.base import pretrained
    from dfm_nb.checkpoints.loading import find_weights

    for run in runs:
        with contextlib.suppress(FileNotFoundError):
            find_weights(run)
            print(f"using the model of {run}")
            return str(run)
    print(f"there is no model in {' or '.join(map(str, runs))} yet: using the packaged {pretrained.DEFAULT}")
    return pretrained.DEFAULT


def publish(**values: Any) -> None:
    """Show named results; `dfm notebook sweep` collects them into its table, one column each.

    >>> publish(final_loss=0.41, seconds=62)      # doctest: +SKIP
    """
    from IPython.display import display

    plain: dict[str, Any] = {}
    words = []
    for name, value in values.items():
        shown = value
        if value is not None and not isinstance(value, (bool, int, str)):
            value = float(value)
            shown = f"{value:.4g}"
            if not math.isfinite(value):  # JSON has no such number
                value = str(value)
        plain[name] = value
        words.append(f"{name} = {shown}")
    display({RESULT_TYPE: plain, "text/plain": ", ".join(words)}, raw=True)
