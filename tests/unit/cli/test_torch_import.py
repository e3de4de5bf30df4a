"""What a rank imports is left out of garbage collection, which goes on after the import, failed or
not; and finds no torchao meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc
from drillyard.cli.torch_import import import_without_collection
try:
    import_without_collection("no_such_module_anywhere")
except ModuleNotFoundError:
    print(gc.isenabled(), gc.get_freeze_count() > 0)
import_without_collection("decimal")
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_what_was_imported_is_frozen_and_collection_goes_on() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["True", "False", "True", "True"]


def test_torchao_is_not_found_by_what_is_imported_and_is_there_afterwards(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(
        'import importlib.util\nfound = importlib.util.find_spec("torchao")\n'
    )
    program = """
from drillyard.cli.torch_import import import_without_collection
import_without_collection("looks")
import importlib.util, looks
print(looks.found, importlib.util.find_spec("torchao") is not None)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["None", "True"]
