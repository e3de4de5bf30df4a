"""dllogger.json: the logged steps in the format of NVIDIA's DLLogger, for tools that read it.

Each line is `DLLL ` and one JSON object with the keys of DLLogger's JSON backend: `timestamp`, `datetime` and
`elapsedtime` (strings; elapsed seconds since this round began), `type`, `step`, `data`. The names in `data` are NeMo's,
which the readers in the field look for. Only LOG lines with an integer step are written: known readers fail on
PARAMETER and METADATA lines. `consumed_samples` counts sequences, `train_step_timing in s` is the mean per step of the
logged window.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any, Final

from drillyard.telemetry.jsonlines import encode

DLLOGGER_FILE: Final = "dllogger.json"


def dllogger_line(record: dict[str, Any], *, sequence_length: int, started: float) -> str:
    """One line of metrics.jsonl as a DLLogger line; `started` is the time.time() at which the round began."""
    now = time.time()
    data: dict[str, Any] = {
        "reduced_train_loss": record["loss"],
        "lr": record["learning_rate"],
        "global_step": record["step"],
        "consumed_samples": record["step"] * (record["tokens"] // sequence_length),
        "train_step_timing in s": record["step_seconds"],
    }
    if record["grad_norm"] is not None:
        data["grad_norm"] = record["grad_norm"]
    if record.get("epoch") is not None:
        data["epoch"] = int(record["epoch"])
    return "DLLL " + encode(
        {
            "timestamp": f"{now:.6f}",
            "datetime": datetime.fromtimestamp(now).isoformat(" ", "microseconds"),
            "elapsedtime": f"{now - started:.6f}",
            "type": "LOG",
            "step": record["step"],
            "data": data,
        }
    )
