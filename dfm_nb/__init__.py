"""dfm_nb: from captioned images and clips to a trained text-to-video Diffusion Transformer and finished mp4s.

The pipeline, in order; each arrow is a module:

    sources -> tokenizers + text_encoders -> shards -> dataset (packing) -> dit + edm -> train (checkpoint)
            -> generate (samplers) -> tokenizers -> video

and, for text, `text.corpus` (JSONL -> Megatron .bin/.idx) and `text.blend` (weighted blends, the packed loader).

The names of `__all__` are the Python API. They are loaded when they are first used, so the import is light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfm_nb.base.metrics import read_table as read_metrics
    from dfm_nb.evaluate import evaluate_model
    from dfm_nb.export import export_weights
    from dfm_nb.generation.pipeline import Pipeline
    from dfm_nb.import_ import import_weights
    from dfm_nb.inspect import inspect_dataset
    from dfm_nb.plan import plan_layouts
    from dfm_nb.prepare import prepare_dataset
    from dfm_nb.train import train_model

__version__ = "0.2.0"
__all__ = [
    "Pipeline",
    "evaluate_model",
    "export_weights",
    "import_weights",
    "inspect_dataset",
    "plan_layouts",
    "prepare_dataset",
    "read_metrics",
    "train_model",
]

_WHERE = {
    "Pipeline": "generation.pipeline.Pipeline",
    "evaluate_model": "evaluate.evaluate_model",
    "export_weights": "export.export_weights",
    "import_weights": "import_.import_weights",
    "inspect_dataset": "inspect.inspect_dataset",
    "plan_layouts": "plan.plan_layouts",
    "prepare_dataset": "prepare.prepare_dataset",
    "read_metrics": "base.metrics.read_table",
    "train_model": "train.train_model",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"dfm_nb has no {name!r}; its Python API is {', '.join(__all__)}")
    module, _, attribute = _WHERE[name].rpartition(".")
    return getattr(importlib.import_module(f"dfm_nb.{module}"), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
