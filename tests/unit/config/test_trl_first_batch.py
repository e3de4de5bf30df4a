"""The first batch of a converted TRL config against the one that TRL 1.16.0 itself made of the same
file: `benchmarks/trainer_first_batch.py` compares the two and says how."""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks/trainer_first_batch.py"
RECORDED = {
    "chat": "35c88bd535b829f3",
    "chat, answers alone": "8ca1bc908588f389",
    "chat, cut at 32": "24d780f33bf89c19",
    "chat, packed": "8ca1bc908588f389",
    "prompt and completion": "5c5c63d67e6ba25b",
    "prompt and completion, all": "e2d2b65b0a7da468",
    "text": "dfbf55e3fb45d61a",
    "text, cut at 16": "a306e60b235ae412",
}
"""Digests of the documents, sorted: tokens and which are learnt; equal to TRL's on 2026-11-28."""


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARK))


@pytest.fixture(scope="module")
def model(benchmark: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = benchmark["write_model"](tmp_path_factory.mktemp("trl") / "model")
    return path


@pytest.mark.parametrize("case", RECORDED)
def test_the_first_batch_is_that_of_trl(
    case: str, benchmark: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    rows, settings = benchmark["CASES"][case]
    config = benchmark["write_case"](tmp_path, model, rows, settings)
    documents = sorted(benchmark["batch_of_drillyard"](config))
    assert hashlib.sha256(repr(documents).encode()).hexdigest()[:16] == RECORDED[case]
