from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.acceptance.host_scenarios import dcgm_3, dcgm_4, expected, judged, observed

from drillyard.acceptance.checks import dcgm as check
from drillyard.acceptance.judgement import judge
from drillyard.acceptance.parsers.dcgm import DcgmSeverity, parse_dcgm, recognise
from drillyard.acceptance.parsers.errors import NotThisOutput
from drillyard.acceptance.recorded import recorded_evidence
from drillyard.acceptance.results import Status


def status_of(text: str, **answer: Any) -> Status:
    tool = {"installed": True, "error": None, "text": text, **answer}
    results = judged(check.CHECK, observed("dcgm", {"tools": {"diagnostic": tool}}))
    return max((each.status for each in results), key=list(Status).index)


def test_severities_are_those_of_dcgm() -> None:
    """RESET is 6; a checker that takes it for 3, which is UNKNOWN, lets it pass."""
    assert [each.name for each in sorted(DcgmSeverity)] == [
        "NONE", "MONITOR", "ISOLATE", "UNKNOWN", "TRIAGE", "CONFIG", "RESET",
    ]  # fmt: skip


def test_a_failing_report_of_dcgm_4_is_not_passed_for_want_of_the_key_of_dcgm_3() -> None:
    assert status_of(dcgm_4(8, gpu=3, severity=2)) is Status.fail


def test_dcgm_4_names_the_gpu_by_its_entity() -> None:
    (failed,) = [each for each in parse_dcgm(dcgm_4(8, gpu=3, severity=6)).results if each.warnings]
    assert (failed.gpu, failed.severity) == (3, DcgmSeverity.RESET)


@pytest.mark.parametrize("word", ["ERROR", "Unknown", "Not Supported", ""])
def test_a_status_that_is_not_known_does_not_pass(word: str) -> None:
    assert status_of(dcgm_4(8, gpu=1, status=word)) is Status.incomplete


def test_what_was_skipped_everywhere_does_not_pass() -> None:
    assert status_of(dcgm_4(8).replace('"Pass"', '"Skip"')) is Status.incomplete


def test_a_test_on_7_of_8_gpus_does_not_pass() -> None:
    assert status_of(dcgm_4(7)) is Status.incomplete


def test_a_pass_beside_a_warning_without_severity_does_not_pass() -> None:
    """A memory test that could not allocate memory and passed."""
    document = json.loads(dcgm_3(8))
    test = document["DCGM GPU Diagnostic"]["test_categories"][0]["tests"][0]
    test["results"][0]["warnings"] = ["Error allocating memory"]
    assert status_of(json.dumps(document)) is Status.incomplete


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ({"status": "Fail"}, Status.fail),
        ({"status": "Warn"}, Status.warn),
        ({"status": "Odd"}, Status.incomplete),
        ({"status": "Pass", "warnings": [{"warning": "w", "error_severity": 2}]}, Status.fail),
        ({"status": "Pass"}, Status.passed),
        ({"status": "Skip"}, Status.passed),
    ],
)
def test_a_test_that_fails_on_no_gpu_fails_by_its_summary(
    summary: dict[str, Any], status: Status
) -> None:
    assert status_of(dcgm_4(summary=summary)) is status


def test_several_gpus_in_one_result_of_an_early_dcgm_3() -> None:
    text = json.dumps({
        "DCGM GPU Diagnostic": {
            "version": "3.1.7",
            "test_categories": [
                {
                    "category": "Deployment",
                    "tests": [
                        None,
                        {"name": "Denylist", "results": [{"gpu_ids": "0,1,2", "status": "PASS"}]},
                    ],
                }
            ],
        }
    })  # fmt: skip
    assert parse_dcgm("WARNING: printed before\n" + text).gpus == {0, 1, 2}


def test_an_error_of_dcgm_itself_does_not_pass() -> None:
    document = json.loads(dcgm_4(8))
    document["DCGM Diagnostic"]["runtime_error"] = "made up"
    assert status_of(json.dumps(document)) is Status.incomplete


@pytest.mark.parametrize("cut", range(1, 400, 23))
def test_no_cut_of_a_report_passes(cut: int) -> None:
    text = dcgm_4(8)
    with pytest.raises(NotThisOutput):
        parse_dcgm(text[:-cut])


@pytest.mark.parametrize("text", ["", "{}", "[]", "Error: unable to establish a connection", "nul"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(NotThisOutput):
        parse_dcgm(text)
    assert status_of(text) is Status.incomplete


def test_reports_are_recognised_whole_or_not() -> None:
    assert recognise(dcgm_3(2)) and recognise(dcgm_4(2)[:-50])
    assert recognise("# nccl-tests version 2.13") is None and recognise("{}") is None


@pytest.mark.parametrize("make", [dcgm_3, dcgm_4])
def test_recorded_reports_are_judged(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "diag.json"
    for text, verdict in ((make(8), Status.passed), (make(8, gpu=3, severity=6), Status.fail)):
        path.write_text(text)
        outcome = judge(recorded_evidence([path], expected()), expected())
        assert outcome.verdict is verdict
    path.write_text(make(8)[:-40])
    assert judge(recorded_evidence([path], expected()), expected()).verdict is Status.incomplete
