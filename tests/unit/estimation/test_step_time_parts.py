"""Collectives on a machine's own bandwidths, and how they lie beside computing."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.estimation.quantity import given as own_figure
from drillyard.estimation.setup import LoraSetup, Setup
from drillyard.estimation.step_work import count_work
from drillyard.estimation.timeline import (
    HALF_SPEED_MIB,
    CollectiveNetwork,
    Rates,
    Timeline,
    TimelinePiece,
    step_traffic,
    timeline,
    unknown_host,
)
from drillyard.hardware import catalog
from drillyard.modelspec import model_spec

GIB = 2**30
RATES = Rates("achievable", own_figure(1e15), own_figure(3e12))
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def network(
    machine: str | None = None, accelerator: str = "h100", gpus_per_node: int = 8
) -> CollectiveNetwork:
    facts = catalog()
    row = None if machine is None else facts.machine(machine)
    on = facts.accelerator(accelerator) if row is None else facts.accelerator_of(row)
    return CollectiveNetwork(on, row, gpus_per_node, facts.bandwidths)


def setup(**changes: Any) -> Setup:
    settled: dict[str, Any] = {
        "spec": model_spec(LLAMA),
        "precision": "bf16",
        "sequence_length": 8192,
        "micro_batch_size": 1,
        "gradient_accumulation": 1,
        "activation_checkpointing": "none",
        "shard": 16,
        "replicate": 1,
        "gpus_per_node": 8,
        "kernel": "varlen",
        "compiled": True,
        "loss_chunk_tokens": 2048,
    }
    return Setup(**{**settled, **changes})


def test_a_measured_collective_takes_what_the_test_took():
    """nccl-tests on two A4: 8 GiB gathered in 21,395 us, at a bus bandwidth of 376.40 GB/s."""
    seconds = network("a4-highgpu-8g").seconds("all_gather", 16, 8 * GIB)
    assert seconds is not None and seconds.value == pytest.approx(21395e-6, rel=1e-3)
    assert not seconds.unverified


def test_smaller_messages_are_slower_per_byte():
    net = network("a4-highgpu-8g")
    large, small = net.seconds("all_gather", 16, GIB), net.seconds("all_gather", 16, GIB / 64)
    assert large is not None and small is not None and small.value > 1.3 * large.value / 64


def test_messages_below_what_was_measured_ramp_up_and_do_not_fall_off():
    """On 8 H200 all_gather was measured at 16 GiB alone, at 361.4 GB/s; at 32 MiB about half of
    that is left."""
    net = network(accelerator="h200")
    at = {mib: net.bus_gb_per_s("all_gather", 8, mib * 2**20) for mib in (16384, 128, 32, 1)}
    assert at[16384].value == 361.4 and not at[16384].unverified
    assert at[32].value == pytest.approx(361.4 / 2, rel=0.01)
    assert at[128].value == pytest.approx(361.4 * 0.8, rel=0.01)
    assert at[1].value < 0.04 * 361.4
    assert at[32].unverified and "ramp" in at[32].source


def test_the_ramp_is_that_of_the_measured_curves():
    curves = [row.gb_per_s for row in catalog().bandwidths if len(row.gb_per_s) > 3]
    halves = [
        size * (max(curve.values()) / value - 1)
        for curve in curves
        for size, value in curve.items()
        if value < 0.9 * max(curve.values())
    ]
    assert len(halves) > 20
    assert statistics.median(halves) == pytest.approx(HALF_SPEED_MIB, rel=0.1)


def test_within_a_node_the_gpus_own_link_counts_where_nothing_was_measured():
    seconds = network().seconds("all_gather", 8, 8 * GIB)
    assert seconds is not None and seconds.value == pytest.approx(8 * GIB * 7 / 8 / 450e9)
    assert seconds.unverified and "line rate" in seconds.source


def test_gpus_without_a_link_of_their_own_meet_over_the_host():
    seconds = network(accelerator="l4").seconds("all_gather", 8, GIB)
    assert seconds is not None and seconds.value == pytest.approx(GIB * 7 / 8 / 31.5e9)
    assert "host links" in seconds.source


def test_between_nodes_line_rates_bound_what_nobody_measured():
    """p5en: 16 NICs of 200 Gb/s for 8 GPUs are 50 GB/s each; with 450 GB/s of NVLink no GPU takes
    in more than 500."""
    two, many = (
        network("p5en.48xlarge").bus_gb_per_s("all_gather", ranks, GIB) for ranks in (16, 8000)
    )
    assert two is not None and two.value == pytest.approx(500)
    assert many is not None and many.value == pytest.approx(50 * 7999 / 999)


def test_another_collective_is_no_measurement():
    """On the p5 only all_reduce was measured."""
    reduce, gather = (
        network("p5.48xlarge").bus_gb_per_s(one, 16, GIB) for one in ("all_reduce", "all_gather")
    )
    assert reduce is not None and reduce.value == pytest.approx(436.95) and not reduce.unverified
    assert gather is not None and gather.unverified


def test_one_rank_alone_waits_for_nobody_and_unknown_networks_are_none():
    assert network().seconds("all_gather", 1, GIB).value == 0
    assert network().seconds("all_gather", 16, GIB) is None
    assert step_traffic(setup(), count_work(setup()), network()) is None


def test_a_host_of_which_nothing_is_known_has_no_nics():
    assert unknown_host(catalog().accelerator("h100"), 4).nic_gb_per_s_per_accelerator() is None


def test_each_block_is_gathered_twice_and_reduced_once():
    asked, net = setup(), network("a3-ultragpu-8g")
    work = count_work(asked)
    traffic = step_traffic(asked, work, net)
    assert traffic is not None
    block = work.blocks[0]
    gather = net.seconds("all_gather", 16, 2 * block.parameters).value
    scatter = net.seconds("reduce_scatter", 16, 4 * block.parameters).value
    assert traffic.units[0].forward == pytest.approx(gather)
    assert traffic.units[0].backward == pytest.approx(gather + scatter)
    kept = step_traffic(replace(asked, keeps_unsharded=True), work, net)
    assert kept is not None and kept.units[0].backward == pytest.approx(scatter)
    root = traffic.units[-1]
    assert root.backward == pytest.approx(
        net.seconds("reduce_scatter", 16, 4 * work.root.parameters).value
    )


def test_frozen_weights_that_are_whole_are_not_gathered():
    lora = LoraSetup(16, "all-linear")
    shared, net = setup(adapters=lora), network("a3-ultragpu-8g")
    whole = replace(shared, keeps_frozen_whole=True)
    work = count_work(whole)
    block = work.blocks[0]
    assert work.gathered_bytes(block) == 2 * block.trainable
    assert work.gathered_bytes(work.root) == 0
    traffic, of_shards = (
        step_traffic(whole, work, net),
        step_traffic(shared, count_work(shared), net),
    )
    assert traffic is not None and of_shards is not None
    gather = net.seconds("all_gather", 16, 2 * block.trainable).value
    scatter = net.seconds("reduce_scatter", 16, 4 * block.trainable).value
    assert traffic.units[0].forward == pytest.approx(gather)
    assert traffic.units[0].backward == pytest.approx(gather + scatter)
    assert (traffic.units[-1].forward, traffic.units[-1].backward) == (0, 0)
    assert of_shards.units[0].forward == pytest.approx(
        net.seconds("all_gather", 16, 2 * block.parameters).value
    )


def test_copies_add_up_their_shards_over_the_nodes_that_hold_them():
    """Sharded within nodes and copied over two: each GPU reduces an eighth, together all bytes of
    the block."""
    asked, net = setup(shard=8, replicate=2), network("gpu-h100-sxm")
    work = count_work(asked)
    traffic = step_traffic(asked, work, net)
    alone = step_traffic(setup(shard=8), count_work(setup(shard=8)), net)
    assert traffic is not None and alone is not None
    summed = net.seconds("all_reduce", 16, 4 * work.blocks[0].parameters).value
    assert traffic.units[0].backward - alone.units[0].backward == pytest.approx(summed)


def test_copies_of_a_model_over_two_nodes_each_reduce_a_nodes_part():
    asked, net = setup(shard=16, replicate=2), network("gpu-h100-sxm")
    work = count_work(asked)
    traffic, alone = step_traffic(asked, work, net), step_traffic(setup(), work, net)
    assert traffic is not None and alone is not None
    summed = net.seconds("all_reduce", 16, 4 * work.blocks[0].parameters / 2).value
    assert traffic.units[0].backward - alone.units[0].backward == pytest.approx(summed)


def test_communication_is_hidden_behind_computing_but_for_the_roots():
    line = Timeline(
        (TimelinePiece(10, 2.0, 1.0), TimelinePiece(10, 2.0, 3.0)), fixed=0.5, alone=1.0
    )
    assert line.seconds(1.0) == 10 * 2 + 10 * 3 + 0.5 + 1
    assert line.exposed(1.0) == 10 * 1 + 0.5
    assert line.seconds(0.5) == 10 * 4 + 10 * 4 + 0.5 + 2
    assert line.exposed(0.5) == 0.5


PIECES = st.lists(
    st.builds(
        TimelinePiece,
        count=st.integers(1, 100),
        busy=st.floats(1e-6, 10),
        communication=st.floats(0, 10),
    ),
    min_size=1,
    max_size=8,
)


@given(
    pieces=PIECES, fixed=st.floats(0, 10), alone=st.floats(1e-6, 10), efficiency=st.floats(0.01, 1)
)
def test_a_measured_time_gives_the_efficiency_back(pieces, fixed, alone, efficiency):
    line = Timeline(tuple(pieces), fixed, alone)
    found = line.efficiency(line.seconds(efficiency))
    assert found is not None
    assert line.seconds(found) == pytest.approx(line.seconds(efficiency), rel=1e-6)


@given(pieces=PIECES, fixed=st.floats(0, 10), efficiency=st.floats(0.01, 0.9))
def test_lower_efficiency_is_never_faster(pieces, fixed, efficiency):
    line = Timeline(tuple(pieces), fixed, 0.1)
    assert line.seconds(efficiency) > line.seconds(efficiency * 1.1)
    assert line.exposed(efficiency) <= line.exposed(min(1.0, efficiency * 1.1))


def test_nothing_hides_the_roots_collectives_and_the_first_gather():
    """However slow computing is: at a thousandth of the best rates every block's collectives are
    hidden."""
    asked = setup(gradient_accumulation=3)
    work = count_work(asked)
    traffic = step_traffic(asked, work, network("a3-ultragpu-8g"))
    assert traffic is not None
    root, first = traffic.units[-1], traffic.units[0]
    line = timeline(asked, work, traffic, RATES)
    assert line.exposed(0.001) == pytest.approx(3 * (root.forward + root.backward + first.forward))
    assert line.exposed(1.0) >= line.exposed(0.001)


def test_a_time_below_what_communication_takes_has_no_efficiency():
    line = Timeline((TimelinePiece(1, 1.0, 5.0),), fixed=1.0, alone=0.0)
    assert line.efficiency(5.9) is None
    assert line.efficiency(0.5) is None
    assert line.efficiency(11.0) == pytest.approx(0.1)


def test_work_beside_a_slow_network_takes_as_long_as_the_network():
    asked = setup(sequence_length=16)
    work = count_work(asked)
    slow = network("p4de.24xlarge")
    traffic = step_traffic(asked, work, slow)
    assert traffic is not None
    line = timeline(asked, work, traffic, RATES)
    total = sum(
        unit.count * (one.forward + one.backward)
        for unit, one in zip(work.units, traffic.units, strict=True)
    )
    assert line.seconds(1.0) == pytest.approx(total, rel=0.1)
    assert timeline(asked, work, None, RATES).seconds(1.0) < total / 5
