"""The way in for every process of a disturbed run: `python -m drillyard.faults.entry_point MARKS -- train run.yaml
...`.

What follows `--` is the command as a user gives it. As the supervisor, this process starts its ranks through the same
way in; as a rank, it arms the faults of this round and then is an ordinary rank. The supervisor needs no torch here
either.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drillyard.faults.mark_files import MarkFiles


def main(arguments: Sequence[str]) -> None:
    """Arm what is due in this process, then run the command."""
    marks_directory, separator, *command = arguments
    assert separator == "--"
    marks = MarkFiles(Path(marks_directory))
    if "RANK" in os.environ:
        from drillyard.faults.injection_points import install_faults

        install_faults(marks, int(os.environ["RANK"]))
    else:
        _start_ranks_through_here(marks)
    from drillyard.cli.main import main as drillyard

    drillyard(command)


def _start_ranks_through_here(marks: MarkFiles) -> None:
    """Let the supervisor of this process start `entry MARKS -- train ...` instead of `drillyard train ...`."""
    from drillyard import supervise

    start = supervise.supervise_training

    def supervise_training(command: Sequence[str], *arguments: Any, **options: Any) -> int:
        python, dash_m, package, *rest = command
        assert (dash_m, package) == ("-m", "drillyard"), f"the ranks' command has changed: {command}"
        here = [python, "-m", "drillyard.faults.entry_point", str(marks.directory), "--", *rest]
        return start(here, *arguments, **options)

    supervise.supervise_training = supervise_training


if __name__ == "__main__":
    main(sys.argv[1:])
