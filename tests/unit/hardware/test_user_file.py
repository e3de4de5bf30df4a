"""A user's own hardware is laid over the catalog, and every mistake in its file is reported with
its line."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.facts import each_says, says

import drillyard
from drillyard.errors import UserError
from drillyard.hardware import catalog, load_catalog
from drillyard.hardware.bandwidths import bus_bandwidth, bus_bandwidth_bound

NODE = """
machines:
  - name: my-node
    accelerator: my-gpu
    num_accelerators: 8
    network_stack: infiniband
    data_nics: {count: 8, gbps: 400}
    network_gbps: 3200
accelerators:
  - {name: my-gpu, title: My GPU, reported_as: [My GPU 9000], peak_tflops: {bf16: 400}, memory_gib: 94,
     memory_bandwidth_gb_per_s: 3000, gpu_link: nvlink, gpu_link_gb_per_s: 900}
prices:
  - {machine: my-node, consumption: on-demand, usd_per_node_hour: 20, source: contract, date: 2026-10-01}
bandwidths:
  - {machine: my-node, collective: all_reduce, nodes: 2, num_accelerators: 16, gb_per_s: {1024: 400.5}}
"""  # noqa: E501


RUN = """
name: small
model: {init: random, config: {architecture: llama, vocab_size: 32000, hidden_size: 1024, intermediate_size: 2816,
  num_hidden_layers: 8, num_attention_heads: 16, num_key_value_heads: 8}}
data: {source: "builtin:text-to-sql", format: text-to-sql, sequence_length: 1024,
  tokenizer: {train: bpe, vocab_size: 512}}
training: {steps: 100, optimizer: {learning_rate: 1.0e-4}}
"""  # noqa: E501
CLUSTER = """
{name: lab, platform: slurm, nodes: 2, machine: my-node, hardware: own.yaml, storage: {directory: /shared},
 slurm: {login_host: login, gres: "gpu:my-gpu:8"}}
