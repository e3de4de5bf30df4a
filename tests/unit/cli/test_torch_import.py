"""What a rank imports is left out of garbage collection, which goes on after the import, failed or
not."""

from __future__ import annotations

import subprocess
import sys

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
