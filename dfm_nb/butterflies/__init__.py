"""The toy world, written like an external plug-in: rendered butterflies, captions, a judge, a trained model."""
