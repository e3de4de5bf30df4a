"""What processes of a disturbed run tell each other, and which faults are due in a round."""

from __future__ import annotations

from pathlib import Path

from drillyard.faults.mark_files import FaultSettings, MarkFiles
from drillyard.faults.plan import Fault, PlannedRun

FULL = Fault(1, "disk-full", "shards", 0, 0, 8, 0.5)
KILL = Fault(2, "kill", "step", 1, 1, 13, 0.5)
FLIP = Fault(3, "flip", "step", 0, 0, 17, 0.5)
AGAIN = Fault(4, "kill", "resume", None, 1, 22, 0.5)
CASE = PlannedRun("chaos-01", (FULL, KILL, FLIP, AGAIN))


def marks_in(directory: Path, ballast: Path | None = None) -> MarkFiles:
    marks = MarkFiles(directory / "marks")
    marks.write_orders(FaultSettings(CASE, directory / "checkpoints", 0.1, 1000, ballast))
    return marks


def test_orders_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert marks_in(tmp_path).orders() == FaultSettings(CASE, tmp_path / "checkpoints", 0.1, 1000, None)
    assert marks_in(tmp_path, tmp_path / "ballast").orders().ballast == tmp_path / "ballast"


def test_a_round_has_the_faults_up_to_the_first_that_ends_it(tmp_path: Path) -> None:
    marks = marks_in(tmp_path)
    assert marks.pending(CASE) == [FULL, KILL]
    marks.put(FULL, "hit")
    assert marks.pending(CASE) == [KILL]
    marks.put(KILL, "hit", step=13)
    assert marks.pending(CASE) == [FLIP]
    marks.put(FLIP, "hit")
    assert marks.pending(CASE) == [AGAIN]
    marks.put(AGAIN, "hit")
    assert marks.pending(CASE) == [AGAIN], "its second part strikes in the round after"
    marks.put(AGAIN, "again")
    assert marks.pending(CASE) == []


def test_a_mark_tells_when_and_what(tmp_path: Path) -> None:
    marks = marks_in(tmp_path)
    assert marks.get(KILL, "hit") is None
    marks.put(KILL, "hit", step=13, complete=[8, 12])
    mark = marks.get(KILL, "hit")
    assert mark is not None and mark["step"] == 13 and mark["complete"] == [8, 12] and mark["time"].endswith("Z")
