"""Steps of HF Trainer lines, which carry none: by the bar of training alone, by epochs and totals,
or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.measurement.lines import SAMPLES, at, read_bytes, write
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.errors import ConfigError
from drillyard.measurement import comparison
from drillyard.measurement.comparison import compare_runs
from drillyard.measurement.parsed_log import NONFINITE, ParsedLog
from drillyard.measurement.read_logs import Tail, read_logs
from drillyard.measurement.run_result import measure
from drillyard.measurement.user_facts import UserFacts


def loss_line(epoch: float | None, loss: float = 2.0) -> str:
    ends = "" if epoch is None else f", 'epoch': {round(epoch, 2)}"
    return f"{{'loss': {loss}, 'grad_norm': 0.5, 'learning_rate': 1e-05{ends}}}\n"


def totals_line(
    steps: int, seconds: float, epochs: float, batch: int = 8, *, version: int = 4
) -> str:
    rates = {
        "train_runtime": round(seconds, 4),
        "train_samples_per_second": round(batch * steps / seconds, 3),
        "train_steps_per_second": round(steps / seconds, 3),
        "train_loss": 2.25,
        "epoch": round(epochs, 2),
    }
    return str(rates if version == 4 else {name: f"{rate:.4g}" for name, rate in rates.items()})


def logged(steps: list[int], per_epoch: float) -> str:
    return "".join(loss_line(step / per_epoch) for step in steps)


def read_text(text: str) -> ParsedLog:
    return read_bytes(text.encode())


FOREIGN = {
    "Loading checkpoint shards: ": "30/30",
    "Fetching 30 files: ": "30/30",
    "Map (num_proc=4): ": "30/30",
    "Generating train split: ": "30/30",
    "Tokenizing train dataset: ": "30/30",
    "Train dataset: ": "30/30",
    "Saving the dataset (1/1 shards): ": "30/30",
    "Evaluating: ": "29/30",
    "Loading weights: ": "15/30",
    "": "30/30",
}


@pytest.mark.parametrize("prefix", ["", "0: ", "[rank0]: ", "[pod/job-0-0/main] "])
@pytest.mark.parametrize("description", FOREIGN)
def test_another_tasks_bar_counts_no_steps(description: str, prefix: str) -> None:
    bar = f"{description}100%|####| {FOREIGN[description]} [00:12<00:00,  2.44it/s]\n"
    lines = [bar, *(loss_line(None) for _ in range(4))]
    log = read_text("".join(prefix + line for line in lines))
    assert log.numbered_lines
    assert log.steps.step.tolist() == [1, 2, 3, 4]
    result = measure(log).as_json()
    assert result["step_seconds"]["basis"] is None
    assert ["--logging-steps"] in [one["flags"] for one in result["missing"]]


@pytest.mark.parametrize(
    "description", ["", "Train: ", "Training: ", "Epoch 1/3: ", "global step: ", "My run: "]
)
def test_a_bar_of_training_counts_steps_beside_bars_of_other_tasks(description: str) -> None:
    foreign = "Loading checkpoint shards: 100%|####| 30/30 [00:12<00:00,  2.44it/s]\n"
    evaluation = "100%|####| 4/4 [00:01<00:00,  4.00it/s]\n{'eval_loss': 2.5, 'epoch': 0.5}\n"
    text = foreign
    for step in (10, 20, 30, 40):
        text += f"{description} 10%|##  | {step}/100 [00:{step}<01:00,  1.00it/s]\n"
        text += loss_line(None) + (evaluation if step == 20 and not description else "")
    log = read_text(text)
    assert not log.numbered_lines
    assert log.steps.step.tolist() == [10, 20, 30, 40]
    assert log.steps.elapsed_seconds.tolist() == [10, 20, 30, 40]


def test_bars_that_were_all_drawn_before_the_lines_say_how_many_steps_there_are() -> None:
    bars = "".join(f" 10%|# | {step}/60 [00:{step}<00:10,  1.0it/s]\r" for step in range(10, 60))
    end = "100%|##| 60/60 [01:00<00:00,  1.0it/s]\n"
    text = bars + end + logged([10, 20, 30, 40, 50, 60], 60) + totals_line(60, 60.0, 1.0) + "\n"
    log = read_text(text)
    assert log.steps.step.tolist() == [10, 20, 30, 40, 50, 60]
    assert measure(log).timing.times.typical == pytest.approx(1.0)


def test_a_log_without_bars_has_the_step_time_of_its_own_totals() -> None:
    # 60 steps in 120 s: 2 s a step, of 8 x 4096 tokens on 8 GPUs: 2,048 tokens/s/GPU.
    text = logged([10, 20, 30, 40, 50, 60], 60) + totals_line(60, 120.0, 1.0) + "\n"
    asked = UserFacts(num_gpus=8, sequence_length=4096, params=7_000_000_000)
    result = measure(read_text(text), asked)
    assert result.log.steps.window_steps.tolist() == [10] * 6
    assert result.timing.times.mean == pytest.approx(2.0)
    assert result.speed.tokens_per_second_per_gpu == pytest.approx(2048)
    assert result.speed.tflops_per_gpu == pytest.approx(6 * 7e9 * 2048 / 1e12)


def test_time_stamps_of_lines_are_of_the_steps_between_them() -> None:
    text = "".join(f"{at(20 * index)} {loss_line(index / 6)}" for index in range(1, 7))
    with_totals = measure(read_text(text + totals_line(60, 120.0, 1.0) + "\n"))
    assert with_totals.timing.times.p50 == pytest.approx(2.0)
    assert with_totals.timing.times.window_steps == 10
    assert measure(read_text(text)).timing.times.typical is None
    by_flag = measure(read_text(text), UserFacts(logging_steps=10))
    assert by_flag.timing.times.p50 == pytest.approx(2.0)
    assert by_flag.log.steps.step.tolist() == [10, 20, 30, 40, 50, 60]
    assert not by_flag.missing or "step_seconds" not in {one.field for one in by_flag.missing}


def test_the_flag_that_is_named_is_taken_by_the_command(tmp_path: Path) -> None:
    text = "".join(f"{at(20 * index)} {loss_line(None)}" for index in range(1, 7))
    path = write(tmp_path / "run.log", text)
    found = CliRunner().invoke(app, ["metrics", str(path), "--logging-steps", "10", "--json"])
    assert json.loads(found.stdout)["step_seconds"]["p50"] == pytest.approx(2.0)
    found = CliRunner().invoke(app, ["metrics", str(path), "--logging-steps", "0"])
    assert isinstance(found.exception, ConfigError)
    stated = write(tmp_path / "stated.log", loss_line(None).replace("}", ", 'step': 5}"))
    found = CliRunner().invoke(app, ["metrics", str(stated), "--logging-steps", "10", "--json"])
    assert any("--logging-steps" in text for text in json.loads(found.stdout)["warnings"])


def test_a_log_cut_in_the_middle_has_its_steps_from_its_header() -> None:
    header = (
        "***** Running training *****\n  Num examples = 480\n  Num Epochs = 2\n"
        "  Total optimization steps = 120\n"
    )
    log = read_text(header + logged([10, 20, 30], 60) + "{'loss': 2.0, 'grad_no")
    assert log.steps.step.tolist() == [10, 20, 30]


def test_a_first_step_that_is_logged_too() -> None:
    text = logged([1, 10, 20, 30, 40, 50], 25) + totals_line(52, 52.0, 2.08) + "\n"
    log = read_text(text)
    assert log.steps.step.tolist() == [1, 10, 20, 30, 40, 50]


def test_a_resumed_run_counts_on_from_its_checkpoint() -> None:
    text = (
        "***** Running training *****\n  Num Epochs = 2\n  Total optimization steps = 100\n"
        "  Continuing training from global step 60\n"
        + logged([70, 80, 90, 100], 50)
        + totals_line(100, 80.0, 2.0)
        + "\n"
    )
    result = measure(read_text(text))
    assert result.log.steps.step.tolist() == [70, 80, 90, 100]
    # 80 s for the 40 steps since, though the log's rate counts all 100.
    assert result.timing.times.typical == pytest.approx(2.0)


def test_two_starts_in_one_file() -> None:
    header = "***** Running training *****\n  Num Epochs = 1\n  Total optimization steps = 50\n"
    resumed = header + "  Continuing training from global step 20\n"
    text = header + logged([10, 20, 30], 50) + resumed + logged([30, 40, 50], 50)
    log = read_text(text)
    assert log.steps.step.tolist() == [10, 20, 30, 30, 40, 50]
    assert log.steps.attempt.tolist() == [0, 0, 0, 1, 1, 1]
    assert log.steps.again.tolist() == [False] * 3 + [True] + [False] * 2


def test_interleaved_ranks_each_have_their_steps() -> None:
    text = "".join(
        f"[rank{rank}]: {line}\n"
        for line in logged([10, 20, 30, 40, 50, 60], 60).splitlines()
        for rank in range(2)
    )
    log = read_text(text + "[rank0]: " + totals_line(60, 120.0, 1.0) + "\n")
    assert log.steps.step.tolist() == [10, 20, 30, 40, 50, 60]
    assert log.ranks == (0, 1)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\x1b[0m\n"])
def test_endings_and_colours(ending: str) -> None:
    text = "Loading weights: 100%|##| 30/30 [00:12<00:00,  2.44it/s]\n" + logged(
        [10, 20, 30, 40, 50, 60], 60
    )
    text += totals_line(60, 120.0, 1.0, version=5) + "\n"
    log = read_text(text.replace("\n", ending))
    assert log.steps.step.tolist() == [10, 20, 30, 40, 50, 60]


def test_totals_of_transformers_5_are_in_e_notation() -> None:
    line = "{'train_runtime': '3.707e+04', 'train_samples_per_second': '33.84',"
    text = loss_line(None) + line + " 'train_steps_per_second': '0.132', 'epoch': '1.198'}\n"
    log = read_text(text)
    assert log.facts.train_runtime_seconds == 37070
    assert log.facts.train_epochs == 1.198
    assert log.facts.global_batch_size is None


@pytest.mark.parametrize(("runtime", "contradicts"), [(120.0, False), (12.0, True), (600.0, True)])
def test_totals_that_contradict_the_lines_are_said(runtime: float, contradicts: bool) -> None:
    text = "".join(
        f" 10%|# | {step}/60 [00:{step * 2 - step // 60:02}<00:10,  2.0s/it]{loss_line(None)}"
        for step in (5, 10, 15, 20, 25)
    )
    text = text + "".join(
        f" 10%|# | {step}/60 [01:{step * 2 - 60:02}<00:10,  2.0s/it]{loss_line(None)}"
        for step in (30, 35, 40, 45, 50, 55)
    )
    text += f"100%|##| 60/60 [02:00<00:00,  2.0s/it]{loss_line(None)}"
    result = measure(read_text(text + totals_line(60, runtime, 1.0) + "\n"))
    assert result.timing.times.p50 == pytest.approx(2.0)
    assert any("totals" in text for text in result.warnings) == contradicts


def test_training_that_ended_early_is_measured_over_the_steps_that_it_did() -> None:
    text = "".join(
        f" 10%|# | {step}/100 [00:{step}<00:10,  1.0it/s]{loss_line(None)}" for step in (10, 20, 30)
    )
    # The Trainer's rate divides all planned steps by the time.
    result = measure(read_text(text + totals_line(100, 30.0, 1.0) + "\n"))
    assert result.timing.times.typical == pytest.approx(1.0)
    assert not any("totals" in text for text in result.warnings)


def test_the_log_s_own_flops_are_used_where_nothing_else_says_how_many() -> None:
    text = logged([10, 20], 20) + totals_line(20, 40.0, 1.0) + "\n"
    text += "***** train metrics *****\n  total_flos               =  1490116GF\n"
    result = measure(read_text(text), UserFacts(num_gpus=2, accelerator="h100"))
    flos = 1490116 * 2**30
    assert result.speed.tflops_per_gpu == pytest.approx(flos / 40 / 2 / 1e12)
    assert result.speed.formula == "HF Trainer's total_flos"
    assert result.speed.mfu == pytest.approx(flos / 40 / 2 / 1e12 / 989.4, rel=1e-3)


def test_a_comparison_goes_by_step_numbers_and_not_by_lines() -> None:
    every = measure(read_text(logged(list(range(1, 61)), 60) + totals_line(60, 60.0, 1.0) + "\n"))
    tenth = measure(
        read_text(logged(list(range(10, 61, 10)), 60) + totals_line(60, 60.0, 1.0) + "\n")
    )
    assert comparison.steps_done(every) == comparison.steps_done(tenth) == 60
    compared = compare_runs([every, tenth])
    assert {point.at for point in compared.points if point.axis == "step"} == {15, 30, 45, 60}
    unknown = measure(read_text(loss_line(None) * 6))
    assert comparison.steps_done(unknown) is None
    compared = compare_runs([every, unknown])
    assert "step" in compared.unknown_axes


@pytest.mark.parametrize(
    ("first", "stride", "count", "done"),
    [(1, 1, 5, 5), (10, 10, 5, 50), (0, 1, 5, 5), (0, 10, 5, 41), (501, 1, 5, 5), (510, 10, 5, 50)],
)
def test_steps_that_were_done_by_their_numbers(
    first: int, stride: int, count: int, done: int
) -> None:
    line = "completed step: {}, seconds: 1.500, TFLOP/s/device: 9.5, loss: 2.5\n"
    text = "".join(line.format(first + stride * index) for index in range(count))
    assert comparison.steps_done(measure(read_text(text))) == done


def test_a_followed_log_gets_its_steps_when_its_totals_come(tmp_path: Path) -> None:
    path = write(tmp_path / "run.log", logged([10, 20, 30], 30))
    tail = Tail([path])
    first = tail.poll()
    assert first is not None
    assert (first.steps.step.tolist(), first.numbered_lines) == ([1, 2, 3], True)
    del first
    with path.open("a") as file:
        file.write(totals_line(30, 60.0, 1.0) + "\n")
    second = tail.poll()
    assert second is not None
    assert (second.steps.step.tolist(), second.numbered_lines) == ([10, 20, 30], False)
    tail.close()


@given(
    st.integers(1, 3000),
    st.integers(1, 200),
    st.floats(0.2, 6.0),
    st.floats(0.05, 30.0),
    st.booleans(),
    st.sampled_from([4, 5]),
)
def test_inferred_steps_are_right_or_not_claimed(
    steps: int, stride: int, epochs: float, step_seconds: float, first: bool, version: int
) -> None:
    printed = list(range(stride, steps + 1, stride))
    if first and stride > 1:
        printed = [1, *printed]
    if not printed:
        return
    per_epoch = steps / epochs
    text = logged(printed, per_epoch)
    text += totals_line(steps, steps * step_seconds, epochs, version=version) + "\n"
    log = read_text(text)
    if not log.numbered_lines:
        assert len(log.steps) == len(printed)
        np.testing.assert_allclose(log.steps.step, printed, rtol=0.02)


def test_two_whole_runs_in_one_file_each_have_their_bars() -> None:
    def whole(total: int) -> str:
        text = f"  0%|  | 0/{total} [00:00<?, ?it/s]\n"
        for step in range(10, total + 1, 10):
            text += f" 10%|# | {step}/{total} [00:{step}<00:10,  1.0it/s]\n" + loss_line(
                step / total
            )
        return text + totals_line(total, float(total), 1.0) + "\n"

    log = read_text(whole(30) + whole(50))
    assert log.steps.step.tolist() == [10, 20, 30, 10, 20, 30, 40, 50]
    assert log.steps.attempt.tolist() == [0] * 3 + [1] * 5
    assert measure(log).timing.times.typical == pytest.approx(1.0)


def test_a_torn_line_of_json_costs_that_line(tmp_path: Path) -> None:
    line = '{{"current_steps": {0}, "total_steps": 40, "loss": 1.5, "elapsed_time": "0:0{1}:00"}}\n'
    text = line.format(10, 1) + line.format(20, 2) + line.format(30, 3)[:40] + "\n"
    text += line.format(40, 4) + '{"current_steps": 50, "tot'
    log = read_logs([write(tmp_path / "trainer_log.jsonl", text.replace("\n", "\r\n"))])
    assert log.steps.step.tolist() == [10, 20, 40]
    assert log.steps.elapsed_seconds.tolist() == [60, 120, 240]
    assert log.sources[0].unfinished_lines == 1


def test_a_line_that_is_not_finite_in_json() -> None:
    text = '{"current_steps": 10, "total_steps": 40, "loss": NaN, "elapsed_time": "0:01:00"}\n'
    text += '{"current_steps": 20, "total_steps": 40, "elapsed_time": "0:02:00"}\n'
    log = read_text(text)
    assert (log.steps.step.tolist(), log.steps.flags.tolist()) == ([10], [NONFINITE])


@pytest.mark.parametrize("piece", [7, 40, 1000])
def test_metrics_below_a_step_may_come_later(piece: int, tmp_path: Path) -> None:
    whole = (SAMPLES / "olmo_core.log").read_bytes()
    path = write(tmp_path / "run.log", b"")
    tail = Tail([path])
    log = None
    for begin in range(0, len(whole), piece):
        with path.open("ab") as file:
            file.write(whole[begin : begin + piece])
        log = tail.poll() or log
    assert log is not None
    assert log.steps.step.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(log.steps.loss, [10.5, np.nan, 9.25])
    np.testing.assert_array_equal(log.steps.seconds, [np.nan, np.nan, 2.5])
    tail.close()


def test_lines_of_torchtune_count_where_its_bars_are_in_the_log_too() -> None:
    text = ""
    for step in range(1, 41):
        text += f"1|{step}|Loss: 2.5:  10%|#  | {step}/40 [00:{step}<00:10,  1.00s/it]\r"
        if step % 20 == 0:
            text += f"\nStep {step} | loss:2.5 lr:2e-05 tokens_per_second_per_gpu:400.0 \n"
    log = read_text(text)
    assert (log.format, log.steps.step.tolist()) == ("torchtune", [20, 40])


def test_a_step_time_of_litgpt_is_that_of_its_micro_batches() -> None:
    line = "Epoch 1 | iter {} step {} | loss train: 2.5, val: n/a | iter time: 100.00 ms{}\n"
    # One of four micro-batches is logged, that of the optimizer's step.
    text = "".join(line.format(4 * step, step, " (step)") for step in range(1, 9))
    times = measure(read_text(text)).timing.times
    assert (times.p50, times.basis) == (pytest.approx(0.4), "steps")


def test_tokens_of_a_step_that_nanogpt_states() -> None:
    text = "tokens per iteration will be: 32,768\nnumber of parameters: 124.00M\n" + "".join(
        f"iter {step}: loss 2.5000, time 250.00ms, mfu 30.00%\n" for step in range(0, 100, 10)
    )
    result = measure(read_text(text), UserFacts(num_gpus=4))
    assert result.speed.tokens_per_second_per_gpu == pytest.approx(32768 / 4 / 0.25)
    assert result.speed.tflops_per_gpu == pytest.approx(6 * 124e6 * 32768 / 4 / 0.25 / 1e12)


@pytest.mark.parametrize("description", ["Loading checkpoint shards: ", ""])
def test_a_bar_of_another_task_with_as_many_pieces_as_the_run_has_steps(description: str) -> None:
    bar = f"{description}100%|####| 30/30 [00:12<00:00,  2.44it/s]\n"
    header = "***** Running training *****\n  Total optimization steps = 30\n"
    log = read_text(bar + header + loss_line(None) * 3)
    assert (log.numbered_lines, log.steps.step.tolist()) == (True, [1, 2, 3])
    log = read_text(bar + logged([10, 20, 30], 30) + totals_line(30, 60.0, 1.0) + "\n")
    assert log.steps.step.tolist() == [10, 20, 30]


def test_lines_between_two_drawings_are_numbered_on_up_to_the_bars_end() -> None:
    bar = " 10%|# | {0}/60 [00:{0}<00:10,  1.0it/s]\n"
    text = bar.format(10) + loss_line(None) * 3 + bar.format(20) + loss_line(None) * 2
    log = read_text(text)
    assert (log.numbered_lines, log.steps.step.tolist()) == (False, [10, 11, 12, 20, 21])
