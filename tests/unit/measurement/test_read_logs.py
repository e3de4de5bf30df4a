"""Whole runs are read right: ranks, restarts, directories, cut and foreign files; fast reading
equals slow reading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.measurement.lines import NOON, SECOND, WHOLE, as_rows, at, perf, read_bytes, write
from tests.unit.measurement.prefixes import PREFIXES

from drillyard.errors import UserError
from drillyard.loglines.prefixes import NOWHERE
from drillyard.measurement.lanes import Lane
from drillyard.measurement.read_logs import read_logs

# -- equal to a slow reference
# ------------------------------------------------------------------------------------

_F = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf"
SLOW = {
    "perflogger": re.compile(
        rf"Step:\s*(\d+)\s*\|\s*Time:\s*({_F})s\s*\|\s*TFLOPs/s/GPU:\s*({_F})\s*\|\s*Tokens/s/GPU:\s*({_F})\s*\|"
        rf"\s*Loss:\s*({_F})(?=\s|$)"
    ),
    "maxtext": re.compile(
        rf"completed step:\s*(\d+), seconds:\s*({_F}), TFLOP/s/device:\s*({_F}),"
        rf" Tokens/s/device:\s*({_F})"
        rf"(?:, total_weights:\s*\d+)?, loss:\s*({_F})(?=\s|$)"
    ),
}
_SLOW_PREFIX = re.compile(r"^(?:(\S+Z) )?(?: ?(\d+): )?")


def slow(text: str, format: str) -> list[tuple[Any, ...]]:
    """Step, seconds, tokens/s, loss, rank, line: one line after the other, one pattern each."""
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        match = SLOW[format].search(line)
        if match:
            prefix = _SLOW_PREFIX.match(line)
            rank = int(prefix[2]) if prefix and prefix[2] else -1
            seconds, _, tokens, loss = (float(value) for value in match.groups()[1:])
            rows.append(
                (int(match[1]), seconds, tokens, None if loss != loss else loss, rank, number)
            )
    return rows


NUMBERS = st.one_of(
    st.floats(0.01, 99).map(lambda value: f"{value:.2f}"),
    st.floats(1e-9, 1e9).map(lambda value: f"{value:.3e}"),
    st.integers(0, 999).map(str),
    st.sampled_from(["nan", "inf", "-inf", ".5", "5.", "+1.5", "007.5"]),
)
NOISE = st.sampled_from(
    [
        "",
        "loading",
        "Step: ",
        "iteration 7/ 9",
        "completed step: x, seconds: 1",
        "{'loss': }",
        "\x1b[31mred\x1b[0m",
        "DLLL {",
        '{"step_seconds": 1',
        "0: 1: 2:",
        "Loss: nan | Step: 1",
    ]
)


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from(sorted(SLOW)),
    st.sampled_from(["", "2026-08-01T12:00:00.000Z ", "0: ", " 3: "]),
)
def test_reading_equals_slow_reading(data: st.DataObject, format: str, prefix: str) -> None:
    lines = []
    for step in range(1, data.draw(st.integers(1, 12)) + 1):
        a, b, c, d = (data.draw(NUMBERS) for _ in range(4))
        if format == "perflogger":
            lines.append(
                f"{prefix}Step: {step} | Time: {a}s | TFLOPs/s/GPU: {b} | Tokens/s/GPU: {c} |"
                f" Loss: {d}"
            )
        else:
            lines.append(
                f"{prefix}completed step: {step}, seconds: {a}, TFLOP/s/device: {b},"
                f" Tokens/s/device: {c}, loss: {d}"
            )
        lines += [prefix + noise for noise in data.draw(st.lists(NOISE, max_size=2))]
    text = "\n".join(lines) + "\n"
    steps = read_bytes(text.encode()).steps
    fast = zip(
        steps.step,
        steps.seconds,
        steps.printed_tokens_per_second_per_gpu,
        steps.loss,
        steps.rank,
        steps.line,
        strict=True,
    )
    assert [tuple(None if value != value else value.item() for value in row) for row in fast] == [
        tuple(None if value != value else value for value in row) for row in slow(text, format)
    ]


@pytest.mark.slow
def test_a_long_log_of_only_steps_equals_slow_reading(tmp_path: Path) -> None:
    draws = np.random.default_rng(0).uniform(0.1, 9, (60_000, 2))
    text = "".join(
        f"{at(step % 3600)} 0: {perf(step, a, b)}\n" + ("" if step % 7777 else "something else\n")
        for step, (a, b) in enumerate(draws.tolist(), 1)
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    rows = slow(text, "perflogger")
    assert log.steps.step.tolist() == [row[0] for row in rows]
    assert log.steps.seconds.tolist() == [row[1] for row in rows]
    assert log.steps.loss.tolist() == [row[3] for row in rows]
    assert log.steps.line.tolist() == [row[5] for row in rows]
    assert (log.steps.time_us[:3599] == NOON + np.arange(1, 3600) * SECOND).all()
    np.testing.assert_allclose(log.steps.seconds_precision, 0.005, rtol=1e-6)


# -- cut anywhere
# --------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.sampled_from(sorted(WHOLE)), st.sampled_from(sorted(PREFIXES)), st.floats(0, 1))
def test_a_log_cut_anywhere_gives_a_prefix_of_its_steps(
    sample: str, launcher: str, where: float
) -> None:
    content = b"".join(
        PREFIXES[launcher] + line + b"\n" for line in WHOLE[sample].split(b"\n")[:-1]
    )
    whole = as_rows(read_bytes(content))
    try:
        log = read_bytes(content[: int(len(content) * where)])
    except UserError:
        return
    part = as_rows(log)
    if sample == "olmo_core.log":
        # The metrics of a step follow on lines of their own.
        part = part[:-1]
    if log.numbered_lines:
        # Which steps these are is stated at the end.
        part, whole = ([row[1:] for row in rows] for rows in (part, whole))
    assert part == whole[: len(part)]


def test_a_last_line_without_its_end_is_left_out_and_counted(tmp_path: Path) -> None:
    log = read_logs([write(tmp_path / "run.log", perf(1) + "\n" + perf(2))])
    assert log.steps.step.tolist() == [1]
    assert (log.lines, log.sources[0].unfinished_lines) == (1, 1)


def test_a_line_torn_inside_a_number_is_no_step(tmp_path: Path) -> None:
    text = perf(1) + "\n" + perf(2)[:-3] + "[rank1]: hello\n" + perf(3) + "\n"
    assert read_logs([write(tmp_path / "run.log", text)]).steps.step.tolist() == [1, 3]


def test_prefixes_that_differ_on_every_line_are_read_too(tmp_path: Path) -> None:
    names = [
        "".join(chr(97 + (step * n) % 26) for n in (3, 5, 7, 11, 13)) for step in range(1, 301)
    ]
    text = "".join(
        f"<{name}> {at(step)} from {name}: {perf(step)}\n" for step, name in enumerate(names, 1)
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    assert log.steps.step.tolist() == list(range(1, 301))
    assert log.steps.time_us.tolist() == [NOON + step * SECOND for step in range(1, 301)]


# -- ranks
# --------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from(
        ["{}: ", "[rank{}]: ", "[pod/job-0-{}/main] ", "(worker{0}, rank={0}, pid=7) "]
    ),
)
def test_any_interleaving_of_ranks_gives_the_same_steps(data: st.DataObject, prefix: str) -> None:
    ranks = data.draw(st.integers(2, 4))
    first = list(range(1, data.draw(st.integers(2, 5)) + 1))
    again = list(range(data.draw(st.integers(1, len(first))), len(first) + 3))
    seconds = {
        (rank, n): data.draw(st.integers(1, 900)) / 100 for rank in range(ranks) for n in range(20)
    }
    queues = [
        [
            prefix.format(rank) + perf(step, seconds[rank, n], loss=rank + step / 100)
            for n, step in enumerate(first + again)
        ]
        for rank in range(ranks)
    ]
    order = data.draw(st.permutations([rank for rank in range(ranks) for _ in first + again]))
    lines = [queues[rank].pop(0) for rank in order]
    steps = read_bytes(("\n".join(lines) + "\n").encode()).steps
    assert steps.step.tolist() == first + again
    assert steps.attempt.tolist() == [0] * len(first) + [1] * len(again)
    assert steps.again.tolist() == [False] * len(first) + [step <= first[-1] for step in again]
    assert steps.loss.tolist() == [step / 100 for step in first + again]
    slowest = [max(seconds[rank, n] for rank in range(ranks)) for n in range(len(first + again))]
    assert steps.seconds.tolist() == slowest


def test_ranks_without_names_that_print_the_same_step_are_one_step(tmp_path: Path) -> None:
    text = "".join(
        f"{at(step + rank / 100)} {perf(step, 1 + rank)}\n"
        for step in (1, 2, 3)
        for rank in range(4)
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    assert log.steps.step.tolist() == [1, 2, 3]
    assert log.steps.seconds.tolist() == [4.0] * 3
    assert log.ranks == (0, 1, 2, 3)


def test_ranks_in_files_of_their_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(
            tmp_path / f"rank-{rank}.log",
            "".join(perf(step, 1 + rank, loss=rank) + "\n" for step in (1, 2)),
        )
    log = read_logs([tmp_path])
    assert log.ranks == (0, 1)
    assert log.steps.seconds.tolist() == [2.0, 2.0]
    assert log.steps.loss.tolist() == [0.0, 0.0]


# -- restarts
# --------------------------------------------------------------------------------------------------


def test_a_restart_in_one_file_marks_repeated_steps(tmp_path: Path) -> None:
    lines = [f"{at(step)} {perf(step)}" for step in (1, 2, 3, 4)]
    lines += [f"{at(20)} [PerfLogger] Using 70.55B parameters for TFLOPs calculation."]
    lines += [f"{at(30 + step)} {perf(step)}" for step in (3, 4, 5)]
    log = read_logs([write(tmp_path / "run.log", "\n".join(lines) + "\n")])
    assert log.steps.step.tolist() == [1, 2, 3, 4, 3, 4, 5]
    assert log.steps.attempt.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert log.steps.again.tolist() == [False] * 4 + [True, True, False]
    assert [
        (attempt.number, attempt.first_time_us, attempt.last_time_us) for attempt in log.attempts
    ] == [
        (0, NOON + 1 * SECOND, NOON + 4 * SECOND),
        (1, NOON + 33 * SECOND, NOON + 35 * SECOND),
    ]


def test_restarts_in_several_files_are_joined_in_time(tmp_path: Path) -> None:
    write(
        tmp_path / "b.log",
        f"{at(0)} start\n" + "".join(f"{at(step)} {perf(step)}\n" for step in (1, 2, 3)),
    )
    write(
        tmp_path / "a.log",
        f"{at(50)} start\n" + "".join(f"{at(60 + step)} {perf(step)}\n" for step in (4, 5)),
    )
    log = read_logs([tmp_path])
    assert log.steps.step.tolist() == [1, 2, 3, 4, 5]
    assert log.steps.attempt.tolist() == [0, 0, 0, 1, 1]
    assert log.attempts[1].first_time_us == NOON + 50 * SECOND
    assert [log.place(row) for row in (0, 3)] == [f"{tmp_path}/b.log:2", f"{tmp_path}/a.log:2"]


def test_marks_belong_to_their_attempts(tmp_path: Path) -> None:
    line = "{} iteration {}/ 9 | elapsed time per iteration (ms): 500.0 | lm loss: 1.0E+00 |\n"
    text = (
        f"{at(0)} using world size: 8\n"
        + line.format(at(1), 1)
        + f"{at(2)} saving checkpoint at iteration       1 to /x\n"
        + f"{at(3)} successfully saved checkpoint from iteration       1 to /x\n"
        + line.format(at(4), 2)
        + f"{at(5)} failed (exitcode: -9) local_rank: 3 (pid: 77) of binary: python\n"
        + f"{at(6)} using world size: 8\n"
        + line.format(at(9), 2)
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    assert [(event.kind, event.attempt, event.step) for event in log.events] == [
        ("round_start", 0, None),
        ("checkpoint_begin", 0, 1),
        ("checkpoint_end", 0, 1),
        ("failure", 0, None),
        ("round_start", 1, None),
    ]
    assert log.events[3].time_us == NOON + 5 * SECOND
    assert log.facts.num_gpus == 8


# -- bad input
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"hello\nworld\n", "Formats tried: .*Megatron-LM.*TensorBoard"),
        (b"\0\1\2" * 999, "binary"),
    ],
)
def test_what_is_no_log_is_an_error_that_names_the_formats(
    content: bytes, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        read_logs([write(tmp_path / "x.log", content)])


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_logs([tmp_path / "none.log"])
    with pytest.raises(UserError, match="no files"):
        read_logs([tmp_path])
    with pytest.raises(UserError, match="not known"):
        read_logs([tmp_path], framework="caffe")


@settings(max_examples=60)
@given(
    st.binary(max_size=300),
    st.lists(st.sampled_from(sorted(WHOLE)), max_size=3),
    st.integers(0, 2**32),
)
def test_damaged_logs_are_read_or_refused_but_never_break(
    junk: bytes, names: list[str], seed: int
) -> None:
    content = bytearray(b"".join(WHOLE[name] for name in names) + junk)
    draw = np.random.default_rng(seed)
    for _ in range(draw.integers(0, 9) if content else 0):
        content[draw.integers(len(content))] = draw.integers(256)
    try:
        log = read_bytes(bytes(content))
    except UserError:
        return
    assert len(log.steps) or log.events


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (perf(99999999999999999999999) + "\n" + perf(2) + "\n", [2]),
        (
            (
                '{"log_history": [{"step": "x", "loss": {}}, {"step": 2, "loss": "nan"}, {"step":'
                ' 1e400, "loss": 1}, 7]}'
            ),
            [2],
        ),
        (
            (
                'DLLL [1]\nDLLL {"type": 3, "step": {}, "data": 5}\nDLLL {"type": "LOG", "step": 1,'
                ' "data": {"loss": 1}}\n'
            ),
            [1],
        ),
        (
            (
                '{"step": 1, "step_seconds": "x", "loss": []}\n{"step": 2, "step_seconds": 1,'
                ' "time": "2026-99-01"}\n'
            ),
            [2],
        ),
        (
            (
                "{'loss': 1.0, 'grad_norm': None}\n{'loss': 'abc', 'epoch': 1}\n{'loss': 0.5,"
                " 'epoch': 0.1}\n"
            ),
            [1],
        ),
        (" iteration 1/2 | lm loss: 1.0E+ |\n iteration 2/2 | lm loss: 1.0 |\n", [2]),
        ("Training epoch 0, iteration 1/2 | global_step: 1e300 | lr: 1\n" + perf(1) + "\n", [1]),
    ],
)
def test_values_that_are_none_are_passed_over(text: str, steps: list[int], tmp_path: Path) -> None:
    assert read_logs([write(tmp_path / "x.log", text)]).steps.step.tolist() == steps


def test_lines_passed_over_are_counted(tmp_path: Path) -> None:
    log = read_logs(
        [
            write(
                tmp_path / "run.log",
                "a\nb\n" + perf(1) + "\nc\n" + perf(2).replace("9.5", "9.5.5") + "\n",
            )
        ]
    )
    assert (log.lines, log.sources[0].lines_passed_over, log.sources[0].damaged_lines) == (5, 4, 1)
    assert "1 damaged" in log.warnings[0]


def test_a_mixed_log_is_read_by_the_format_with_the_most_steps(tmp_path: Path) -> None:
    text = (
        perf(1)
        + "\n"
        + "".join(
            f"completed step: {step}, seconds: 1.0, TFLOP/s/device: 1.0, loss: 1.0\n"
            for step in range(9)
        )
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    assert (log.format, len(log.steps)) == ("maxtext", 9)
    assert log.sources[0].note == "also holds PerfLogger"


def test_time_zones(tmp_path: Path) -> None:
    path = write(tmp_path / "run.log", f"2026-08-01 12:00:00,250 {perf(1)}\n")
    assert read_logs([path]).clock.zone == "assumed"
    zurich = read_logs([path], timezone="Europe/Zurich")
    assert zurich.clock.zone == "given"
    assert zurich.steps.time_us.tolist() == [NOON - 2 * 3600 * SECOND + 250_000]
    assert zurich.clock.resolution_us == 1000
    stated = read_logs(
        [write(tmp_path / "zoned.log", f"2026-08-01T12:00:00+02:00 {perf(1)}\n")],
        timezone="Asia/Tokyo",
    )
    assert (stated.clock.zone, stated.steps.time_us.tolist()) == (
        "stated",
        [NOON - 2 * 3600 * SECOND],
    )
    with pytest.raises(UserError, match="time zone"):
        read_logs([path], timezone="Mars/Base")


# -- beyond a million steps
# ----------------------------------------------------------------------------------------


def test_more_steps_than_fit_are_folded_within_the_stated_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from drillyard.measurement import lanes

    monkeypatch.setattr(lanes.Lane, "extend", _with_limit(lanes.Lane.extend, 20_000))
    seconds = 1 + np.random.default_rng(0).normal(0, 0.002, 100_000)
    seconds[::5000] = 9.0
    text = "".join(
        f"completed step: {step}, seconds: {value:.6f}, TFLOP/s/device: 1.0, loss: 1.0\n"
        for step, value in enumerate(seconds.tolist())
    )
    log = read_logs([write(tmp_path / "run.log", text)])
    steps = log.steps
    assert 5_000 < len(steps) <= 20_000
    assert steps.stands_for.sum() == 100_000
    assert 0 < log.folding_error < 0.03
    assert (steps.seconds * steps.stands_for).sum() == pytest.approx(seconds.sum(), rel=1e-9)
    assert (steps.seconds == 9.0).sum() == 20
    each = np.repeat(steps.seconds, steps.stands_for)
    np.testing.assert_allclose(each, np.round(seconds, 6), rtol=log.folding_error)


@pytest.mark.parametrize(("step", "flag"), [(np.arange(5_000), 1), (np.ones(5_000, np.int64), 0)])
def test_rows_that_cannot_be_folded_are_kept(step: Any, flag: int) -> None:
    lane = Lane(NOWHERE, 0, limit=1_000)
    flags = np.full(len(step), flag, np.uint8)
    for begin in range(0, len(step), 500):
        rows = slice(begin, begin + 500)
        lane.extend(500, {"step": step[rows], "seconds": np.ones(500), "flags": flags[rows]})
    assert lane.length == 5_000 and lane.column("stands_for") is None and lane.folding_error == 0
    # Once they can be again, they are.
    more = np.arange(10_000, 30_000)
    lane.extend(len(more), {"step": more, "seconds": np.ones(len(more))})
    assert lane.length < 20_000 and lane.column("stands_for").sum() == 25_000


def _with_limit(extend: Any, limit: int) -> Any:
    def limited(self: Any, count: int, values: Any) -> None:
        self.limit = limit
        extend(self, count, values)

    return limited
