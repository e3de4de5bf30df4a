"""`drillyard metrics` as a command: flags that would have no effect are errors."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.errors import UserError

RECIPE = (
    "--format",
    "gpu-recipes",
    "--batch_size=2",
    "--num_accelerators=8",
    "--model_flops=1e15",
    "--max_flops=989",
)


def metrics(*arguments):
    return CliRunner().invoke(app, ["metrics", *map(str, arguments)])


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "dllogger.json"
    path.write_text('DLLL {"step": 10, "data": {"train_step_timing in s": 4.0}}\n')
    return path


@pytest.mark.parametrize(
    "flags",
    [
        ("--accelerator", "b200"),
        ("--num-gpus", "8"),
        ("--timezone", "UTC"),
        ("--price-per-gpu-hour", "1"),
        ("--framework", "dllogger"),
        ("--json",),
        ("-f",),
        ("--fail-if", "mfu<1"),
    ],
)
def test_flags_that_gpu_recipes_does_not_have_are_not_ignored(log, flags):
    ended = metrics(log, *RECIPE, *flags)
    assert isinstance(ended.exception, UserError)
    assert "not with --format gpu-recipes" in str(ended.exception)


def test_the_flags_of_gpu_recipes_are_taken(log):
    ended = metrics(
        f"--file={log}", *RECIPE, "--start_step=1", "--end_step", "20", "--precision=fp8"
    )
    assert ended.exception is None, ended.exception
    assert (
        ended.stdout
        == "Average step time: 4.00000000\nTFLOPS/Accelerator: 62.50000000\nMFU: 0.06319515\n"
    )
    assert isinstance(metrics(log, f"--file={log}", *RECIPE).exception, UserError)
