"""The toy world, as a plug-in of another package would be: butterflies drawn on the spot, captions, and their judge."""
