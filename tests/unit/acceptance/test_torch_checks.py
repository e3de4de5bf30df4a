"""Checks of the probes with PyTorch: planted faults are named by node and device, and what cannot
be read is never a pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.unit.acceptance.observations import CPU, H100, evidence, expected, results

from drillyard.acceptance.check import Check
from drillyard.acceptance.checks import (
    bandwidth_scaling,
    bit_equality,
    device_rates,
    peers,
    stragglers,
    training_speed,
)
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status

ALL = (
    bit_equality.CHECK,
    stragglers.CHECK,
    stragglers.JITTER,
    device_rates.MATMUL,
    device_rates.MEMORY,
    device_rates.HOST_DEVICE,
    peers.CHECK,
    training_speed.SPEED,
    training_speed.SCALING,
)
NEBIUS = "gpu-h100-sxm"


def at(node: int, local: int, change: Any) -> Any:
    """A change of what one rank printed."""

    def apply(its_node: int, its_local: int, values: dict[str, Any]) -> None:
        if (its_node, its_local) == (node, local):
            change(values)

    return apply


def failures(found: list[CheckResult]) -> list[tuple[str, tuple[int, ...], int | None]]:
    return [(one.metric, one.culprits, one.device) for one in found if one.status is Status.fail]


def statuses(found: list[CheckResult]) -> set[Status]:
    return {one.status for one in found}


# Healthy.


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.name)
@pytest.mark.parametrize(("facts", "ranks"), [(CPU, 2), (H100, 8)])
def test_healthy_ranks_fail_nothing(check: Check, facts: dict[str, Any], ranks: int) -> None:
    machine = NEBIUS if facts is H100 else None
    seen = evidence(facts, ranks=ranks, peers=facts is H100)
    for known in (expected(machine), expected(machine, baseline=seen)):
        found = results(check, seen, known)
        assert found
        assert statuses(found) <= {Status.passed, Status.recorded, Status.skipped}


def test_a_healthy_h100_node_passes_by_its_rows() -> None:
    seen = evidence(H100, ranks=8, peers=True)
    for check in (device_rates.MATMUL, device_rates.MEMORY, device_rates.HOST_DEVICE, peers.CHECK):
        found = results(check, seen, expected(NEBIUS))
        assert statuses(found) == {Status.passed}, check.name
        for one in found:
            assert one.threshold is not None
            assert one.threshold.reference is not None
            assert one.threshold.reference / 2 <= one.threshold.value < one.threshold.reference


def test_one_node_skips_what_needs_two() -> None:
    seen = evidence(nodes=1, ranks=1)
    assert statuses(results(bandwidth_scaling.CHECK, seen, expected())) == {Status.skipped}
    assert statuses(results(training_speed.SCALING, evidence(nodes=1, ranks=2), expected())) == {
        Status.recorded
    }


# Bits.


def test_a_wrong_element_names_the_device() -> None:
    def wrong(values: dict[str, Any]) -> None:
        values["product"]["rounds"][1]["wrong"] = 1

    found = results(bit_equality.CHECK, evidence(devices=at(1, 0, wrong)), expected())
    assert failures(found) == [("product", (1,), 0)]


def test_the_odd_digest_is_named_by_majority_over_all_nodes() -> None:
    def other(values: dict[str, Any]) -> None:
        values["product"]["rounds"][0]["digest"] = "f" * 32

    found = results(bit_equality.CHECK, evidence(devices=at(0, 1, other)), expected())
    assert failures(found) == [("product", (0,), 1)]


def test_two_that_disagree_name_nobody() -> None:
    def other(values: dict[str, Any]) -> None:
        values["product"]["rounds"][0]["digest"] = "f" * 32

    seen = evidence(nodes=2, ranks=1, devices=at(0, 0, other))
    found = results(bit_equality.CHECK, seen, expected())
    assert failures(found) == [("product", (), None)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_other_gradient_names_the_rank(place: int) -> None:
    def other(values: dict[str, Any]) -> None:
        values["gradients"]["sums"][place] = "ff"

    found = results(bit_equality.CHECK, evidence(training=at(1, 1, other)), expected())
    assert failures(found) == [("gradients", (1,), 1)]


def test_devices_of_two_kinds_may_round_differently() -> None:
    def other(node: int, local: int, values: dict[str, Any]) -> None:
        if node == 1:
            values["device_name"] = "another processor"
            values["gradients"]["sums"] = ["c3", "c3", "d4"]

    assert failures(results(bit_equality.CHECK, evidence(training=other), expected())) == []


def test_gradients_that_nobody_finds_twice_are_not_judged() -> None:
    def unsteady(node: int, local: int, values: dict[str, Any]) -> None:
        values["gradients"]["sums"] = [f"{node}{local}{each}" for each in range(3)]

    found = results(bit_equality.CHECK, evidence(training=unsteady), expected())
    assert {one.status for one in found if one.metric == "gradients"} == {Status.recorded}


def test_a_wrong_result_on_one_rank_alone_names_it() -> None:
    def wrong(values: dict[str, Any]) -> None:
        if values["ranks"] == 4:
            values["rows"][1]["wrong"] = 3

    seen = evidence(collective=at(1, 0, wrong))
    found = results(bit_equality.CHECK, seen, expected())
    assert failures(found) == [("results of all_reduce", (1,), 0)]


def test_wrong_results_everywhere_name_nobody() -> None:
    def wrong(node: int, local: int, values: dict[str, Any]) -> None:
        if values["ranks"] == 4:
            values["rows"][1]["wrong"] = 3

    found = results(bit_equality.CHECK, evidence(collective=wrong), expected())
    assert failures(found) == [("results of all_reduce", (), None)]


# Rates.


def slower(part: str, share: float) -> Any:
    def change(values: dict[str, Any]) -> None:
        rows = values[part] if isinstance(values[part], list) else [values[part]]
        for row in rows:
            key = "tflops" if "tflops" in row else "gb_per_s"
            row[key] = [share * each for each in row[key]]

    return change


@pytest.mark.parametrize(
    ("check", "part", "metrics"),
    [
        (device_rates.MATMUL, "matmul", ["matmul bf16", "matmul fp8"]),
        (device_rates.MEMORY, "memory", ["memory copy, read and written"]),
        (device_rates.HOST_DEVICE, "host_to_device", ["host to device"]),
        (device_rates.HOST_DEVICE, "device_to_host", ["device to host"]),
    ],
)
@pytest.mark.parametrize("share", [0.4, 0.85])
def test_a_slow_device_is_named(check: Check, part: str, metrics: list[str], share: float) -> None:
    seen = evidence(H100, ranks=8, devices=at(1, 5, slower(part, share)))
    found = results(check, seen, expected(NEBIUS))
    assert failures(found) == [(metric, (1,), 5) for metric in metrics]


def test_all_devices_below_the_row_fail() -> None:
    def half(node: int, local: int, values: dict[str, Any]) -> None:
        slower("matmul", 0.5)(values)

    found = results(device_rates.MATMUL, evidence(H100, ranks=8, devices=half), expected(NEBIUS))
    assert len(failures(found)) == 2 * 16
    found = results(device_rates.MATMUL, evidence(H100, ranks=8, devices=half), expected())
    assert statuses(found) == {Status.recorded}


def test_a_baseline_judges_where_no_row_does() -> None:
    before = evidence()

    def half(node: int, local: int, values: dict[str, Any]) -> None:
        slower("matmul", 0.45)(values)

    found = results(device_rates.MATMUL, evidence(devices=half), expected(baseline=before))
    assert len(failures(found)) == 4
    passed = results(device_rates.MATMUL, evidence(), expected(baseline=before))
    assert statuses(passed) == {Status.passed}


def test_one_good_repeat_saves_a_device() -> None:
    def noisy(values: dict[str, Any]) -> None:
        values["matmul"][0]["tflops"] = [0.01, 0.02, 0.01, 0.1, 0.03]

    seen = evidence(devices=at(0, 0, noisy))
    assert failures(results(device_rates.MATMUL, seen, expected(baseline=evidence()))) == []


def test_another_accelerator_than_the_machines_is_incomplete() -> None:
    other = {**H100, "device_name": "NVIDIA A100-SXM4-80GB"}
    found = results(device_rates.MATMUL, evidence(other, ranks=8), expected(NEBIUS))
    assert statuses(found) == {Status.incomplete}
    found = results(device_rates.MEMORY, evidence(CPU), expected(NEBIUS))
    assert statuses(found) == {Status.incomplete}


def test_a_device_without_fp8_is_skipped() -> None:
    def without(node: int, local: int, values: dict[str, Any]) -> None:
        values["matmul"][2] = {"type": "fp8", "unsupported": "no kernel"}

    found = results(device_rates.MATMUL, evidence(H100, ranks=8, devices=without), expected(NEBIUS))
    assert {one.status for one in found if one.metric == "matmul fp8"} == {Status.skipped}


# Peers.


def test_a_slow_pair_is_named() -> None:
    def slow(values: dict[str, Any]) -> None:
        values["peers"]["2"]["gb_per_s"] = [200.0, 210.0]

    seen = evidence(H100, ranks=8, peers=True, devices=at(0, 6, slow))
    found = results(peers.CHECK, seen, expected(NEBIUS))
    assert failures(found) == [("peers", (0,), None)]
    assert "device 6 to 2" in next(one.reason for one in found if one.status is Status.fail)


def test_bridged_pairs_pass_where_other_pairs_go_through_the_host() -> None:
    def bridged(node: int, local: int, values: dict[str, Any]) -> None:
        for peer, row in values["peers"].items():
            if int(peer) != local ^ 1:
                row["gb_per_s"] = [25.0, 26.0]

    seen = evidence(H100, ranks=8, peers=True, devices=bridged)
    assert failures(results(peers.CHECK, seen, expected(NEBIUS))) == []


def test_a_missing_pair_is_incomplete() -> None:
    def without(values: dict[str, Any]) -> None:
        del values["peers"]["3"]

    seen = evidence(H100, ranks=8, peers=True, devices=at(1, 0, without))
    found = results(peers.CHECK, seen, expected(NEBIUS))
    assert {one.nodes: one.status for one in found} == {
        (0,): Status.passed,
        (1,): Status.incomplete,
    }


# Stragglers.


def longer(factor: float, blocks: slice = slice(None)) -> Any:
    def change(values: dict[str, Any]) -> None:
        for phase in values["phases"]:
            for block in phase["blocks"][blocks]:
                block["local"] = [factor * each for each in block["local"]]

    return change


@pytest.mark.parametrize(("facts", "factor"), [(CPU, 1.5), (H100, 1.15), (CPU, 8.0)])
@pytest.mark.parametrize("place", [(0, 0), (1, 1)])
def test_a_straggler_is_named(facts: dict[str, Any], factor: float, place: tuple[int, int]) -> None:
    seen = evidence(facts, training=at(*place, longer(factor)))
    found = results(stragglers.CHECK, seen, expected())
    assert failures(found) == [("local time", (place[0],), place[1])]


def test_a_whole_slow_node_is_named_and_the_other_is_not() -> None:
    def slow(node: int, local: int, values: dict[str, Any]) -> None:
        if node == 1:
            longer(2.0)(values)

    found = results(stragglers.CHECK, evidence(training=slow), expected())
    assert failures(found) == [("local time", (1,), 0), ("local time", (1,), 1)]


def test_one_accident_names_nobody() -> None:
    def accident(values: dict[str, Any]) -> None:
        values["phases"][2]["blocks"][1]["local"][0] = 30.0

    seen = evidence(training=at(1, 0, accident))
    assert statuses(results(stragglers.CHECK, seen, expected())) == {Status.passed}


def test_stops_of_seconds_in_two_blocks_are_a_straggler() -> None:
    def stopped(values: dict[str, Any]) -> None:
        values["phases"][0]["blocks"][3]["local"][0] = 2.0
        values["phases"][2]["blocks"][1]["local"][0] = 2.0

    seen = evidence(training=at(0, 1, stopped))
    assert failures(results(stragglers.CHECK, seen, expected())) == [("local time", (0,), 1)]


def test_a_cpu_whose_wait_for_a_core_is_counted_gets_a_wider_limit() -> None:
    facts = {**CPU, "waiting_left_out": False}
    seen = evidence(facts, training=at(1, 0, longer(1.6)))
    assert failures(results(stragglers.CHECK, seen, expected())) == []


# Training.


def test_speed_below_the_estimate_fails() -> None:
    def slow(node: int, local: int, values: dict[str, Any]) -> None:
        for phase in values["phases"]:
            for block in phase["blocks"]:
                for key in ("step", "local"):
                    block[key] = [3 * each for each in block[key]]

    good, bad = (evidence(H100, ranks=8, training=each) for each in (None, slow))
    found = results(training_speed.SPEED, good, expected(NEBIUS))
    assert statuses(found) == {Status.passed}
    assert all("MFU" in one.reason and "6N" in one.reason for one in found)
    found = results(training_speed.SPEED, bad, expected(NEBIUS))
    assert statuses(found) == {Status.fail}
    assert statuses(results(training_speed.SPEED, bad, expected())) == {Status.recorded}


def test_scaling_is_named_for_what_it_is() -> None:
    def slow(node: int, local: int, values: dict[str, Any]) -> None:
        for block in values["phases"][2]["blocks"]:
            block["step"] = [2 * each for each in block["step"]]

    before = evidence(H100)
    found = results(training_speed.SCALING, evidence(H100), expected(baseline=before))
    assert {one.metric: one.status for one in found} == {
        "weak scaling, 2 devices over 1": Status.passed,
        "weak scaling, 2 nodes over 1": Status.passed,
        "strong scaling, 2 nodes over 1": Status.passed,
    }
    by_metric = {one.metric: one.observed for one in found}
    assert by_metric["weak scaling, 2 nodes over 1"] == pytest.approx(1.0)
    assert by_metric["strong scaling, 2 nodes over 1"] == pytest.approx(1.0)
    found = results(
        training_speed.SCALING, evidence(H100, training=slow), expected(baseline=before)
    )
    assert [one[0] for one in failures(found)] == [
        "weak scaling, 2 nodes over 1",
        "strong scaling, 2 nodes over 1",
    ]


def test_the_ratio_of_bus_bandwidths() -> None:
    """434.99 GB/s on 16 devices over 442.21 on 8, of the machine's own rows."""

    def published(node: int, local: int, values: dict[str, Any]) -> None:
        ranks = values["ranks"]
        bus = 434.99 if ranks == 16 else 442.21
        for row in values["rows"]:
            row["seconds"] = [row["bytes"] / 1e9 / bus * 2 * (ranks - 1) / ranks] * 3

    seen = evidence(H100, ranks=8, collective=published)
    (found,) = results(bandwidth_scaling.CHECK, seen, expected(NEBIUS))
    assert isinstance(found.observed, float)
    assert math.isclose(found.observed, 434.99 / 442.21, rel_tol=1e-9)
    assert found.status is Status.passed
    assert not found.required

    def slow(node: int, local: int, values: dict[str, Any]) -> None:
        published(node, local, values)
        if values["ranks"] == 16:
            for row in values["rows"]:
                row["seconds"] = [1.2 * each for each in row["seconds"]]

    (found,) = results(
        bandwidth_scaling.CHECK, evidence(H100, ranks=8, collective=slow), expected(NEBIUS)
    )
    assert found.status is Status.fail


