"""The entry point of all processes of a disturbed run: `python -m drillyard.faults.entry_point MARKS -- train
run.yaml`.

The part after `--` is the user's command. The supervisor, which needs no torch, starts its ranks through the same entry
point; a rank installs the faults of this attempt and then runs as usual.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drillyard.faults.mark_files import MarkFiles


def main(arguments: Sequence[str]) -> None:
    """Install the faults of this process, then run the command."""
    marks_directory, separator, *command = arguments
    assert separator == "--"
    if "RANK" in os.environ:
        from drillyard.faults.injection_points import install_faults

        install_faults(MarkFiles(Path(marks_directory)), int(os.environ["RANK"]))
    else:
        _start_ranks_here(marks_directory)
    from drillyard.cli.main import main as drillyard

    drillyard(command)


def _start_ranks_here(marks_directory: str) -> None:
    """Make the supervisor of this process start `entry_point MARKS -- train ...` instead of `drillyard train ...`."""
    from drillyard import supervise

    start = supervise.supervise_training

    def supervise_training(command: Sequence[str], *arguments: Any, **options: Any) -> int:
        python, dash_m, package, *rest = command
        assert (dash_m, package) == ("-m", "drillyard"), f"the ranks' command has changed: {command}"
        here = [python, "-m", "drillyard.faults.entry_point", marks_directory, "--", *rest]
        return start(here, *arguments, **options)

    supervise.supervise_training = supervise_training


if __name__ == "__main__":
    main(sys.argv[1:])
