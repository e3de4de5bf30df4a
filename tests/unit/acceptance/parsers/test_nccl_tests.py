"""Output of nccl-tests: what is read, and everything that is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.acceptance import nccl_samples as samples

from drillyard.acceptance.parsers.collective_table import SHAPES
from drillyard.acceptance.parsers.nccl_tests import parse_nccl_tests

GOOD = samples.a4_output()
LINES = GOOD.splitlines(keepends=True)
ROWS = [
    number for number, line in enumerate(LINES) if line.split()[:1] and line.split()[0].isdigit()
]
CURVE = {2**power: 10.0 * (power + 1) for power in range(14)}


def only(text):
    (table,) = parse_nccl_tests(text.encode())
    return table


def trusted(text):
    """Rows of the tables that may pass."""
    return [
        table.rows
        for table in parse_nccl_tests(text.encode())
        if not table.problems and not table.doubts and not table.wrong
    ]


WHOLE = trusted(GOOD)


def test_the_published_table_is_read_whole():
    table = only(GOOD)
    assert (table.collective, table.ranks, table.problems, table.doubts) == (
        "all_gather", 16, (), (),
    )  # fmt: skip
    assert table.bus_by_size()[8 << 30] == 376.40
    assert len(table.rows) == 24


@pytest.mark.parametrize("collective", sorted(SHAPES))
@pytest.mark.parametrize("ranks", [2, 16, 24])
def test_all_programs_are_read(collective, ranks):
    curve = {mib * 3: bus for mib, bus in CURVE.items()}
    table = only(samples.output(collective, ranks, curve, named=True))
    assert (table.problems, table.doubts, table.collective) == ((), (), collective)
    assert table.bus_by_size().keys() == {mib << 20 for mib in curve}


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "alltoall"])
def test_collective_and_ranks_follow_from_the_figures(collective):
    table = only(samples.output(collective, 16, CURVE))
    assert (table.collective, table.ranks, table.problems) == (collective, 16, ())


@pytest.mark.parametrize(
    "prefix",
    ["0: ", " 0: ", "[1,0]<stdout>: ", "[pod/nccl-0-abc/test] ",
     "INFO 2025-09-09T16:10:21.372601224Z [resource.labels.containerName: job] ",
     "2025-09-09T16:10:21.372601224Z "],
)  # fmt: skip
def test_prefixes_of_launchers_are_taken_off(prefix):
    text = "".join(prefix + line for line in LINES)
    assert trusted(text) == WHOLE


def test_lines_of_other_ranks_in_between_do_not_matter():
    text = "".join(f"0: {line}1: host:7:8 [0] NCCL INFO Channel 00\n" for line in LINES)
    assert trusted(text) == WHOLE


def test_two_programs_one_after_the_other_are_two_tables():
    both = GOOD + samples.output("all_reduce", 16, CURVE)
    assert [table.collective for table in parse_nccl_tests(both.encode())] == [
        "all_gather", "all_reduce",
    ]  # fmt: skip


BAD = {
    "truncated": "".join(LINES[:-5]),
    "without the mean": GOOD.replace("# Avg bus bandwidth", "# Avg"),
    "wrong elements": GOOD.replace("376.40       0", "376.40       3"),
    "unchecked": GOOD.replace("376.40       0", "376.40     N/A"),
    "e-notation": GOOD.replace("  21395 ", "2.1e+04 "),
    "shifted": GOOD.replace("float    none      -1    21395", "float    none    21395   401.49"),
    "no header": GOOD.replace(samples.NAMES + "\n", ""),
    "more digits than are printed": GOOD.replace("376.40 ", "376.402"),
    "fewer digits than are printed": GOOD.replace("0.02    0.02", "0.02    0.0 ", 1),
    "a zero before a number": GOOD.replace(" 376.40", "0376.40"),
    "size 0": GOOD.replace(
        LINES[ROWS[0]],
        samples.line("all_gather", 16, 0, ("0.15", "0.00", "0.00"), ("0.15", "0.00", "0.00"))
        + "\n" + LINES[ROWS[0]],
    ),
    "a row twice": GOOD.replace(LINES[ROWS[-1]], LINES[ROWS[-1]] * 2),
    "all rows twice": "".join(LINES[: ROWS[0]] + LINES[ROWS[0] : ROWS[-1] + 1] * 2)
    + "".join(LINES[ROWS[-1] + 1 :]),
    "rows of another program": "".join(
        line + (samples.line("all_reduce", 16, 999, ("9.0", "1", "1"), ("9.0", "1", "1")) + "\n")
        for line in LINES
    ),
    "two rows on one line": GOOD.replace(LINES[ROWS[3]], LINES[ROWS[3]].rstrip("\n") + " "),
    "another program at the end": samples.output("all_gather", 16, CURVE, named=True).replace(
        "concluded: all_gather_perf", "concluded: all_reduce_perf"
    ),
    "another program than its figures": samples.output("all_reduce", 16, CURVE, named=True).replace(
        "all_reduce_perf", "all_gather_perf"
    ),
    "time of the processor": GOOD.replace(
        samples.NAMES, samples.NAMES.replace("    time", " cputime")
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_output_is_never_trusted(kind):
    assert BAD[kind] != GOOD
    assert trusted(BAD[kind]) == []


def test_nothing_in_an_empty_output():
    assert parse_nccl_tests(b"") == []
    assert parse_nccl_tests(b"srun: error: node2: task 1: Exited with exit code 1\n") == []


@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_line_removed_is_noticed_or_was_not_evidence(number):
    assert trusted("".join(LINES[:number] + LINES[number + 1 :])) in ([], WHOLE)


@given(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)))
def test_a_cut_is_noticed_or_was_not_evidence(start, end):
    assert trusted(GOOD[start:end]) in ([], WHOLE)


@given(st.sampled_from(ROWS), st.data())
def test_a_changed_byte_of_a_row_is_noticed_unless_it_is_within_rounding(number, data):
    line = LINES[number]
    at = data.draw(st.integers(0, len(line) - 2))
    changed = line[:at] + data.draw(st.sampled_from("0123456789.-eN ax")) + line[at + 1 :]
    for rows in trusted("".join([*LINES[:number], changed, *LINES[number + 1 :]])):
        for row, whole in zip(rows, WHOLE[0], strict=True):
            assert row.bytes == whole.bytes
            assert abs(row.out_of_place.bus.value - whole.out_of_place.bus.value) <= 0.0101


@given(st.integers(0, 12), st.integers(0, 12))
def test_two_columns_swapped_are_noticed(first, second):
    swapped = list(LINES)
    for number in ROWS:
        words = LINES[number].split()
        words[first], words[second] = words[second], words[first]
        swapped[number] = " ".join(words) + "\n"
    assert trusted("".join(swapped)) in ([], WHOLE)


def as_json(**changes):
    rows = []
    for mib, bus in CURVE.items():
        size = mib << 20
        alg = bus / 1.875
        timing = {
            "time": round(size / alg / 1e3, 6), "alg_bw": round(alg, 6),
            "bus_bw": round(bus, 6), "nwrong": 0.0,
        }  # fmt: skip
        rows.append(
            {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1",
             "out_of_place": timing, "in_place": dict(timing),
             "actual_iterations": 20, "experiment_name": ""}
        )  # fmt: skip
    mean = sum(CURVE.values()) / len(CURVE)
    document = {
        "version": 3, "start_time": "2026-01-01 00:00:00", "args": ["./all_reduce_perf", "-g", "1"],
        "env": ["SECRET=1"], "nccl_version": 22800,
        "config": {
            "nthreads": 1, "ngpus": 1, "step_factor": 2,
            "devices": [{"rank": rank, "hostname": f"n{rank // 8}"} for rank in range(16)],
        },
        "results": rows, "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": mean, "okay": "unchecked"}, "errors": [],
        "end_time": "2026-01-01 00:01:00",
    }  # fmt: skip
    document.update(changes)
    return json.dumps(document)


def test_json_is_read():
    table = only(as_json())
    assert (table.collective, table.ranks, table.hosts) == ("all_reduce", 16, ("n0", "n1"))
    assert (table.problems, table.doubts) == ((), ())
    assert table.bus_by_size()[8 << 30] == 140.0


@pytest.mark.parametrize(
    "changes",
    [{"args": ["all_gather_perf"]}, {"results": []}, {"results": None},
     {"out_of_bounds": {"count": 2}}, {"average_bus_bandwidth": {"bandwidth": 7.0}},
     {"version": 3, "config": {"nthreads": 1, "ngpus": 1, "devices": [{"hostname": "a"}]}}],
)  # fmt: skip
def test_json_that_contradicts_itself_is_not_trusted(changes):
    assert trusted(as_json(**changes)) == []


@given(st.data())
def test_json_that_is_cut_or_changed_is_not_trusted(data):
    text = as_json()
    assert trusted(text[: data.draw(st.integers(0, len(text) - 1))]) == []
