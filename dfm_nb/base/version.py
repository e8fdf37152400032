"""The package's version; a module of its own, so that nothing imports the package root."""

__version__ = "1.0.0"