# What cannot be read.


def not_installed(document: dict[str, Any]) -> None:
    for seen in document["observations"]:
        seen["error"] = "rank 0: PyTorch is not installed for the nodes' Python"
        for each in seen["values"]["ranks"]:
            each.update(values=None, error="PyTorch is not installed for the nodes' Python")


def too_old(document: dict[str, Any]) -> None:
    for seen in document["observations"]:
        for each in seen["values"]["ranks"]:
            each["values"] = {"torch": "2.3.1", "skipped": "PyTorch 2.3.1 is too old"}


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.name)
@pytest.mark.parametrize("missing", [not_installed, too_old])
def test_without_pytorch_checks_are_skipped(check: Check, missing: Any) -> None:
    found = results(check, evidence(document=missing), expected())
    assert statuses(found) == {Status.skipped}


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.name)
def test_without_pytorch_on_one_node_nothing_passes_for_it(check: Check) -> None:
    def one_node(document: dict[str, Any]) -> None:
        for seen in document["observations"]:
            for each in seen["values"]["ranks"]:
                if each["node"] == 1:
                    each.update(values=None, error="PyTorch is not installed")

    found = results(check, evidence(H100, peers=True, document=one_node), expected(NEBIUS))
    assert not [one for one in found if one.status is Status.passed and 1 in one.nodes]


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.name)
def test_evidence_without_the_probe_is_incomplete(check: Check) -> None:
    def empty(document: dict[str, Any]) -> None:
        document["observations"] = []

    found = results(check, evidence(document=empty), expected())
    assert statuses(found) == {Status.incomplete}


