"""Step time: a range from measured runs, a bound where nothing is like it, and no answer where no
peak is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.facts import says

from drillyard.errors import UserError
from drillyard.estimation.efficiency import BANDS, SLOW_ATTENTION, central_efficiency
from drillyard.estimation.measured_runs import MeasuredRun, published_runs
from drillyard.estimation.quantity import Range
from drillyard.estimation.setup import LoraSetup, Setup
from drillyard.estimation.step_time import StepTime, step_time
from drillyard.estimation.step_work import count_work
from drillyard.hardware import Fact, FactSource, catalog
from drillyard.modelspec import flops_per_token, model_spec, spec_from_counts

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_8B = {
    **LLAMA_70B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def setup(config: dict[str, Any] = LLAMA_8B, **changes: Any) -> Setup:
    settled: dict[str, Any] = {
        "spec": model_spec(config),
        "precision": "bf16",
        "sequence_length": 8192,
        "micro_batch_size": 1,
        "gradient_accumulation": 1,
        "activation_checkpointing": "full",
        "shard": 8,
        "replicate": 1,
        "gpus_per_node": 8,
        "kernel": "varlen",
        "compiled": True,
        "loss_chunk_tokens": 2048,
    }
    return Setup(**{**settled, **changes})


def estimated(
    asked: Setup | None = None,
    machine: str | None = None,
    accelerator: str = "h100",
    **options: Any,
) -> StepTime:
    facts = catalog()
    row = None if machine is None else facts.machine(machine)
    on = facts.accelerator(accelerator) if row is None else facts.accelerator_of(row)
    return step_time(asked or setup(), row, on, **options)


def measured(
    asked: Setup, seconds: float, accelerator: str = "h100", publisher: str = "someone"
) -> MeasuredRun:
    speed = Fact(asked.tokens_per_step_per_gpu / seconds, (FactSource("a test", "2026-01-01"),))
    return MeasuredRun("a run", publisher, catalog().accelerator(accelerator), None, asked, speed)


def test_sixteen_b200_fine_tune_llama_70b_in_a_range_that_holds_the_published_time():
    """Llama 3.1 70B on two a4-highgpu-8g: 8 sequences of 4096 per GPU, full checkpointing, 14.5 s
    measured."""
    asked = setup(LLAMA_70B, sequence_length=4096, micro_batch_size=8, shard=16)
    message = estimated(asked, "a4-highgpu-8g", without_source="torch-distributed-training-gke")
    assert not message.seconds.is_bound
    assert message.seconds.low.value < 14.5 < message.seconds.high.value
    assert message.seconds.high.value / message.seconds.low.value <= 1.4 + 1e-9
    assert "torch-distributed-training-gke" not in {used.row.publisher for used in message.rows}
    assert message.basis == "neighbours" and message.seconds.unverified
    assert any(says(note, "no measured run") for note in message.notes)


def test_the_run_itself_is_known_when_nobody_leaves_it_out():
    asked = setup(LLAMA_70B, sequence_length=4096, micro_batch_size=8, shard=16)
    message = estimated(asked, "a4-highgpu-8g")
    assert message.basis == "class" and [used.row.name for used in message.rows] == [
        "gke-b200-70b-16"
    ]
    assert (message.seconds.low.value * message.seconds.high.value) ** 0.5 == pytest.approx(
        14.54, rel=0.01
    )


def test_figures_follow_from_the_step_by_the_named_formula():
    asked = setup()
    message = estimated(asked)
    step, speed, rate, mfu = (
        message.seconds,
        message.tokens_per_second_per_gpu,
        message.tflops_per_gpu,
        message.mfu,
    )
    assert step and speed and rate and mfu and message.formula == "6N"
    assert speed.low.value == pytest.approx(8192 / step.high.value)
    assert speed.high.value == pytest.approx(8192 / step.low.value)
    assert rate.low.value == pytest.approx(
        speed.low.value * flops_per_token(asked.spec, "6N", 8192) / 1e12
    )
    assert mfu.high.value == pytest.approx(rate.high.value / 989)
    assert mfu.low.value < mfu.high.value


def test_adapters_are_measured_by_the_ruler_for_frozen_weights():
    message = estimated(setup(adapters=LoraSetup(16, "all-linear")))
    assert message.formula == "4N frozen + 6N trained"
    full = estimated()
    assert message.seconds and full.seconds and message.seconds.low.value < full.seconds.low.value


def test_the_bounds_of_a_known_step():
    """The 70B of 16 B200s by hand: FLOPs per token over 1745 TFLOP/s; 141 GB gathered twice at some
    360 GB/s."""
    asked = setup(LLAMA_70B, sequence_length=4096, micro_batch_size=8, shard=16)
    message = estimated(asked, "a4-highgpu-8g")
    matrices, head = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672), 8192 * 128256
    again = matrices - 80 * 8192 * 28672
    attention = 80 * 2 * 8192 * 4096 * (1 + 2.5 + 1)
    per_token = 6 * (matrices + head) + 2 * again + attention
    assert message.compute.value == pytest.approx(32768 * per_token / 1745e12)
    assert message.communication and 0.9 < message.communication.value < 1.3
    assert message.bound.value == message.compute.value


def test_an_accelerator_without_a_peak_has_no_step_time():
    with pytest.raises(UserError, match=r"bf16 peak.* of cpu"):
        estimated(accelerator="cpu")


def test_a_precision_without_a_peak_has_no_step_time():
    with pytest.raises(UserError, match=r"fp64 peak.* of b200[\s\S]*training.precision=bf16"):
        estimated(setup(precision="fp64"), accelerator="b200")


def test_where_nothing_measured_is_like_it_the_bound_is_called_one():
    message = estimated(setup(precision="fp32"))
    assert message.basis == "bound" and message.rows == () and message.efficiency is None
    assert message.seconds.is_bound and message.seconds.low is message.seconds.high
    assert message.seconds.low.value == message.bound.value
    assert message.mfu is not None and message.mfu.is_bound
    assert any("only the bound" in note for note in message.notes)


def test_neighbours_are_of_the_same_vendor():
    message = estimated(
        setup(activation_checkpointing="selective"), accelerator="mi300x", without_source="torchao"
    )
    assert message.basis == "bound"


def test_efficiencies_of_neighbours_are_unverified_and_those_of_the_class_are_not():
    own, borrowed = (
        estimated(),
        estimated(without_source="torch-distributed-training-gke", accelerator="b200"),
    )
    assert own.basis == "class" and own.efficiency is not None and not own.efficiency.unverified
    assert (
        borrowed.basis == "neighbours"
        and borrowed.efficiency is not None
        and borrowed.efficiency.unverified
    )
    assert "neighbours" in borrowed.efficiency.low.source


def test_other_runs_on_the_accelerator_come_before_other_accelerators():
    message = estimated(setup(activation_checkpointing="selective"), accelerator="b200")
    assert message.basis == "neighbours"
    assert {used.row.accelerator.name for used in message.rows} == {"b200"}


def test_only_the_rows_that_are_given_count_and_every_publisher_once():
    asked = setup()
    rows = [
        measured(asked, 2.0),
        measured(asked, 2.0),
        measured(asked, 2.0),
        measured(asked, 4.0, publisher="another"),
    ]
    message = estimated(asked, rows=rows)
    assert message.basis == "class" and len(message.rows) == 4
    middle = (message.seconds.low.value * message.seconds.high.value) ** 0.5
    assert middle == pytest.approx(8**0.5, rel=0.02)
    alone = estimated(asked, rows=rows, without_source="another")
    assert central_efficiency(alone.rows) > central_efficiency(message.rows)


def test_calibration_replaces_all_published_runs():
    asked = setup()
    message = estimated(asked, calibration=measured(asked, 1.7))
    assert message.basis == "calibration" and len(message.rows) == 1
    assert message.seconds.low.value < 1.7 < message.seconds.high.value
    assert message.seconds.high.value / message.seconds.low.value <= BANDS["calibration"] + 1e-9
    assert not any("another class" in note for note in message.notes)


def test_calibration_by_a_run_of_another_class_says_so():
    message = estimated(setup(), calibration=measured(setup(activation_checkpointing="none"), 1.2))
    assert message.basis == "calibration"
    assert any("another class" in note and "checkpointing none" in note for note in message.notes)


def test_calibration_by_a_run_that_only_waited_for_its_network_is_refused_and_said():
    message = estimated(setup(), calibration=measured(setup(), 0.001))
    assert message.basis == "bound" and message.seconds is not None and message.seconds.is_bound
    assert any(says(note, "network") for note in message.notes)


def test_between_nodes_of_which_nothing_is_known_communication_is_left_out_and_said():
    message = estimated(setup(shard=16))
    assert message.communication is None and message.exposed is None
    assert message.seconds.unverified
    assert any("name a machine" in note for note in message.notes)


def test_a_machine_without_measured_bandwidths_gets_its_line_rates_and_says_so():
    message = estimated(setup(shard=16), "p5en.48xlarge")
    assert message.communication is not None and message.communication.unverified
    assert "line rate" in message.communication.source


def test_a_whole_node_of_h200_is_about_as_fast_per_gpu_as_half_of_one():
    half, whole = (estimated(setup(shard=gpus), accelerator="h200") for gpus in (4, 8))
    assert whole.seconds.low.value == pytest.approx(half.seconds.low.value, rel=0.1)


def test_doubts_about_the_hardware_are_doubts_about_the_answer():
    """The H100 PCIe's memory bandwidth is unverified in the catalog."""
    message = estimated(accelerator="h100-pcie")
    assert message.memory.unverified
    assert message.seconds.unverified


