"""YAML files that come with the package, as plain values."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml


def read_packaged_yaml(package: str, name: str) -> Any:
    """The content of the file `name` beside the modules of `package`.

    libyaml's loader gives the same values ten times as fast; PyYAML does not have it everywhere.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(files(package).joinpath(name).read_text(encoding="utf-8"), Loader=loader)
