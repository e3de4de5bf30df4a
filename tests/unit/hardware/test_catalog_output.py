"""The catalog as text: how a value of each kind is written, what is left out, and which rows belong
to an entry."""

from __future__ import annotations

from typing import Any

import pytest
from tests.facts import says

from drillyard.errors import UserError
from drillyard.hardware import catalog, load_catalog
from drillyard.hardware.catalog_output import (
    entry_json,
    entry_text,
    find_entry,
    list_json,
    list_text,
)

OWN = """
accelerators:
  - {name: big, title: Big One, aliases: [bigger], reported_as: [BIG 1, Big Other], peak_tflops: {bf16: 1234.5},
     memory_gib: 2000000, memory_bandwidth_gb_per_s: 3000, source: sheet, date: 2026-10-02,
     unverified: [memory_bandwidth_gb_per_s]}
  - {name: bare, title: Bare, memory_gib: 8}
machines:
  - {name: pod, accelerator: big, num_accelerators: 4, network_stack: infiniband, data_nics: {count: 4, gbps: 400},
     network_gbps: 1600}
prices:
  - {machine: pod, consumption: on-demand, usd_per_node_hour: 20, date: 2026-10-01, source: contract}
  - {machine: pod, consumption: spot, region: here, usd_per_node_hour: 8.5, unverified: true}
bandwidths:
  - {machine: pod, collective: all_reduce, nodes: 2, num_accelerators: 8, gb_per_s: {1: 10.5, 1024: 400}}
  - {machine: pod, collective: all_gather, nodes: 2, num_accelerators: 8, role: minimum, gb_per_s: {1024: 300}}
"""  # noqa: E501


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("hardware") / "own.yaml"
    path.write_text(OWN)
    return load_catalog(path)


def rows_of(text: str) -> dict[str, str]:
    """The values of an entry's text by their paths, as they are written before the number of their
    source."""
    lines = (line.strip().partition("  ") for line in text.splitlines() if "  [" in line[4:])
    return {path: rest.strip().partition("  [")[0] for path, _, rest in lines}


def test_a_name_that_is_none_is_refused_with_what_is_near_or_where_all_are(own: Any) -> None:
    for name, hint in (("BIG 2", "BIG 1"), ("qqqqqqqq", "`drillyard hardware`")):
        with pytest.raises(UserError) as refused:
            find_entry(own, name)
        assert says(str(refused.value), f"'{name}' ... {hint} ... --hardware FILE")
        assert ("did you mean" in str(refused.value)) == (name == "BIG 2")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("big", "big"),
        ("bigger", "big"),
        ("Big Other", "big"),
        ("pod", "pod"),
        ("infiniband", "infiniband"),
        ("cpu", "cpu"),
    ],
)
def test_an_entry_is_found_by_each_of_its_names(own: Any, name: str, found: str) -> None:
    assert find_entry(own, name).name == found


@pytest.mark.parametrize(
    ("entry", "path", "written"),
    [
        ("big", "memory_bandwidth_gb_per_s", "3000"),
        ("big", "peak_tflops.bf16", "1234.5"),
        ("big", "memory_gib", "2,000,000"),
        ("pod", "data_nics.count", "4"),
        ("pod", "network_stack", "infiniband"),
        ("gib", "networks.firewall", "no"),
        ("tcpxo", "coupled_versions", "plugin 1.0.15, rxdm 1.0.21"),
        (
            "gib",
            "volumes",
            "name nvidia, mount_path /usr/local/nvidia, host_path /home/kubernetes/bin/nvidia",
        ),
        ("tcpxo", "profile_environment.NCCL_MIN_NCHANNELS", "4"),
        ("tcpxo", "superseded", "NCCL_ALGO, NCCL_DYNAMIC_CHUNK_SIZE"),
    ],
)
def test_how_a_value_is_written(own: Any, entry: str, path: str, written: str) -> None:
    assert rows_of(entry_text(own, find_entry(own, entry)))[path] == written


def test_defaults_and_our_own_names_are_no_facts(own: Any) -> None:
    paths = set(rows_of(entry_text(own, find_entry(own, "pod"))))
    assert {"accelerator", "num_accelerators", "data_nics.gbps", "network_gbps"} == paths - {
        "network_stack",
        "data_nics.count",
    }
    assert set(entry_json(own, find_entry(own, "bare"))["facts"]) == {"memory_gib"}


