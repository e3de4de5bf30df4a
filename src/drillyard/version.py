"""The version, in a module that imports nothing: everything else may import it."""

__version__ = "0.1.0"