"""  # noqa: E501
STEP = "Step: {} | Time: 2.0s | TFLOPs/s/GPU: 1.0 | Tokens/s/GPU: 4096 | Loss: 1.0\n"


def test_a_new_accelerator_is_a_row_and_no_code(tmp_path):
    """Memory, speed, cost, launch checks and MFU of a GPU and a machine that are in a user's file
    only."""
    own, run, cluster, log = (
        tmp_path / name for name in ("own.yaml", "run.yaml", "cluster.yaml", "run.log")
    )
    own.write_text(NODE)
    run.write_text(RUN)
    cluster.write_text(CLUSTER)
    log.write_text("".join(STEP.format(number) for number in range(1, 13)))

    estimate = drillyard.estimate(run, machine="my-node", nodes=2, hardware=own)
    assert (estimate.verdict, estimate.available_gib.value) == ("fits", 94)
    assert (estimate.step_time.seconds.low.value > 0, estimate.cost.price.of_gpu.value) == (
        True,
        2.5,
    )

    plan = drillyard.plan(run, cluster)
    assert (
        plan.job.processes_per_node,
        "#SBATCH --gres=gpu:my-gpu:8" in plan.files[0].content,
    ) == (8, True)
    cluster.write_text(CLUSTER.replace("gpu:my-gpu:8", "gpu:my-gpu:16"))
    with pytest.raises(UserError, match=r"slurm\.gres: .*16.*my-node.*8"):
        drillyard.plan(run, cluster)

    facts = {"num_gpus": 16, "params": "1B", "batch_size_per_gpu": 8, "sequence_length": 1024}
    document = drillyard.measure(log, hardware=own, accelerator="My GPU 9000", **facts).as_json()
    assert (document["accelerator"], document["peak_tflops"]) == ("my-gpu", 400)
    assert document["mfu"] == pytest.approx(6e9 * 4096 / 400e12)


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "own.yaml"
        path.write_text(text)
        return load_catalog(path)

    return load


@pytest.fixture
def mistakes(load):
    def mistakes(text):
        with pytest.raises(UserError) as error:
            load(text)
        return [line.rsplit("own.yaml", 1)[1] for line in str(error.value).splitlines()]

    return mistakes


def test_own_rows_are_looked_up_like_ours(load):
    own = load(NODE)
    node = own.machine("my-node")
    gpu = own.accelerator_of(node)
    assert own.find_accelerator("my gpu 9000") is gpu
    assert gpu.peak("bf16").value == 400e12
    assert own.price("my-node", "on-demand", "anywhere").gpu_hour(node).value == 2.5
    assert bus_bandwidth(own.bandwidths, node, "all_reduce", 2, 2**30).gb_per_s.value == 400.5
    assert bus_bandwidth_bound(node, own.accelerator_of(node), "all_reduce", 2).value == 750
    assert own.machine("a4-highgpu-8g") == catalog().machine("a4-highgpu-8g")
    assert catalog().find_machine("my-node") is None


def test_the_file_is_the_source_of_what_it_says(load):
    own = load(NODE)
    assert own.accelerator("my-gpu").fact("memory_gib").source.endswith("own.yaml")
    price = own.price("my-node", "on-demand").node_hour(own.machine("my-node"))
    assert (price.source.rsplit("own.yaml", 1)[1], price.date) == (": contract", "2026-10-01")


def test_a_known_name_changes_only_what_is_given(load):
    own = load("machines: [{name: a4-highgpu-8g, host_memory_gib: 2000}]").machine("a4-highgpu-8g")
    ours = catalog().machine("a4-highgpu-8g")
    assert own.host_memory_gib == 2000
    assert own.fact("host_memory_gib").source.endswith("own.yaml")
    assert own.fact("vcpus") == ours.fact("vcpus")
    assert own.fact("data_nics") == ours.fact("data_nics")
    assert own.fact("storage.aggregate_gb_per_s").unverified


def test_of_a_mapping_only_the_given_values_change(load):
    own = load("accelerators: [{name: b200, peak_tflops: {bf16: 2000, fp4: 8000}}]").accelerator(
        "b200"
    )
    ours = catalog().accelerator("b200")
    assert own.peak_tflops == {**ours.peak_tflops, "bf16": 2000, "fp4": 8000}
    assert own.fact("peak_tflops.fp8") == ours.fact("peak_tflops.fp8")
    assert own.fact("peak_tflops.fp16") == ours.fact("peak_tflops.fp16")
    assert own.fact("peak_tflops.bf16").source.endswith("own.yaml")
    assert not own.fact("peak_tflops.fp4").unverified


def test_a_doubt_about_a_value_that_was_not_given_stays(load):
    own = load("accelerators: [{name: b200, memory_gb: 192, unverified: [memory_gb]}]").accelerator(
        "b200"
    )
    assert own.fact("peak_tflops.fp4").unverified
    assert own.fact("memory_gb").unverified
    assert not own.fact("peak_tflops.bf16").unverified
    everything = load("accelerators: [{name: b200, memory_gb: 192, unverified: true}]").accelerator(
        "b200"
    )
    assert everything.fact("memory_gb").unverified
    assert not everything.fact("peak_tflops.bf16").unverified


def test_an_own_price_comes_before_ours(load):
    prices = (
        "prices: [{machine: p5.48xlarge, consumption: on-demand, region: us-east-1,"
        " usd_per_gpu_hour: 3}]"
    )
    own = load(prices)
    p5 = own.machine("p5.48xlarge")
    assert own.price("p5.48xlarge", "on-demand", "us-east-1").node_hour(p5).value == 24
    anywhere = load(prices.replace(" region: us-east-1,", ""))
    assert anywhere.price("p5.48xlarge", "on-demand", "us-east-1").gpu_hour(p5).value == 3
    assert own.price("p5en.48xlarge", "on-demand", "us-east-1") == catalog().price(
        "p5en.48xlarge", "on-demand", "us-east-1"
    )


def test_every_mistake_is_reported_with_its_line(mistakes):
    assert each_says(
        mistakes("""machines:
  - name: my-node
    acelerator: h100
    num_accelerators: "8"
    network_stack: infiniband
    data_nics: {count: -1, gbps: 400}
  - name: two
    accelerator: h100
    num_accelerators: 0
    network_stack: infiniband
    consumption: [on-demnd]
    date: yesterday
prices:
  - {machine: my-node, consumption: on-demand, usd_per_node_hour: 0}
  - 17
"""),
        [
            ":3: machines.0.acelerator: ... 'accelerator'",
            ":4: machines.0.num_accelerators: ... '8' ... > 0",
            ":6: machines.0.data_nics.count: ... -1 ... >= 0",
            ":9: machines.1.num_accelerators: ... 0 ... > 0",
            (
                ":11: machines.1.consumption.0: ... 'on-demnd' ... 'on-demand', 'reservation',"
                " 'spot', 'flex-start', 'flex-start-queued' ... 'calendar' ... 'on-demand'"
            ),
            ":12: machines.1.date: ... 'yesterday' ... 2026-11-21",
            ":14: prices.0.usd_per_node_hour: ... 0 ... > 0 ... null",
            ":15: prices.1: ... 17 ... mapping",
        ],
    )


def test_rows_that_do_not_fit_each_other_are_reported_with_what_was_meant(mistakes):
    assert each_says(
        mistakes("""machines:
  - name: my-node
    accelerator: h10
    num_accelerators: 8
    network_stack: infinband
    data_nics: {count: 8, gbps: 400}
    network_gbps: 3000