def test_the_lines_of_an_accelerator(own: Any) -> None:
    text = entry_text(own, find_entry(own, "big"))
    lines = text.splitlines()
    assert lines[:2] == ["accelerator big (also bigger): Big One", ""]
    marked = [line.split()[0] for line in lines if line.endswith("unverified")]
    assert marked == ["memory_bandwidth_gb_per_s"]
    assert sum(says(line, "[1] ... sheet, 2026-10-02") for line in lines) == 1 and "[2]" not in text
    assert lines[-2:] == ["  machines", "    pod"]
    assert entry_text(own, find_entry(own, "bare")).splitlines()[0] == "accelerator bare: Bare"
    assert "machines" not in entry_text(own, find_entry(own, "bare"))


def test_the_lines_of_a_machine(own: Any) -> None:
    lines = [line.strip() for line in entry_text(own, find_entry(own, "pod")).splitlines()]
    assert lines[0] == "machine pod"
    rates = lines[lines.index("reference bandwidths (busbw, GB/s by MiB)") + 1 :][:2]
    assert rates[0].startswith("all_reduce, 2 x 4 GPUs, measured: 1: 10.5, 1024: 400  (")
    assert rates[1].startswith("all_gather, 2 x 4 GPUs, at least: 1024: 300  (")
    prices = lines[lines.index("prices") + 1 :]
    assert prices[0].startswith(
        "on-demand, any region: $20.00 per node-hour, $5.00 per GPU-hour  ("
    )
    assert prices[0].endswith("contract, 2026-10-01)")
    assert prices[1].startswith("spot, here: $8.50 per node-hour, $2.12 per GPU-hour  (")
    assert prices[1].endswith(")  unverified")
    assert len(prices) == 2


def test_rates_that_a_switch_sums_are_named_so() -> None:
    summed = {row.machine or row.accelerator for row in catalog().bandwidths if row.in_network}
    assert summed
    for row in catalog().bandwidths:
        name = row.machine or row.accelerator
        shown = entry_text(catalog(), find_entry(catalog(), str(name)))
        assert ("summed in the switch" in shown) == (name in summed)


def test_the_tables_of_the_list(own: Any) -> None:
    lines = [line.split("  ") for line in list_text(own).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    by_name = {row[0]: row for row in cells if row}
    assert by_name["big"] == ["big", "1,234.5", "2,000,000", "3,000?", "-", "Big One"]
    assert by_name["bare"] == ["bare", "-", "8", "-", "-", "Bare"]
    assert ["pod", "4 x big", "4 x 400", "1,600", "infiniband", "-", "-"] in cells
    assert ["pod", "on-demand", "any", "20", "5", "2026-10-01"] in cells
    assert by_name["pod"] == ["pod", "spot", "here", "8.5?", "2.12?", "-"]
    tables = [table.splitlines() for table in list_text(own).split("\n\n")]
    assert [(set(table[1]), len(table[1])) for table in tables[:4]] == [
        ({"-"}, max(map(len, table))) for table in tables[:4]
    ]
    assert [len(table) for table in tables[:4]] == [
        2 + len(rows) for rows in (own.accelerators, own.machines, own.network_stacks, own.prices)
    ]


def test_json_of_each_kind_has_the_rows_that_belong_to_it(own: Any) -> None:
    pod, big, stack = (
        entry_json(own, find_entry(own, name)) for name in ("pod", "big", "infiniband")
    )
    assert [row["consumption"] for row in pod["prices"]] == [
        "on-demand",
        "spot",
    ] and "machines" not in pod
    assert [row["collective"] for row in pod["bandwidths"]] == ["all_reduce", "all_gather"]
    assert big["machines"] == ["pod"] and big["bandwidths"] == [] and "prices" not in big
    assert "pod" in stack["machines"] and "bandwidths" not in stack
    row = next(row for row in list_json(own)["accelerators"] if row["name"] == "big")
    assert (row["date"], row["unverified"]) == ("2026-10-02", ["memory_bandwidth_gb_per_s"])