def test_what_a_spec_does_not_know_is_reported():
    message = estimated(setup(spec=spec_from_counts(8_000_000_000)))
    assert not message.seconds.is_bound
    assert any("only parameter counts" in note for note in message.notes)


def test_the_answer_is_pure_and_explains_itself():
    one, other = estimated(), estimated()
    assert one == other
    assert one.seconds.low.unit == "s" and one.seconds.low.formula
    quantities = [each.low if isinstance(each, Range) else each for each in one.quantities]
    names = [each.name for each in quantities]
    assert names[:5] == ["compute", "memory", "activations", "communication", "bound"]
    assert "MFU" in names and all(each.formula for each in quantities)


MODELS = {
    "8B": LLAMA_8B,
    "70B": LLAMA_70B,
    "narrow": {**LLAMA_8B, "num_hidden_layers": 2, "hidden_size": 1024},
}
ADAPTERS = {False: None, True: LoraSetup(8, "all-linear")}
CHANGES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(list(MODELS)),
        "precision": st.sampled_from(["bf16", "bf16", "fp32"]),
        "sequence_length": st.sampled_from([128, 2048, 16384]),
        "micro_batch_size": st.integers(1, 16),
        "gradient_accumulation": st.integers(1, 8),
        "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
        "shard": st.sampled_from([1, 4, 8, 16, 512]),
        "replicate": st.sampled_from([1, 2, 16]),
        "kernel": st.sampled_from(["varlen", "sdpa", "eager"]),
        "compiled": st.booleans(),
        "keeps_unsharded": st.booleans(),
        "keeps_frozen_whole": st.booleans(),
        "adapters": st.booleans(),
    }
)


