"""A run that was started again in the same file, in every format of lines, with and without a word
of the start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tests.unit.measurement.lines import NOON, SECOND, at, perf

from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import measure

DONE, REPEATED = 20, 5
FIRST_STEP, DIED, STARTED, LOADED = 60.0, 255.0, 295.0, 325.0
"""Seconds after noon: steps take 10 s each, the last of the first attempt is done at 250."""


def megatron(step: int, elapsed: float) -> str:
    return (
        f" iteration {step:8}/ 40 | consumed samples: {step * 8} | elapsed time per iteration (ms):"
        " 10000.0 | global batch size: 8 | lm loss: 2.0E+00 |"
    )


def torchtitan(step: int, elapsed: float) -> str:
    return (
        f"[titan] step: {step:2}  loss:  8.1  grad_norm:  1.2  memory: 45.12GiB(57.01%)  tps: 5,762"
        "  mfu: 33.75%"
    )


def maxtext(step: int, elapsed: float) -> str:
    return (
        f"completed step: {step - 1}, seconds: 10.000, TFLOP/s/device: 15.2, Tokens/s/device:"
        " 579.0, loss: 13.652"
    )


def nemo2(step: int, elapsed: float) -> str:
    return (
        f"Training epoch 0, iteration {step - 1}/999 | lr: 4.498e-06 | global_step: {step - 1} |"
        " reduced_train_loss: 11.03 | train_step_timing in s: 10.00"
    )


def nemo1(step: int, elapsed: float) -> str:
    clock = f"{int(elapsed) // 60:02}:{int(elapsed) % 60:02}"
    return (
        f"Epoch 0: :  10%|#  | {step}/2000 [{clock}<43:24:54, reduced_train_loss=0.139,"
        f" global_step={step - 1}.0, train_step_timing in s=10.00]"
    )


def dllogger(step: int, elapsed: float) -> str:
    data = {"loss": 11.0, "train_step_timing in s": 10.0, "global_step": step}
    return (
        "DLLL"
        f" {json.dumps({'elapsedtime': str(elapsed), 'type': 'LOG', 'step': step, 'data': data})}"
    )


def hf_trainer(step: int, elapsed: float) -> str:
    clock = f"{int(elapsed) // 60:02}:{int(elapsed) % 60:02}"
    return (
        f" 10%|#  | {step}/60 [{clock}<05:28, 10.00s/it]{{'loss': 2.2, 'learning_rate': 1.1e-05,"
        " 'epoch': 0.1}"
    )


def torchtune(step: int, elapsed: float) -> str:
    return f"Step {step} | loss:1.87 lr:2e-05 tokens_per_second_per_gpu:405.04 "


STEPS: dict[str, Callable[[int, float], str]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "torchtune": torchtune,
    "maxtext": maxtext,
    "perflogger": lambda step, elapsed: perf(step, 10.0),
    "nemo2": nemo2,
    "nemo1": nemo1,
    "dllogger": dllogger,
    "hf_trainer": hf_trainer,
}
BANNERS = {
    "megatron": "using world size: 16, data-parallel size: 2",
    "torchtitan": "[titan] Starting job: Llama 3 8B training",
    "torchtune": (
        "INFO:torchtune.utils._logging:Running FullFinetuneRecipeDistributed with resolved config:"
    ),
    "maxtext": "Num_devices: 16, shape (1, 16)",
    "perflogger": "Starting FSDP training for 10 epoch(s)...",
    "nemo2": "All distributed processes registered. Starting with 16 processes",
    "nemo1": "All distributed processes registered. Starting with 16 processes",
    "dllogger": (
        'DLLL {"elapsedtime": "0.1", "type": "LOG", "step": "PARAMETER", "data":'
        ' {"global_batch_size": 8}}'
    ),
    "hf_trainer": "***** Running training *****",
}
RESUMED = {
    "megatron": "  successfully loaded checkpoint from /ckpt [ t 1/8, p 1/1 ] at iteration {last}",
    "torchtitan": "[titan] Finished loading the checkpoint in 3.21 seconds.",
    "maxtext": "restoring from this run's directory step {index}",
    "nemo2": (
        "Restored all states from the checkpoint at /ckpt/step={index}-consumed_samples=1.0-last"
    ),
    "nemo1": "Restored all states from the checkpoint at /ckpt/step={index}.ckpt",
    "hf_trainer": "  Continuing training from global step {last}",
}
EVERY_FORMAT = pytest.mark.parametrize("format", STEPS)


def lines(format: str, repeated: int, message: bool) -> Iterable[tuple[float, str]]:
    """Two attempts, with their times; the second does `repeated` steps of the first again."""
    if message:
        yield 0.0, BANNERS[format]
    for step in range(1, DONE + 1):
        yield FIRST_STEP + 10 * (step - 1), STEPS[format](step, 10.0 * step)
    last = DONE - repeated
    if message:
        yield STARTED, BANNERS[format]
        if format in RESUMED:
            yield LOADED - 10, RESUMED[format].format(last=last, index=last - 1)
    for number in range(1, 2 * DONE - last + 1):
        yield LOADED + 10 * number, STEPS[format](last + number, LOADED - STARTED + 10.0 * number)


def measured(path: Path, log: Iterable[tuple[float, str]], prefix: str = ""):
    path.write_text("".join(f"{prefix}{at(second)} {line}\n" for second, line in log))
    return measure(read_logs([path])).as_json()


@EVERY_FORMAT
@pytest.mark.parametrize("repeated", [0, REPEATED])
def test_a_start_that_the_log_tells_of_is_another_attempt(
    format: str, repeated: int, tmp_path: Path
) -> None:
    got = measured(tmp_path / "run.log", lines(format, repeated, message=True))
    assert got["restarts"] == 1
    assert got["step_seconds"]["p50"] == 10.0
    # Who died, and when, no line says: what comes before the second start is unknown.
    assert {name: value for name, value in got["seconds_by_category"].items() if value} == {
        "startup": FIRST_STEP - 10,
        "productive": 400.0,
        "restart": LOADED - STARTED,
        "unknown": STARTED - 250,
    } | ({"recomputation": 50.0} if repeated else {})


@EVERY_FORMAT
def test_steps_that_come_again_are_another_attempt_without_a_word(
    format: str, tmp_path: Path
) -> None:
    got = measured(tmp_path / "run.log", lines(format, REPEATED, message=False))
    assert got["restarts"] == 1
    by_category = got["microseconds_by_category"]
    assert sum(by_category.values()) == got["wall_seconds"] * SECOND
    # The clock of the program tells when it began; else nothing tells of the first step of an
    # attempt that prints no duration of its own.
    own_duration = format not in ("torchtitan", "torchtune", "nemo1", "nemo2")
    assert by_category["recomputation"] == (50 if own_duration else 40) * SECOND
    assert by_category["productive"] == 390 * SECOND


@pytest.mark.parametrize("format", ["dllogger", "hf_trainer"])
def test_a_clock_that_begins_again_tells_of_a_start(format: str, tmp_path: Path) -> None:
    got = measured(tmp_path / "run.log", lines(format, 0, message=False))
    assert got["restarts"] == 1
    assert got["seconds_by_category"]["restart"] == LOADED - STARTED


def test_the_clock_of_a_bar_that_begins_again_with_each_epoch_tells_nothing(tmp_path: Path) -> None:
    rows = [(10.0 * step, nemo1(step, 10.0 * (step % 10 + 1))) for step in range(1, 40)]
    assert measured(tmp_path / "run.log", rows)["restarts"] == 0


def test_a_failure_that_the_launcher_tells_of_ends_an_attempt(tmp_path: Path) -> None:
    rows = list(lines("maxtext", 0, message=False))
    failed = (
        "E0801 12:04:15.000000 1 torch/elastic/api.py:914] failed (exitcode: -9) local_rank: 0"
        " (pid: 7) of binary"
    )
    got = measured(tmp_path / "run.log", [*rows[:DONE], (DIED, failed), *rows[DONE:]])
    assert got["restarts"] == 1
    assert got["seconds_by_category"]["recomputation"] == DIED - 250
    assert got["seconds_by_category"]["restart"] == LOADED - DIED


def test_what_all_ranks_say_of_a_start_is_one_start_in_any_order(tmp_path: Path) -> None:
    rows = list(lines("torchtitan", 0, message=True))
    merged = [(second, f"[rank{rank}]:{line}") for second, line in rows for rank in range(4)]
    # Behind the stamp of their node; rank 3's output comes late, as launchers' buffers have it.
    late = [row for row in merged if "[rank3]" in row[1]]
    others = [row for row in merged if "[rank3]" not in row[1]]
    at_once = measured(tmp_path / "merged.log", merged)
    one_by_one = measured(
        tmp_path / "late.log", [*others[:3], *others[3:21], *late[:6], *others[21:], *late[6:]]
    )
    alone = measured(tmp_path / "alone.log", rows)
    for name in ("restarts", "microseconds_by_category", "step_seconds"):
        assert at_once[name] == one_by_one[name] == alone[name]


def test_the_banner_of_a_rank_that_prints_no_steps_counts_for_those_that_do(tmp_path: Path) -> None:
    rows = list(lines("megatron", 0, message=True))
    merged = [
        (second, f"[rank{7 if 'iteration ' in line[:12] else 0}]:{line}") for second, line in rows
    ]
    # The first banner may come after the first step only by its place in the file.
    merged.insert(3, merged.pop(0))
    log = tmp_path / "run.log"
    log.write_text("".join(f"{at(second)} {line}\n" for second, line in merged))
    found = read_logs([log])
    assert len(found.attempts) == 2
    assert found.attempts[1].first_time_us == NOON + int(STARTED) * SECOND
    # Without times the lines tell, and the first banner is that of the first start.
    log.write_text("".join(f"{line}\n" for _, line in merged))
    steps = read_logs([log]).steps
    assert [steps.line[steps.attempt == attempt][0] for attempt in (0, 1)] == [1, DONE + 4]


def test_steps_of_the_attempt_before_that_come_after_the_banner_are_not_of_the_new_one(
    tmp_path: Path,
) -> None:
    rows = list(lines("perflogger", 0, message=True))
    banner = rows.index((STARTED, BANNERS["perflogger"]))
    rows[banner - 2 : banner + 1] = [rows[banner], *rows[banner - 2 : banner]]
    log = tmp_path / "run.log"
    log.write_text("".join(f"{at(second)} {line}\n" for second, line in rows))
    steps = read_logs([log]).steps
    assert steps.step[steps.attempt == 1].tolist() == list(range(DONE + 1, 2 * DONE + 1))


def test_a_log_that_was_rotated_is_one_attempt(tmp_path: Path) -> None:
    rows = [f"{at(10 * step)} {perf(step, 10.0)}\n" for step in range(1, 31)]
    (tmp_path / "run.log.1").write_text("".join(rows[:20]))
    (tmp_path / "run.log").write_text("".join(rows[20:]))
    got = measure(read_logs([tmp_path])).as_json()
    assert got["restarts"] == 0
    assert got["seconds_by_category"]["productive"] == got["wall_seconds"] == 290.0
    # With a word of a start, or after a while, it is another one.
    (tmp_path / "run.log").write_text(f"{at(209)} {BANNERS['perflogger']}\n" + "".join(rows[20:]))
    assert measure(read_logs([tmp_path])).as_json()["restarts"] == 1
    (tmp_path / "run.log").write_text(
        "".join(f"{at(10 * step + 60)} {perf(step, 10.0)}\n" for step in range(21, 31))
    )
    assert measure(read_logs([tmp_path])).as_json()["restarts"] == 1
