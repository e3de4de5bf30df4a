"""acceptance.json: all that a report shows, what a later run compares with, and the rows that
`estimate` reads."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml
from tests.unit.acceptance.collective_observations import (
    GIB,
    evidence_of,
    expected_on,
    observed,
    searched_pairs,
)
from tests.unit.acceptance.nccl_samples import a4_output
from tests.unit.estimation.requests import request_of, run_config
from typer.testing import CliRunner

from drillyard.acceptance.accept_command import read_baseline
from drillyard.acceptance.acceptance_document import (
    AcceptanceDocument,
    acceptance_document,
    acceptance_schema,
)
from drillyard.acceptance.hardware_rows import hardware_file
from drillyard.acceptance.judgement import judge
from drillyard.acceptance.results import CheckResult, Status
from drillyard.cli.main import app
from drillyard.errors import UserError
from drillyard.estimation.run_estimate import estimate_run
from drillyard.estimation.target import machine_target
from drillyard.hardware import load_catalog

A4 = expected_on("a4-highgpu-8g")


def bad_node():
    pairs = searched_pairs(8, lambda one, other: 250.0 if 5 in (one, other) else 376.0)
    return judge(evidence_of(8, pairs, ended_at=1.75e9), A4)


def test_the_document_has_what_the_outcome_has():
    outcome = bad_node()
    document = json.loads(acceptance_document(outcome).as_text())
    assert document["verdict"] == "fail"
    assert [each["name"] for each in document["culprits"]] == ["n5"]
    assert document["culprits"][0]["checks"] == ["slow-pairs"]
    assert [each["at_fault"] for each in document["nodes"]].count(True) == 1
    pairs = [each for each in document["results"] if each["check"] == "collectives-pairs"]
    judged = [each for each in pairs if each["status"] == "fail"]
    assert all("n5" in each["nodes"] for each in judged)
    threshold = judged[0]["threshold"]
    assert threshold["value"] == pytest.approx(0.9 * threshold["reference"])
    assert threshold["reference"] <= threshold["bound"]
    assert judged[0]["series"] and judged[0]["reference_series"]
    (matrix,) = document["matrices"]
    row = matrix["values"][matrix["nodes"].index("n5")]
    assert {None if value is None else round(value) for value in row} == {None, 250}


def test_the_document_is_as_its_schema_says():
    document = acceptance_document(bad_node())
    AcceptanceDocument.model_validate_json(document.as_text())
    schema = acceptance_schema()
    printed = CliRunner().invoke(app, ["schema", "acceptance"])
    assert json.loads(printed.stdout) == schema
    assert set(schema["properties"]) == set(document.model_dump())


def test_what_is_not_finite_is_null():
    outcome = bad_node()
    strange = CheckResult(
        check="x", metric="y", nodes=(), status=Status.recorded, reason="", observed=float("nan")
    )
    values = {"ranks": [], "figure": float("inf")}
    seen = outcome.evidence.observations[0].model_copy(update={"values": values})
    evidence = outcome.evidence.model_copy(update={"observations": (seen,)})
    outcome = dataclasses.replace(outcome, results=(strange,), evidence=evidence)
    document = json.loads(acceptance_document(outcome).as_text())
    assert document["results"][0]["observed"] is None
    assert document["evidence"]["observations"][0]["values"]["figure"] is None


def test_a_document_is_a_baseline(tmp_path):
    outcome = bad_node()
    path = tmp_path / "acceptance.json"
    path.write_text(acceptance_document(outcome).as_text())
    assert read_baseline(path) == outcome.evidence


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"evidence": 3}', "[" * 100_000, "\xff"])
def test_what_is_not_a_baseline_is_an_error(text, tmp_path):
    path = tmp_path / "acceptance.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"acceptance\.json"):
        read_baseline(path)


def accept(*words):
    return CliRunner().invoke(app, ["accept", *map(str, words)])


def test_recorded_output_as_baseline_of_recorded_output(tmp_path):
    output = tmp_path / "output.txt"
    output.write_text(a4_output())
    # B300s have no row: the first run is not judged, the second by the first.
    machine = ["--machine", "a4x-maxgpu-4g-metal", "--nodes", 4]
    first = accept("--from", output, *machine, "--output", tmp_path / "first")
    assert first.exit_code == 3
    again = ["--baseline", tmp_path / "first" / "acceptance.json", *machine]
    assert accept("--from", output, *again).exit_code == 0
    output.write_text(a4_output(8 / 7))
    assert accept("--from", output, *again).exit_code == 1


def healthy():
    observations = [
        observed([0], {16 * GIB: [700.0]}, "all_reduce"),
        observed([0, 1], {1 << 20: [10.0], GIB: [310.0], 8 * GIB: [340.0, 341.0, 342.0]}),
        observed([0, 1], {1 << 20: [10.0], GIB: [200.0], 8 * GIB: [222.0]}, "reduce_scatter"),
    ]
    return judge(evidence_of(2, observations, ended_at=1.75e9), A4)


def test_measured_rows_are_those_that_estimate_rests_on(tmp_path):
    path = tmp_path / "measured.yaml"
    path.write_text(hardware_file(healthy(), "accept-a4"))
    facts = load_catalog(str(path))
    target = machine_target("a4-highgpu-8g", 2, facts)
    request = request_of(run_config(), target)
    ours = estimate_run(dataclasses.replace(request, facts=facts))
    assert "accept-a4" in str(ours.step_time)
    rows = yaml.safe_load(path.read_text())["bandwidths"]
    gather = next(row for row in rows if row["collective"] == "all_gather" and row["nodes"] == 2)
    assert gather["gb_per_s"] == {1: 10.0, 1024: 310.0, 8192: 341.0}


def test_a_faster_row_of_ours_does_not_hide_the_measured_one(tmp_path):
    from drillyard.hardware.bandwidths import bus_bandwidth

    path = tmp_path / "measured.yaml"
    path.write_text(hardware_file(healthy(), "accept-a4"))
    facts = load_catalog(str(path))
    found = bus_bandwidth(
        facts.bandwidths, facts.machine("a4-highgpu-8g"), "all_reduce", 1, 16 * GIB
    )
    assert found.gb_per_s.value == 700.0
    assert "accept-a4" in found.gb_per_s.source


def test_rates_of_devices_are_rows_of_the_accelerator(tmp_path):
    rates = [
        CheckResult(
            check="matmul", metric="matmul bf16", nodes=(rank,), status=Status.passed, reason="",
            observed=value, unit="TFLOP/s",
        )
        for rank, value in enumerate((1500.0, 1510.0, 1490.0))
    ]  # fmt: skip
    outcome = healthy()
    outcome = dataclasses.replace(outcome, results=(*outcome.results, *rates))
    path = tmp_path / "measured.yaml"
    path.write_text(hardware_file(outcome, "accept-a4"))
    accelerator = load_catalog(str(path)).accelerator("b200")
    assert accelerator.achievable_tflops["bf16"] == 1500.0
    assert accelerator.peak_tflops["bf16"] == 2250


def test_without_a_machine_or_a_figure_there_are_no_rows():
    with pytest.raises(UserError, match="machine"):
        hardware_file(judge(evidence_of(1, []), expected_on()), "x")
    with pytest.raises(UserError, match="write-hardware"):
        hardware_file(judge(evidence_of(1, []), A4), "x")


def test_the_command_writes_rows_that_the_catalog_reads(tmp_path):
    output, rows = tmp_path / "output.txt", tmp_path / "rows.yaml"
    output.write_text(a4_output())
    found = accept("--from", output, "--machine", "a4-highgpu-8g", "--write-hardware", rows)
    assert found.exit_code == 0
    assert len(load_catalog(str(rows)).bandwidths)
    refused = accept("--from", output, "--write-hardware", rows)
    assert isinstance(refused.exception, UserError)