prices:
  - {machine: my-nod, consumption: on-demand, usd_per_gpu_hour: 1, usd_per_node_hour: 8}
bandwidths:
  - {accelerator: h100, collective: all_reduce, nodes: 2, num_accelerators: 16, gb_per_s: {}}
"""),
        [
            ":3: machines.0.accelerator: 'h10' ... h100",
            ":5: machines.0.network_stack: 'infinband' ... infiniband",
            ":7: machines.0.network_gbps: ... 3000 ... 3200 Gb/s",
            ":9: prices.0.machine: 'my-nod' ... my-node",
            ":9: prices.0.machine: ... usd_per_node_hour ... usd_per_gpu_hour",
            ":11: bandwidths.0.nodes: ... 2",
            ":11: bandwidths.0.gb_per_s: ... one size",
        ],
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            ": is empty ... accelerators, machines, network_stacks, bandwidths, prices",
        ),
        ("[1, 2]", "list of 2 ... mapping"),
        ("acelerators: []", ":1: acelerators: ... accelerators"),
        ("machines: {name: x}", ":1: machines: ... mapping (name) ... list"),
        ("machines:\n  - {name: b200\n", ":3: not valid YAML"),
        (
            (
                "prices:\n  - &a {machine: p5.48xlarge, consumption: spot, usd_per_gpu_hour: 1}\n "
                " - *a\n"
            ),
            "prices.1: ... same row ... 1",
        ),
        (
            "accelerators:\n  - {name: g, title: G, title: H}",
            ":2: accelerators.0.title: given twice",
        ),
        (
            "accelerators: [{name: g, title: G, memory_gib: .inf}]",
            "memory_gib: ... Infinity ... > 0",
        ),
        ("accelerators: [{name: g, title: G, sources: 3}]", "sources: ... 3"),
        ("accelerators: [{name: g, title: G, sources: {peak: 'x'}}]", "sources.peak: 'peak'"),
        ("accelerators: [{name: g, title: G, unverified: [memory]}]", "unverified: 'memory'"),
        (
            (
                "machines: [{name: m, cloud: gcp, accelerator: h100, num_accelerators: 8,"
                " network_stack: gib}]"
            ),
            "cloud: ... gpu_quota",
        ),
        ("accelerators: [{name: [g], title: G}]", "accelerators.0.name: ... list of 1 ... text"),
        ("accelerators: [{name: g, title: G, source: []}]", "source: ... empty list ... text"),
        ("accelerators: [{name: g, title: G, source: 4}]", "source: ... 4 ... text"),
        (
            (
                "bandwidths: [{accelerator: h100, collective: alltoall, nodes: 1, num_accelerators:"
                " 8, gb_per_s: {1G: 2}}]"
            ),
            "gb_per_s.1G",
        ),
    ],
)
def test_what_is_no_hardware_file_is_refused(mistakes, text, message):
    assert says("\n".join(mistakes(text)), message)


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ("part_prices: [{part: e2-standart, usd_per_hour: 1}]", ".part: ... e2-standard"),
        (
            "part_prices: [{part: gke-control-plan, usd_per_hour: 1}]",
            ".part: ... gke-control-plane",
        ),
        ("part_prices: [{part: pd-balancd, usd_per_gib_month: 1}]", ".part: ... pd-balanced"),
        ("part_prices: [{part: pd-ssd, usd_per_hour: 1}]", "usd_per_hour: ... usd_per_gib_month"),
        (
            "part_prices: [{part: e2-standard-8, usd_per_gib: 1}]",
            "usd_per_gib: ... usd_per_hour",
        ),
        (
            "part_prices: [{part: bucket, region: us-centrall1, usd_per_gib_month: 1}]",
            ".region: ... us-central1",
        ),
        (
            "prices: [{machine: a4-highgpu-8g, consumption: spot, region: us-centrall1,"
            " usd_per_node_hour: 1}]",
            ".region: ... us-central1",
        ),
        (
            "prices: [{machine: a4-highgpu-8g, consumption: on-demand, usd_per_node_hour: 1}]",
            ".consumption: ... reservation, spot",
        ),
        ("cpu_machines: [{name: mine, vcpus: 8, shape: e2-standart}]", ".shape: ... e2-standard"),
        ("regions: [{name: us-new1, zone: [a]}]", ".zone: ... 'zones'"),
    ],
)
def test_a_row_that_nothing_would_use_is_a_mistake(mistakes, row, facts):
    [line] = mistakes(row)
    assert says(line, facts)


def test_ones_own_parts_and_places_are_used(load):
    own = load(
        "regions: [{name: us-new1, zones: [a, b]}]\n"
        "cpu_machines: [{name: mine-8, vcpus: 8, shape: mine, cloud: gcp}]\n"
        "part_prices:\n"
        "  - {part: mine, region: us-new1, vcpus: 8, usd_per_hour: 2}\n"
        "  - {part: hyperdisk-balanced, region: us-new1, usd_per_gib_month: 0.1}\n"
    )
    assert own.cpu_machine_price(own.cpu_machine("mine-8"), "us-new1").value == 2
    assert own.regions["us-new1"].zone_names == ("us-new1-a", "us-new1-b")


def test_rows_that_do_not_fit_are_reported_beside_rows_that_are_none(mistakes):
    """And what refers to a row that cannot be read is not another mistake."""
    found = mistakes(
        "machines: [{name: my-node, accelerator: h100, num_accelerators: 0, network_stack: gib}]\n"
        "prices:\n"
        "  - {machine: my-node, consumption: spot, usd_per_gpu_hour: 1}\n"
        "  - {machine: a4-highgpu-8, consumption: spot, usd_per_gpu_hour: 1}\n"
    )
    assert each_says(
        found, [":1: machines.0.num_accelerators", ":4: prices.1.machine: ... a4-highgpu-8g"]
    )


def test_a_file_that_is_not_there_is_reported_as_such(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: no .*accelerators"):
        load_catalog(tmp_path / "none.yaml")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "name",
        "accelerator",
        "data_nics",
        "storage",
        "vcpus",
        "consumption",
        "source",
        "sources",
        "x",
    ]
)


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.dictionaries(FIELDS, VALUES, max_size=6))
def test_any_row_is_either_read_or_refused_at_its_keys(tmp_path, raw):
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({"machines": [raw]}))
    try:
        load_catalog(path)
    except UserError as error:
        assert all(
            re.match(r".*own\.yaml:\d+: machines\.0", line) for line in str(error).splitlines()
        )


PARTS = """
cpu_machines:
  - {name: c3-standard-8, cloud: gcp, vcpus: 8, cpu_quota: C3_CPUS}
