"""The result of a campaign as a table within 100 columns, as JSON and as soak's Markdown."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.facts import says

from drillyard.faults.campaign import CampaignResult
from drillyard.faults.campaign_report import as_json, print_campaign
from drillyard.faults.fault_verdicts import FaultVerdict
from drillyard.faults.plan import Fault
from drillyard.telemetry.jsonlines import encode

SOAK = Path(__file__).resolve().parents[3] / "benchmarks" / "soak.py"


@pytest.fixture
def result() -> CampaignResult:
    killed = Fault(1, "kill", "before-manifest", None, 0, 44, 0.5)
    flipped = Fault(2, "flip", "step", 1, 1, 21, 0.5)
    full = Fault(103, "disk-full", "shards", 0, 0, 52, 0.5)
    another_loss = "step 17: loss and gradient norm (1.5, 2.5), undisturbed (1.25, 2.5)"
    of_flip = "byte 123456789 of __1_0.distcp (20) flipped: reported, resumed at step 16"
    of_kill = "started again, resumed at step 40"
    late = "while shards are written, from step 52"
    return CampaignResult(
        verdicts=[
            FaultVerdict(
                killed, "step 44, between last shard and manifest", of_kill, True, 4, 8.25
            ),
            FaultVerdict(flipped, "50% into step 21", of_flip, True, 5, 9.75, [another_loss]),
            FaultVerdict(full, late, "not hit", False, problems=["the run had ended before"]),
        ],
        runs=2,
        steps=60,
        reference_seconds=10.0,
        seconds=125.4,
    )


def shown(result: CampaignResult) -> str:
    stream = io.StringIO()
    print_campaign(result, Console(file=stream, highlight=False))
    return stream.getvalue()


def test_the_table_fits_in_a_hundred_columns_and_is_plain_when_piped(
    result: CampaignResult,
) -> None:
    text = shown(result)
    table = text[: text.index("2: step 17")]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 100
    assert "\x1b" not in text
    assert "kill supervisor" in text and "8.2 s" in text and "FAIL" in text


def test_problems_and_totals_are_below_the_table(result: CampaignResult) -> None:
    text = shown(result)
    assert says(text, "2: step 17: ... (1.5, 2.5) ... (1.25, 2.5)")
    assert says(text, "3 faults in 2 runs of 60 steps: 1 passed, 2 failed; 2 of 3")
    assert says(text, "9 steps redone, 9.0 s ... 0:02:05")
    assert "deterministic" not in text


def test_on_gpus_the_condition_of_the_verdict_is_named(result: CampaignResult) -> None:
    result.on_gpus = True
    assert "training.deterministic" in shown(result)


def test_json_has_every_fault(result: CampaignResult) -> None:
    value = json.loads(encode(as_json(result)))
    assert (value["version"], value["passed"], value["runs"]) == (1, False, 2)
    assert [fault["passed"] for fault in value["faults"]] == [True, False, False]
    assert [fault["target"] for fault in value["faults"]] == ["supervisor", 1, 0]
    assert value["faults"][1]["problems"] == result.verdicts[1].problems


def test_markdown_sums_up_by_fault_and_place(result: CampaignResult) -> None:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None and spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    text = soak.as_markdown(result)
    assert says(text, "| kill ... | supervisor: 1 | 1 | 1 | 1 | 4 | 8.2 |")
    assert says(text, "| disk-full ... | - | 1 | 0 | 0 | 0 | - |")
    assert says(text, "fault 2 (flip, kill rank 1, 50% ... step 21): step 17: loss")
