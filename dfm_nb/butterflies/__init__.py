"""The toy world, as an outside plug-in would be: butterflies drawn on the spot, captions, a judge, a trained model."""
