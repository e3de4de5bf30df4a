"""What the processes of a disturbed run and the one that watches them tell each other: a directory of small files.

    case.json             the case and how it strikes (Orders), written before the first start
    NUMBER.PHASE.json     a fault has reached this phase; written before it strikes, so that it outlives the process
    rank-N.pid            the process that is rank N now

A mark is written by one process, once, as a whole (a rename), and a SIGKILL that follows takes nothing from it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drillyard.faults.plan import Fault, PlannedRun, as_json, from_json
from drillyard.telemetry.events import utc_now


@dataclass(frozen=True)
class FaultSettings:
    """What a process of a disturbed run must know. `ballast` is None where a limit on file sizes stands for the disk.

    `step_seconds`: the median step of the undisturbed run; `shard_bytes`: the size of its smallest shard.
    """

    case: PlannedRun
    checkpoints: Path
    step_seconds: float
    shard_bytes: int
    ballast: Path | None


class MarkFiles:
    """The directory of marks of one case."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write_orders(self, orders: FaultSettings) -> None:
        """Say what is to happen."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write(
            "case.json",
            {
                "case": as_json(orders.case),
                "checkpoints": str(orders.checkpoints),
                "step_seconds": orders.step_seconds,
                "shard_bytes": orders.shard_bytes,
                "ballast": None if orders.ballast is None else str(orders.ballast),
            },
        )

    def orders(self) -> FaultSettings:
        """What `write_orders` wrote."""
        value = json.loads((self.directory / "case.json").read_text())
        return FaultSettings(
            case=from_json(value["case"]),
            checkpoints=Path(value["checkpoints"]),
            step_seconds=value["step_seconds"],
            shard_bytes=value["shard_bytes"],
            ballast=None if value["ballast"] is None else Path(value["ballast"]),
        )

    def put(self, fault: Fault, phase: str, **fields: Any) -> None:
        """Note that `fault` has reached `phase`, with the time."""
        self._write(f"{fault.number}.{phase}.json", {"time": utc_now(), **fields})

    def get(self, fault: Fault, phase: str) -> dict[str, Any] | None:
        """The mark of a phase, or None when it was not reached."""
        try:
            value: dict[str, Any] = json.loads((self.directory / f"{fault.number}.{phase}.json").read_text())
        except FileNotFoundError:
            return None
        return value

    def struck(self, fault: Fault) -> bool:
        """Whether all that `fault` does to a running rank is done; a bit is flipped when rank 0 starts again."""
        return self.get(fault, "again" if fault.place == "resume" else "hit") is not None

    def pending(self, case: PlannedRun) -> list[Fault]:
        """The faults of this round: those not yet struck, up to the first that ends a round."""
        found: list[Fault] = []
        for fault in case.faults:
            if not self.struck(fault):
                found.append(fault)
                if fault.restarts:
                    break
        return found

    def put_pid(self, rank: int) -> None:
        """Say that this process is `rank`."""
        self._write(f"rank-{rank}.pid", os.getpid())

    def pid(self, rank: int) -> int:
        """The process that is `rank`."""
        return int((self.directory / f"rank-{rank}.pid").read_text())

    def _write(self, name: str, value: Any) -> None:
        temporary = self.directory / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(value))
        temporary.replace(self.directory / name)
