"""Evidence comes from nodes: whatever it holds, the checks of hosts judge it without an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.acceptance.host_scenarios import (
    dcgm_4,
    evidence,
    expected,
    observed,
    smi_links,
    smi_topology,
    smi_xml,
)
from tests.unit.acceptance.test_host_checks import host, interfaces, rdma, software

from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.judgement import judge
from drillyard.acceptance.registry import CHECKS
from drillyard.acceptance.results import Status

PROBES = {"host", "accelerators", "kernel_log", "network_interfaces", "software", "dcgm"}
HOST_CHECKS = [check for check in CHECKS if set(check.probes) <= PROBES]


def healthy() -> list[Observation]:
    def tool(text: str) -> dict[str, Any]:
        return {"text": text, "code": 0, "error": None, "installed": True}

    gpus = {
        "query": tool(smi_xml(8)),
        "links": tool(smi_links(8)),
        "topology": tool(smi_topology(8)),
    }
    log = {
        "source": "dmesg", "lines": ["[    1.000000] NVRM: Xid (PCI:0000:05:00): 31, x"],
        "total_lines": 1, "first_second": 1.0, "now": 1.7e9, "uptime": 100.0,
    }  # fmt: skip
    return [
        observed(
            "accelerators", {"device_files": 8, "tools": {k: tool(v) for k, v in gpus.items()}}
        ),
        observed("dcgm", {"tools": {"diagnostic": tool(dcgm_4(8))}}),
        observed("kernel_log", log),
        host(),
        software(),
        interfaces(),
        rdma(),
    ]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values below one."""
    items = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


PLACES = [(at, path) for at, each in enumerate(healthy()) for path in places(each.values)]
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10**20), st.floats(), st.text(max_size=20),
    st.sampled_from(["", "N/A", "nan", "1e400", "\x00", "a" * 300, "9" * 5000]),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.none()),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLACES), VALUES, st.sampled_from(["a3-megagpu-8g", "gpu-h100-sxm", None]))
def test_any_value_anywhere_is_judged(
    place: tuple[int, tuple[Any, ...]], value: Any, machine: str | None
) -> None:
    seen, (at, path) = healthy(), place
    values = copy.deepcopy(seen[at].values)
    inner: Any = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    seen[at] = seen[at].model_copy(update={"values": values})
    for check in HOST_CHECKS:
        assert list(check.judge(evidence(*seen), expected(machine))), check.name


@pytest.mark.parametrize(
    "values", [None, {}, {"tools": {}}, {"tools": []}, {"tools": {"query": 1}}]
)
@pytest.mark.parametrize("check", HOST_CHECKS, ids=lambda check: check.name)
def test_empty_observations_does_not_pass(check: Any, values: dict[str, Any] | None) -> None:
    seen = [observed(probe, values) for probe in sorted(PROBES)]
    statuses = {each.status for each in check.judge(evidence(*seen), expected())}
    assert statuses <= {Status.incomplete, Status.skipped} and statuses
    # Nothing to compare with: a single node.
    assert Status.incomplete in statuses or check.name == "kernel-command-line"


@pytest.mark.parametrize("check", HOST_CHECKS, ids=lambda check: check.name)
def test_what_a_probe_printed_before_it_failed_does_not_pass(check: Any) -> None:
    """The exit code counts, also under a good table."""
    failed = [each.model_copy(update={"error": "exit code 1"}) for each in healthy()]
    statuses = {each.status for each in check.judge(evidence(*failed), expected())}
    assert statuses == {Status.incomplete}


@pytest.mark.parametrize("check", HOST_CHECKS, ids=lambda check: check.name)
def test_no_observation_does_not_pass(check: Any) -> None:
    statuses = {each.status for each in check.judge(evidence(nodes=2), expected())}
    assert statuses == {Status.incomplete}


@pytest.mark.parametrize("check", HOST_CHECKS, ids=lambda check: check.name)
def test_recorded_files_of_other_tools_give_a_check_no_result(check: Any) -> None:
    seen = Observation(probe="nccl", scope="all", nodes=(0,), values={}, source="all_gather.txt")
    assert not list(check.judge(evidence(seen), expected()))


def test_checks_that_a_recorded_file_is_not_enough_for_are_skipped() -> None:
    (seen,) = (each for each in healthy() if each.probe == "accelerators")
    seen = seen.model_copy(update={"source": "nvidia-smi.xml"})
    found = judge(evidence(seen), expected()).results
    skipped = [each.check for each in found if not each.nodes and each.status is Status.skipped]
    assert sorted(skipped) == ["dcgm", "versions", "xids"]
    checks = {each.check for each in found}
    assert not checks & {"environment", "host-limits", "kernel-log", "network-interfaces"}


def test_each_check_says_what_it_does() -> None:
    assert len(HOST_CHECKS) == 19
    for check in HOST_CHECKS:
        texts = (check.title, check.measures, check.how, check.evidence, check.references)
        assert all(texts) and check.meaning and check.action and check.seconds > 0


def test_an_evidence_document_can_be_written_and_read_again() -> None:
    written = evidence(*healthy()).model_dump_json()
    again = AcceptanceEvidence.model_validate_json(written)
    for check in HOST_CHECKS:
        first = list(check.judge(evidence(*healthy()), expected()))
        assert first == list(check.judge(again, expected()))
