"""Small files through which the processes of a disturbed run and `drillyard chaos` communicate.

    case.json             the planned run and its settings (FaultSettings), written before the first start
    NUMBER.PHASE.json     a fault has reached this phase; written before it strikes
    rank-N.pid            the process that is rank N now

Each file is written once, by one process, and renamed into place: a SIGKILL right after does not damage it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drillyard.faults.plan import Fault, PlannedRun
from drillyard.telemetry.events import utc_now


@dataclass(frozen=True)
class FaultSettings:
    """What the ranks of a disturbed run need to know.

    `step_seconds`: the median step of the undisturbed run; `shard_bytes`: the size of its smallest shard; `ballast`:
    the file that fills the small disk, or None where a limit on file sizes simulates a full disk.
    """

    planned: PlannedRun
    checkpoints: Path
    step_seconds: float
    shard_bytes: int
    ballast: Path | None


class MarkFiles:
    """The mark files of one disturbed run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write_settings(self, settings: FaultSettings) -> None:
        """Create the directory with the settings."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write("case.json", asdict(settings))

    def settings(self) -> FaultSettings:
        """The settings that `write_settings` wrote."""
        value = json.loads((self.directory / "case.json").read_text())
        faults = tuple(Fault(**fault) for fault in value["planned"]["faults"])
        value["planned"] = PlannedRun(value["planned"]["name"], faults)
        value |= {name: value[name] and Path(value[name]) for name in ("checkpoints", "ballast")}
        return FaultSettings(**value)

    def put(self, fault: Fault, phase: str, **fields: Any) -> None:
        """Record that `fault` has reached `phase`, with the time."""
        self._write(f"{fault.number}.{phase}.json", {"time": utc_now(), **fields})

    def get(self, fault: Fault, phase: str) -> dict[str, Any] | None:
        """The mark of a phase, or None if the fault has not reached it."""
        try:
            value: dict[str, Any] = json.loads((self.directory / f"{fault.number}.{phase}.json").read_text())
        except FileNotFoundError:
            return None
        return value

    def is_complete(self, fault: Fault) -> bool:
        """Whether `fault` has done all that it does to a running rank; the bit of a flip is flipped by the next
        start."""
        return self.get(fault, "again" if fault.place == "resume" else "hit") is not None

    def pending(self, planned: PlannedRun) -> list[Fault]:
        """The faults of this attempt: those not complete, up to the first that ends an attempt."""
        found: list[Fault] = []
        for fault in planned.faults:
            if not self.is_complete(fault):
                found.append(fault)
                if fault.restarts:
                    break
        return found

    def put_pid(self, rank: int) -> None:
        """Record that this process is `rank`."""
        self._write(f"rank-{rank}.pid", os.getpid())

    def pid(self, rank: int) -> int:
        """The process that is `rank`."""
        return int((self.directory / f"rank-{rank}.pid").read_text())

    def _write(self, name: str, value: Any) -> None:
        draft = self.directory / f".{name}.{os.getpid()}"
        draft.write_text(json.dumps(value, default=str))
        draft.replace(self.directory / name)