def drawn(changes: dict[str, Any]) -> Setup:
    named = {name: value for name, value in changes.items() if name not in ("model", "adapters")}
    return setup(MODELS[changes["model"]], **named, adapters=ADAPTERS[changes["adapters"]])


PLACES = st.sampled_from(
    ["a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g", "p4de.24xlarge", "gpu-h100-sxm", None]
)


@settings(max_examples=150)
@given(changes=CHANGES, machine=PLACES)
def test_no_step_is_faster_than_its_bounds_and_no_range_wider_than_two_fifths(changes, machine):
    assume(
        changes["precision"] != "fp32" or machine != "a4-highgpu-8g"
    )  # no fp32 peak of a B200 is known
    message = estimated(drawn(changes), machine)
    assert message.memory is not None
    low, high = message.seconds.low.value, message.seconds.high.value
    for bound in (message.compute, message.memory, message.communication, message.bound):
        assert bound is None or bound.value <= low * (1 + 1e-9)
    longer = 1 + (SLOW_ATTENTION - 1) * count_work(drawn(changes)).attention_share
    assert low <= high <= 1.4 * low * longer * (1 + 1e-9)
    assert message.mfu is not None and 0 < message.mfu.low.value <= message.mfu.high.value
    # 6N counts the embedding, a lookup, as a product: of a model that is mostly embedding it is
    # more than is executed.
    assert changes["model"] == "narrow" or message.mfu.high.value < 1.1
    if message.exposed is not None:
        assert 0 <= message.exposed.low.value <= message.exposed.high.value <= low
    assert (
        message.efficiency is None
        or 0 < message.efficiency.low.value <= message.efficiency.high.value <= 1
    )


@settings(max_examples=60)
@given(changes=CHANGES, machine=PLACES, more=st.integers(2, 4))
def test_more_work_takes_longer(changes, machine, more):
    assume(changes["precision"] != "fp32" or machine != "a4-highgpu-8g")
    asked = drawn(changes)
    message = estimated(asked, machine)
    heavier = [
        replace(asked, gradient_accumulation=more * asked.gradient_accumulation),
        replace(asked, micro_batch_size=more * asked.micro_batch_size),
        replace(asked, spec=replace(asked.spec, blocks=asked.spec.blocks * more)),
    ]
    if asked.kernel == "varlen":
        heavier.append(replace(asked, kernel="eager"))
    for other in heavier:
        longer = estimated(other, machine)
        assert longer.seconds is not None and message.seconds is not None
        assert longer.compute is not None and message.compute is not None
        assert longer.compute.value > message.compute.value
        assert longer.seconds.low.value >= message.seconds.low.value * (1 - 1e-9)


def test_every_published_run_has_an_efficiency_below_one():
    for row in published_runs().values():
        message = step_time(row.setup, row.machine, row.accelerator, calibration=row)
        assert 0.2 < message.rows[0].efficiency < 1, row.name


def test_fp8_products_are_faster_where_the_accelerator_has_them() -> None:
    exact, cast = (estimated(setup(precision=each)) for each in ("bf16", "fp8"))
    work = count_work(setup(precision="fp8"))
    rates = catalog().accelerator("h100").achievable_tflops
    assert cast.compute.value == pytest.approx(
        (work.flops - work.fp8_flops) / rates["bf16"] / 1e12 + work.fp8_flops / rates["fp8"] / 1e12
    )
    assert cast.compute.value < 0.75 * exact.compute.value
    assert cast.activations.value > exact.activations.value
    assert cast.seconds.low.value < exact.seconds.low.value
    with pytest.raises(UserError, match=r"fp8 peak .*\n--set training.precision=bf16"):
        estimated(setup(precision="fp8"), accelerator="a100-80gb")
