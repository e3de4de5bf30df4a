"""What processes of a disturbed run communicate, and which faults are pending in an attempt."""

from __future__ import annotations

from pathlib import Path

from drillyard.faults.mark_files import FaultSettings, MarkFiles
from drillyard.faults.plan import FAULT_KINDS, Fault, PlannedRun, RunShape, draw_faults

FULL = Fault(1, "disk-full", "shards", 0, 0, 8, 0.5)
KILL = Fault(2, "kill", "step", 1, 1, 13, 0.5)
FLIP = Fault(3, "flip", "step", 0, 0, 17, 0.5)
AGAIN = Fault(4, "kill", "resume", None, 1, 22, 0.5)
PLANNED = PlannedRun("chaos-01", (FULL, KILL, FLIP, AGAIN))


def marks_in(directory: Path, ballast: Path | None = None, planned: PlannedRun = PLANNED) -> MarkFiles:
    marks = MarkFiles(directory / "marks")
    marks.write_settings(FaultSettings(planned, directory / "checkpoints", 0.1, 1000, ballast))
    return marks


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert marks_in(tmp_path).settings() == FaultSettings(PLANNED, tmp_path / "checkpoints", 0.1, 1000, None)
    assert marks_in(tmp_path, tmp_path / "ballast").settings().ballast == tmp_path / "ballast"
    for planned in draw_faults(FAULT_KINDS, 30, 3, RunShape(60, 4, 2)):
        assert marks_in(tmp_path, planned=planned).settings().planned == planned


def test_an_attempt_has_the_faults_up_to_the_first_that_ends_it(tmp_path: Path) -> None:
    marks = marks_in(tmp_path)
    assert marks.pending(PLANNED) == [FULL, KILL]
    marks.put(FULL, "hit")
    assert marks.pending(PLANNED) == [KILL]
    marks.put(KILL, "hit", step=13)
    assert marks.pending(PLANNED) == [FLIP]
    marks.put(FLIP, "hit")
    assert marks.pending(PLANNED) == [AGAIN]
    marks.put(AGAIN, "hit")
    assert marks.pending(PLANNED) == [AGAIN], "its second part strikes in the next attempt"
    marks.put(AGAIN, "again")
    assert marks.pending(PLANNED) == []


def test_a_mark_has_its_time_and_fields(tmp_path: Path) -> None:
    marks = marks_in(tmp_path)
    assert marks.get(KILL, "hit") is None
    marks.put(KILL, "hit", step=13, complete=[8, 12])
    mark = marks.get(KILL, "hit")
    assert mark is not None and mark["step"] == 13 and mark["complete"] == [8, 12] and mark["time"].endswith("Z")