part_prices:
  - {part: gke-control-plane, usd_per_hour: 0.08}
  - {part: c3-standard-8, region: us-central1, usd_per_hour: 0.4}
  - {part: e2-standard, region: us-central1, usd_per_hour: 9}
"""


def test_parts_of_a_cluster_have_rows_of_ones_own(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(PARTS)
    facts = load_catalog(own)
    assert facts.part_price("gke-control-plane", "europe-west4").value == 0.08
    assert facts.part_price("gke-control-plane", "europe-west4").source == str(own)
    machine = facts.cpu_machine("c3-standard-8")
    assert facts.cpu_machine_price(machine, "us-central1").value == 0.4
    assert facts.cpu_machine_price(machine, "us-east1") is None
    # The price of a shape is nobody's without its vCPUs.
    assert facts.cpu_machine_price(facts.cpu_machine("e2-standard-4"), "us-central1") is None


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ("part_prices: [{part: pd-ssd, usd_per_hour: 0}]", "usd_per_hour ... 0"),
        ("part_prices: [{part: pd-ssd, usd_per_gib_month: -1}]", "usd_per_gib_month ... -1"),
        ("part_prices: [{part: pd-ssd}]", "usd_per_hour ... usd_per_gib_month"),
        (
            "part_prices: [{part: pd-ssd, usd_per_hour: 1, usd_per_gib: 1}]",
            "usd_per_hour ... give one",
        ),
        ("cpu_machines: [{name: mine, vcpus: 0}]", "vcpus ... 0"),
        ("cpu_machines: [{name: mine}]", "vcpus"),
        (
            "prices: [{machine: a4-highgpu-8g, consumption: spot, usd_per_node_hour: 0}]",
            "usd_per_node_hour ... 0",
        ),
    ],
)
def test_a_part_without_a_price_is_a_mistake_of_the_file(tmp_path, row, facts):
    own = tmp_path / "own.yaml"
    own.write_text(row)
    with pytest.raises(UserError) as caught:
        load_catalog(own)
    assert says(str(caught.value), f"{own}:1 ... {facts}")
