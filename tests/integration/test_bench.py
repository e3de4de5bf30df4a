"""`drillyard bench` through the real command, on one rank and on two: what it prints, and what it
leaves behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.integration.tiny_run import DRILLYARD, TIMEOUT_SECONDS, write_config, write_rows

from drillyard.training.bench_document import BenchDocument

SETTINGS = {"training__precision": "fp32", "training__threads_per_rank": 1}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl")
    return write_config(tmp_path, "benched", **SETTINGS)


def bench(config: Path, *arguments: str, limit_kib: int = 0) -> subprocess.CompletedProcess[str]:
    command = [*DRILLYARD, "bench", str(config), "--warmup", "1", *arguments]
    if limit_kib:
        command = ["bash", "-c", f'ulimit -v {limit_kib}; exec "$@"', "bash", *command]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=config.parent
    )


def test_two_ranks_give_a_document_whose_parts_are_the_step(config: Path) -> None:
    before = {*config.parent.iterdir()}
    done = bench(config, "--steps", "3", "--nproc-per-node", "2", "--json")
    assert done.returncode == 0, done.stderr
    document = BenchDocument.model_validate_json(done.stdout)
    parts = {one.part: one for one in document.parts}
    assert document.ranks == 2 and document.device == "cpu" and document.accelerator is None
    assert document.tokens_per_second_per_rank == pytest.approx(
        document.tokens_per_step_per_rank / document.step_seconds
    )
    for part in ("data", "forward", "loss", "backward", "gather and reduce", "optimizer"):
        assert parts[part].seconds > 0, part
    assert parts["waiting"].seconds > 0, "both ranks meet in one all-reduce a step"
    assert all(one.mfu is None for one in document.speeds) and len(document.speeds) == 3
    assert document.trace is None and document.idle_seconds is None
    assert {*config.parent.iterdir()} == before, "no run directory, no cache"


def test_a_rank_alone_traces_a_step_and_says_what_was_measured(config: Path) -> None:
    done = bench(config, "--steps", "1", "--trace", "step.json")
    assert done.returncode == 0, done.stderr
    assert "the CPU was measured" in done.stdout
    events = json.loads((config.parent / "step.json").read_text())["traceEvents"]
    assert any("AdamW.step" in event.get("name", "") for event in events)
    refused = bench(config, "--steps", "1", "--trace", "step.json")
    assert refused.returncode == 2 and "step.json exists" in refused.stderr


def test_where_memory_runs_out_the_part_and_what_would_fit_are_named(config: Path) -> None:
    sets = ["data.sequence_length=1024", "training.micro_batch_size=256"]
    sets += ["model.config.n_positions=1024", "training.activation_checkpointing=none"]
    done = bench(
        config, "--steps", "1", *(word for each in sets for word in ("--set", each)),
        limit_kib=6_000_000,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "`forward`" in done.stderr and "predicted:" in done.stderr
    assert "training.micro_batch_size:" in done.stderr
