"""dfm_nb: from captioned images and clips to a trained text-to-video Diffusion Transformer and finished mp4s.

One folder per stage; each imports only those to its right and below:

    verbs: prepare train generate, adopt inspect export import_ doctor   cli.py finds them
      training      loop, trainer, Muon, report     generation   Pipeline, requests, files of clips
      checkpoints   save, load, export, import      model        DiT, attention, EMA
      data          sources, encoders, shards       packs        samples, noise -> one sequence
      diffusion     EDM, flow, samplers             parallel     process groups
      config        every setting of a training     base         files, runs, options, video

    The core, what the first three verbs import, ends here. It finds the rooms around it by their entry_points.txt:

      measure       `dfm evaluate`: distances, copies, the verdict on checkpoints
      planner       `dfm plan`: memory and time before anything is built; settings from minutes
      experiments   `dfm sweep`, the table of runs
      offline       encoders and drawings that need no hub
      display       pictures and clips in a notebook, static plots
      butterflies   a toy world, its judge and packaged models
      integrations  networks and formats from elsewhere, loggers
      text          JSONL -> Megatron .bin/.idx, blends

    workbench/, next to dfm_nb/: form, launcher, monitor, gallery and studio of the notebooks

A picture's way: `data.sources` -> `data.encoding` -> shards -> `data.loader` -> `packs` -> `model.denoiser` ->
`training.loop` -> `checkpoints.saving`. A prompt's way: `generation.pipeline` -> `diffusion.samplers` -> tokenizer ->
`generation.clip_files`.

CONTRIBUTING lists which files a new sampler, setting, logger or measure takes.

The names in `__all__` are the Python API. They are loaded on first use, so importing the package is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dfm_nb.base.version import __version__ as __version__

if TYPE_CHECKING:
    from dfm_nb.base.metrics import read_table as read_metrics  # noqa: F401
    from dfm_nb.experiments.runs import compare as compare
    from dfm_nb.experiments.sweep import sweep as sweep
    from dfm_nb.export import export_weights as export_weights
    from dfm_nb.generation.pipeline import Pipeline as Pipeline
    from dfm_nb.import_ import import_weights as import_weights
    from dfm_nb.inspect import inspect_dataset as inspect_dataset
    from dfm_nb.measure.evaluate import evaluate_model as evaluate_model
    from dfm_nb.planner.plan import plan_layouts as plan_layouts
    from dfm_nb.prepare import prepare_dataset as prepare_dataset
    from dfm_nb.train import train_model as train_model

_WHERE = {
    "Pipeline": "generation.pipeline.Pipeline",
    "compare": "experiments.runs.compare",
    "evaluate_model": "measure.evaluate.evaluate_model",
    "export_weights": "export.export_weights",
    "import_weights": "import_.import_weights",
    "inspect_dataset": "inspect.inspect_dataset",
    "plan_layouts": "planner.plan.plan_layouts",
    "prepare_dataset": "prepare.prepare_dataset",
    "read_metrics": "base.metrics.read_table",
    "sweep": "experiments.sweep.sweep",
    "train_model": "train.train_model",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"dfm_nb has no {name!r}; its Python API is {', '.join(__all__)}")
    module, _, attribute = _WHERE[name].rpartition(".")
    return getattr(importlib.import_module(f"dfm_nb.{module}"), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
