"""`diff`: equal to the bit or not, where first, and by how much."""

from __future__ import annotations

import json
import math

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import says
from typer.testing import CliRunner

from drillyard.cli import report
from drillyard.errors import UserError
from drillyard.telemetry.difference import compare_runs
from drillyard.telemetry.jsonlines import encode


def write_run(directory, losses: dict[int, float], **more):
    directory.mkdir(exist_ok=True)
    rows = [
        encode({"step": step, "round": 0, "loss": loss, "grad_norm": 1.0, **more})
        for step, loss in losses.items()
    ]
    (directory / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return directory


@pytest.fixture
def run_diff():
    app = typer.Typer()
    app.callback()(lambda: None)
    report.register(app)
    return lambda *arguments: CliRunner().invoke(app, ["diff", *map(str, arguments)])


def test_equal_runs_exit_with_0(tmp_path, run_diff):
    a, b = (write_run(tmp_path / name, {1: 0.1, 2: math.nan}) for name in "ab")
    result = run_diff(a, b)
    assert result.exit_code == 0
    assert says(result.stdout, "Equal ... 2 common steps: loss, grad_norm")


def test_one_bit_is_found_named_and_measured(tmp_path, run_diff):
    other = math.nextafter(0.5, 1)
    a = write_run(tmp_path / "a", {1: 1.0, 2: 0.5, 3: 2.0})
    b = write_run(tmp_path / "b", {1: 1.0, 2: other, 3: 2.5})
    result = run_diff(a, b)
    assert result.exit_code == 1
    assert says(result.stdout, f"loss ... step 2: A 0.5, B {other!r}")
    assert says(
        result.stdout,
        "1.11e-16 (relative 2.22e-16) ... 2 of 3 common steps ... step 3: 0.5 (relative 0.2)",
    )
    assert says(result.stdout, "Equal ... 3 common steps: grad_norm")


def test_a_shorter_run_differs_by_its_missing_steps(tmp_path, run_diff):
    a = write_run(tmp_path / "a", {step: 1.0 for step in (1, 2, 3, 4, 7)})
    b = write_run(tmp_path / "b", {1: 1.0, 2: 1.0})
    result = run_diff(a, b)
    assert result.exit_code == 1
    assert "3 steps only in A: 3-4, 7" in result.stdout


def test_the_last_occurrence_of_a_step_done_again_counts(tmp_path):
    a, b = (write_run(tmp_path / name, {1: 1.0, 2: 2.0}) for name in "ab")
    with (b / "metrics.jsonl").open("a") as file:
        file.write(encode({"step": 2, "round": 1, "loss": 3.0, "grad_norm": 1.0}) + "\n")
    assert compare_runs(a, b).divergences[0].first_step == 2


def test_json_says_the_same_and_is_strict(tmp_path, run_diff):
    a, b = write_run(tmp_path / "a", {1: 1.0}), write_run(tmp_path / "b", {1: math.inf})
    document = json.loads(run_diff(a, b, "--json").stdout, parse_constant=pytest.fail)
    assert document["equal"] is False
    assert document["divergences"][0]["first_step"] == 1
    assert document["nonfinite"]["divergences"]["0"]["first_difference"] == "inf"


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "lo'])
def test_a_directory_without_logged_steps_is_the_users_mistake(tmp_path, content):
    a = write_run(tmp_path / "a", {1: 1.0})
    (tmp_path / "b").mkdir()
    if content is not None:
        (tmp_path / "b" / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        compare_runs(a, tmp_path / "b")


def test_runs_without_a_common_step_cannot_be_compared(tmp_path):
    a, b = write_run(tmp_path / "a", {1: 1.0}), write_run(tmp_path / "b", {5: 1.0, 9: 1.0})
    with pytest.raises(UserError, match=r"no logged step.*1\.\.1 and 5\.\.9"):
        compare_runs(a, b)


losses = st.dictionaries(st.integers(1, 12), st.floats(allow_nan=True), min_size=1)


@given(losses, losses)
def test_comparison_is_symmetric_and_exact(tmp_path_factory, left, right):
    base = tmp_path_factory.mktemp("runs")
    a, b = (
        write_run(base / name, dict(sorted(values.items())))
        for name, values in (("a", left), ("b", right))
    )
    common = sorted(left.keys() & right.keys())
    if not common:
        return
    forth, back = compare_runs(a, b), compare_runs(b, a)
    differing = [step for step in common if repr(left[step]) != repr(right[step])]
    first_steps = [divergence.first_step for divergence in (*forth.divergences, *back.divergences)]
    assert first_steps == (differing[:1] * 2)
    assert forth.equal == (not differing and left.keys() == right.keys())
    assert (forth.only_first, forth.only_second) == (back.only_second, back.only_first)
    if differing:
        (divergence,) = forth.divergences
        assert divergence.steps == len(differing)
        assert divergence.largest_difference >= divergence.first_difference
