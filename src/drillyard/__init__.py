"""Drillyard: LLM training runs on GPU clusters, from two YAML files to a trained, measured model.

The package itself imports nothing: `drillyard --help` starts fast, and torch is loaded only by the rooms that compute.
"""

__version__ = "0.1.0"