ODD: list[Any] = [None, "N/A", [], {}, -1, True, [True], [0.0], [-1.0], [1e999], ["1"], [[1]]]


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.name)
def test_values_of_another_form_are_judged_without_a_traceback(check: Check) -> None:
    """Each value that a rank prints, at any depth, replaced."""

    def paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
        if path:
            yield path
        if isinstance(value, dict | list):
            listed = value.items() if isinstance(value, dict) else enumerate(value[:2])
            for key, each in listed:
                yield from paths(each, (*path, key))

    base = evidence(H100, peers=True)
    for seen in base.observations:
        assert seen.values is not None
        if seen.probe not in check.probes or seen.nodes == (0,):
            continue
        for number, path in enumerate(paths(seen.values["ranks"][-1]["values"])):
            odd = ODD[number % len(ODD)]

            def replaced(values: Any, path: Any = path, odd: Any = odd) -> None:
                if len(values.get("rows", (1, 2))) == 2:
                    for key in path[:-1]:
                        values = values[key]
                    values[path[-1]] = odd

            changes: dict[str, Any] = {seen.probe: at(1, 1, replaced)}
            assert results(check, evidence(H100, peers=True, **changes), expected(NEBIUS)), path


@pytest.mark.parametrize(
    ("check", "probe", "path"),
    [
        (device_rates.MEMORY, "devices", ("memory", "gb_per_s")),
        (device_rates.HOST_DEVICE, "devices", ("host_to_device",)),
        (device_rates.MATMUL, "devices", ("matmul",)),
        (bit_equality.CHECK, "devices", ("product", "rounds")),
        (bit_equality.CHECK, "training", ("gradients", "sums")),
        (stragglers.CHECK, "training", ("phases",)),
        (training_speed.SPEED, "training", ("phases",)),
        (training_speed.SCALING, "training", ("shape",)),
    ],
)
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_what_cannot_be_read_is_incomplete(
    check: Check, probe: str, path: tuple[str, ...], odd: Any
) -> None:
    def replaced(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = odd

    changes: dict[str, Any] = {probe: at(1, 1, replaced)}
    found = results(check, evidence(H100, **changes), expected(NEBIUS))
    assert [one for one in found if one.status is Status.incomplete and 1 in one.nodes]


def test_a_rank_that_printed_and_then_failed_is_not_judged() -> None:
    def killed(document: dict[str, Any]) -> None:
        document["observations"][0]["values"]["ranks"][1]["error"] = "killed by SIGKILL"

    found = results(device_rates.MATMUL, evidence(document=killed), expected(baseline=evidence()))
    assert {(one.nodes, one.status) for one in found} == {
        ((0,), Status.incomplete),
        ((0,), Status.passed),
        ((1,), Status.passed),
    }


def test_recorded_files_without_the_probe_are_skipped() -> None:
    def recorded(document: dict[str, Any]) -> None:
        document["observations"] = [
            {"probe": "nccl_tests", "scope": "node", "nodes": [0], "source": "table.txt"}
        ]

    seen: AcceptanceEvidence = evidence(document=recorded)
    for check in ALL:
        assert statuses(results(check, seen, expected())) == {Status.skipped}
