"""`--replay STEP` repeats what was computed rightly to the bit, and tells where one bit of one
gradient was flipped.

A replay on two ranks, over a restart of the run, is at the end of test_data_faults.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.tiny_run import TIMEOUT_SECONDS, Run, contents, drillyard, write_config

FLIPPED = 14
"""A low bit of an exponent flips in this step, which is not logged: training goes on as if nothing
had been."""
EXPLODED = 17
"""The highest bit of the exponent flips in this one, which is not logged either: the gradient is
not finite."""


@pytest.fixture(scope="module")
def failing(workplace: Path) -> Run:
    """A run of one rank, 20 steps, every third one logged, a checkpoint every tenth, whose hardware
    failed twice."""
    config = write_config(
        workplace,
        "failing",
        training__steps=20,
        checkpoint={"every_steps": 10, "keep": 9},
        logging={"every_steps": 3, "tensorboard": False},
    )
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    wrapper = Path(__file__).with_name("flipped_gradient.py")
    rank = [sys.executable, str(wrapper), f"{FLIPPED}:25,{EXPLODED}:30", "train", str(config)]
    ended = subprocess.run(
        rank, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=os.environ | place
    )
    assert ended.returncode == 0, ended.stderr
    return Run(config)


def all_but_replays(run: Run) -> dict[str, str]:
    return {
        name: digest
        for name, digest in contents(run.directory).items()
        if not name.startswith("replays/")
    }


def test_a_non_finite_step_between_logged_ones_is_reported_with_its_samples(failing: Run) -> None:
    (events,) = failing.events("nonfinite_step")
    assert events["step"] == EXPLODED
    assert events["grad_norm"] is None
    assert [line["skipped_steps"] for line in failing.records("metrics.jsonl")] == [
        0,
        0,
        0,
        0,
        0,
        1,
        1,
    ]
    shown = drillyard("data", "show", failing.directory, "--step", EXPLODED)
    assert shown.returncode == 0, shown.stderr
    (indices,) = events["samples"].values()
    assert [int(index) for index in re.findall(r"rows, sequence (\d+)", shown.stdout)] == indices


def test_what_was_computed_rightly_repeats_to_the_bit_and_the_run_is_left_alone(
    failing: Run,
) -> None:
    before = all_but_replays(failing)
    ended = drillyard("train", failing.config, "--replay", 12)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert says(ended.stdout, "equal: ... step 12")
    assert "step-00000010" in ended.stdout
    assert all_but_replays(failing) == before
    verdict = json.loads(
        (failing.directory / "replays" / "step-00000012" / "verdict.json").read_text()
    )
    assert verdict["equal"]
    assert verdict["compared"] == [12]


def test_one_flipped_bit_of_one_gradient_is_reported(failing: Run) -> None:
    ended = drillyard("train", failing.config, "--replay", 15)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert says(ended.stdout, "different: 1 of 2 logged steps ... Step 15")
    output = re.findall(r"step 15, (loss|grad_norm): ([\d.e+-]+)\D+([\d.e+-]+)", ended.stdout)
    assert output, ended.stdout
    (logged,) = [line for line in failing.records("metrics.jsonl") if line["step"] == 15]
    for metric, then, now in output:
        assert float(then) == logged[metric] != float(now)
        assert float(now) == pytest.approx(float(then), rel=0.05), (
            "such a failure shows in no curve"
        )


def test_a_setting_that_the_run_has_changed_since_is_put_back_as_it_was(failing: Run) -> None:
    saved = failing.directory / "run.yaml"
    before = saved.read_text()
    assert "loss_chunk_tokens: null" in before and "attention: auto" in before
    changed = before.replace("loss_chunk_tokens: null", "loss_chunk_tokens: 5")
    saved.write_text(changed.replace("attention: auto", "attention: eager"))
    ended = drillyard("train", failing.config, "--replay", 12)
    saved.write_text(before)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert says(ended.stdout, "equal: ... step 12")


def test_where_libraries_round_otherwise_nothing_is_compared_and_the_reason_is_named(
    failing: Run,
) -> None:
    ended = drillyard(
        "train", failing.config, "--replay", 12, env=os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert says(
        ended.stderr,
        "--replay 12: ... cannot be compared ... ATEN_CPU_CAPABILITY: not set ... default",
    )


def test_what_cannot_be_replayed_is_refused_with_the_reason(failing: Run) -> None:
    for arguments, reason in (
        ([14], "not logged ... 12 and 15"),
        ([9], "no checkpoint ... 10, 20"),
        ([15, "--nproc-per-node", 2], "step 15 ... 1 rank"),
    ):
        ended = drillyard("train", failing.config, "--replay", *arguments)
        assert ended.returncode == 2, ended.stdout
        assert ended.stderr.startswith("error: ")
        assert says(ended.stderr, reason)
