"""The interactive layer: one widget per file, on top of the command line and the run folder.

    live.py        a widget, and its copy for when there is no kernel
    supervisor.py  the process between a kernel and torchrun: stops the whole tree, records how it ended
    job.py         start, find again and stop such a process; why it ended
    launcher.py    start, stop, continue a run               `Launcher`
    launcher_panel.py  its buttons, state and log
    metrics_reader.py  metrics.jsonl read while it is written
    plot.py        a light SVG plot
    monitor.py     loss, validation, speed, newest samples   `Monitor`
    run_list.py    the runs of a folder                      `Runs`
    form.py        a form from the typed settings            `ConfigForm`, `PrepareForm`
    controls.py    one labelled control for one setting; slider, section, table
    gallery.py     clips with their settings, side by side   `Gallery`
    studio.py      a widget to explore a model               `Studio`
    browser.py     what a data set holds                     `DatasetBrowser`
    place.py       where relative paths start; results       `project_folder`, `trained_or_packaged`, `publish`
    pictures.py    one picture per idea                      `pictures.packs(...)`, ...
    words.py       where in a clip attention looks at the words of its prompt
    notebook_*.py  `dfm notebook run | sweep`, on papermill   `check_parameters`
    lab.py         `dfm lab`

These widgets never train inside the kernel's process; they may generate there, in a process group of one. Every widget
also works headless, as text and pictures. Names are loaded on first use, so the import is light.
"""

import importlib
from typing import Any

VERBS = {
    "notebook": ("workbench.notebook_cli", "run a notebook with parameters, or a grid of them"),
    "lab": ("workbench.lab", "JupyterLab at the first notebook, on loopback, with a token"),
}
"""Verbs of `dfm` (`dfm_nb.cli`)."""

_WHERE = {
    "Launcher": "launcher",
    "RunFailed": "job",
    "RunStopped": "launcher",
    "Monitor": "monitor",
    "ConfigForm": "form",
    "PrepareForm": "form",
    "Gallery": "gallery",
    "Studio": "studio",
    "DatasetBrowser": "browser",
    "Runs": "run_list",
    "is_headless": "live",
    "check_parameters": "notebook_run",
    "project_folder": "place",
    "publish": "place",
    "trained_or_packaged": "place",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"workbench has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"workbench.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
