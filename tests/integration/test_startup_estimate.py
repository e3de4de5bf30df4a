"""A run says at its start what it will need, and what its open settings became; a resume keeps
them, elsewhere not."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

from tests.facts import says
from tests.integration.held import Holds
from tests.integration.tiny_run import TIMEOUT_SECONDS, Run, drillyard, wait_until, write_config

from drillyard.config.load import load_run_config

LINE = re.compile(
    r"Estimate: .*fits: (about )?[\d.]+( to [\d.]+)? of [\d.,]+ GiB per rank \(activation"
    r" checkpointing: (\w+);.*\); "
    r".*step time .*not known \(.*cpu.*\)"
)


def recomputed(event: dict[str, Any]) -> str:
    return str(event["settings"]["training.activation_checkpointing"])


def test_a_run_tells_its_estimate_and_keeps_what_it_resolved(
    workplace: Path, tmp_path: Path
) -> None:
    config = write_config(workplace, "settled", training__global_batch_size=4)
    run = Run(config)
    first = run.start("--console", "text", holds=Holds(tmp_path, "attempt-0-step-10"))
    wait_until(lambda: run.last_step() >= 3, first)
    run.send(signal.SIGTERM, 0)
    assert first.wait(timeout=TIMEOUT_SECONDS) == 85, first.communicate()[1]
    (events,) = run.events("resolved")
    assert recomputed(events) == "none"
    assert says(events["reasons"]["training.activation_checkpointing"], "least recomputation")
    assert "kept" not in events
    (estimate,) = run.events("estimate")
    memory = estimate["memory_gib"]
    assert estimate["verdict"] == "fits"
    assert 0 < memory["low"] <= memory["high"] <= memory["available"]
    assert list(estimate["missing"]) == ["step_seconds"]

    # The directory holds the value; run.yaml goes on to say `auto`, so that it starts the run
    # anywhere.
    record = run.directory / "resolved.json"
    content = json.loads(record.read_text())
    (layout,) = content["layouts"]
    assert layout["settings"] == events["settings"]
    saved = load_run_config(run.directory / "run.yaml")
    assert (saved.training.activation_checkpointing, saved.parallelism.shard) == ("auto", "auto")

    # As if a version with another memory model had begun the run: what it trained with stays, and
    # is not estimated.
    layout["settings"]["training.activation_checkpointing"] = "full"
    record.write_text(json.dumps(content))
    second = run.start("--console", "text", holds=Holds(tmp_path, "attempt-0-step-30"))
    wait_until(
        lambda: len(run.events("resume")) == 1 and bool(run.events("first_step")[1:]), second
    )
    run.send(signal.SIGTERM, 0)
    assert second.wait(timeout=TIMEOUT_SECONDS) == 85, second.communicate()[1]
    again = run.events("resolved")[1]
    assert recomputed(again) == "full"
    assert "training.activation_checkpointing" in again["kept"]
    assert "changed" not in again

    # One rank is another layout: resolved again, and reported.
    last = drillyard("train", config, "--nproc-per-node", 1, "--console", "text")
    assert last.returncode == 0, last.stderr
    elsewhere = run.events("resolved")[2]
    assert recomputed(elsewhere) == "none"
    assert elsewhere["changed"]["training.activation_checkpointing"] == ["full", "none"]
    assert "training.activation_checkpointing: full -> none" in last.stdout
    (line,) = [line for line in last.stdout.splitlines() if line.startswith("Estimate:")]
    match = LINE.fullmatch(line)
    assert match is not None and match[3] == "none", line
    assert run.events("end")[-1]["status"] == "completed"
