"""The real command: the same bits twice, and after a rank was killed in the middle of a run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.workload import llama_run
from setups import Setting

STEPS = 200
TINY_STEPS = 60
CHECKPOINTS = 10


def same_bits(setting: Setting) -> dict[str, Any]:
    """`drillyard train` twice with `deterministic: true`: undisturbed, and with its rank killed
    after a checkpoint."""
    steps = TINY_STEPS if setting.tiny else STEPS
    config = _write_config(setting, steps)
    undisturbed, disturbed = (setting.directory / name for name in ("undisturbed", "disturbed"))
    _command(config, undisturbed)
    killed_after = _command(config, disturbed, kill=True)
    expected, found = _losses(undisturbed), _losses(disturbed)
    assert len(expected) == steps, f"{len(expected)} of {steps} steps are logged"
    different = [step for step in expected if expected[step] != found.get(step)]
    assert not different, f"losses differ in {len(different)} steps, from step {different[0]} on"
    assert _digests(undisturbed) == _digests(disturbed), "the exported weights differ"
    return {"steps": steps, "killed_after_checkpoint": killed_after, "last_loss": expected[steps]}


def _write_config(setting: Setting, steps: int) -> Path:
    settings = llama_run(
        setting.directory,
        "bits",
        hidden=64 if setting.tiny else 512,
        layers=2,
        heads=4,
        kv_heads=2,
        sequence_length=64 if setting.tiny else 1024,
        micro_batch_size=2,
        vocab_size=400,
        documents=200,
        words=60,
        training={
            "steps": steps,
            "device": setting.device,
            "deterministic": True,
            "compile": not setting.tiny,
            "threads_per_rank": 1 if setting.tiny else None,
        },
        checkpoint={"every_steps": steps // CHECKPOINTS},
        logging={"every_steps": 1, "tensorboard": False},
    )
    path = setting.directory / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


def _command(config: Path, run_directory: Path, *, kill: bool = False) -> int | None:
    """Run the training to its end; with `kill` its rank gets SIGKILL once a checkpoint is there,
    whose step is returned."""
    changes = {"name": run_directory.name, "output": str(run_directory.parent)}
    command = [sys.executable, "-m", "drillyard", "train", str(config), "--nproc-per-node", "1"]
    process = subprocess.Popen(
        [*command, *(word for key in changes for word in ("--set", f"{key}={changes[key]}"))]
    )
    step = None
    while process.poll() is None:
        time.sleep(0.01)
        if kill and step is None and (step := _checkpoint_step(run_directory)) is not None:
            os.kill(_rank_of(process.pid), signal.SIGKILL)
    assert process.returncode == 0, f"drillyard train ended with exit code {process.returncode}"
    assert (step is not None) == kill, "there was no checkpoint to kill it after"
    return step


def _checkpoint_step(run_directory: Path) -> int | None:
    return next(
        (
            event["step"]
            for event in _lines(run_directory / "events.jsonl")
            if event["event"] == "checkpoint"
        ),
        None,
    )


def _rank_of(supervisor: int) -> int:
    """The process of rank 0 below the supervisor's."""
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == supervisor and b"RANK=0" in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except (OSError, ValueError, IndexError):
            continue
    raise AssertionError(f"process {supervisor} has no rank")


def _losses(run_directory: Path) -> dict[int, float]:
    """The last loss that each step had."""
    return {
        row["step"]: row["loss"] for row in _lines(run_directory / "metrics.jsonl") if "loss" in row
    }


def _digests(run_directory: Path) -> list[str]:
    return [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run_directory.glob("final/*.safetensors"))
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete JSON lines so far."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
