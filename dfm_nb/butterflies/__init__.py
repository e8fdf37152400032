"""The toy world: butterflies drawn on the spot, with captions, as a plug-in that could live in a package of its own."""
