"""The toy world, a plug-in: rendered butterflies, captions, a judge, trained models. `entry_points.txt` names them."""

from pathlib import Path

PRETRAINED = Path(__file__).with_name("pretrained")
