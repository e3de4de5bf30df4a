"""What `auto` becomes: the least recomputation that fits, the same wherever it is asked, and a
reason for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import says

from drillyard.config.kernel_rules import resolve_loss_chunk
from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.estimation import resolved_setup
from drillyard.estimation.memory import MemoryEstimate, memory_estimate
from drillyard.estimation.quantity import Range, quantity
from drillyard.estimation.resolved_setup import (
    CHECKPOINTING_MODES,
    ResolvedSetup,
    choose_checkpointing,
    resolve_setup,
)
from drillyard.estimation.setup import Setup
from drillyard.modelspec import model_spec, spec_from_counts

LLAMA = {
    "architecture": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
PEAKS = {"none": 30.0, "memory-budget": 25.0, "selective": 20.0, "full": 10.0}


def run_config(**changes: Any) -> RunConfig:
    """A run of a 1.1B Llama; `changes` are settings with __ for the dot."""
    settings: dict[str, Any] = {
        "name": "x",
        "model": {"config": LLAMA, "init": "random"},
        "data": {"source": "x.jsonl", "sequence_length": 2048},
        "training": {"steps": 1, "micro_batch_size": 4, "optimizer": {"learning_rate": 1e-3}},
    }
    for dotted, value in changes.items():
        section, name = dotted.split("__")
        settings.setdefault(section, {})[name] = value
    return RunConfig.model_validate(settings)


def resolved(config: RunConfig, **options: Any) -> ResolvedSetup:
    given = {
        "num_gpus": 8,
        "gpus_per_node": 8,
        "memory_gib": 80.0,
        "device_type": "cuda",
        **options,
    }
    return resolve_setup(config, given.pop("spec", model_spec(LLAMA)), **given)


def of_peak(high_gib: float) -> Any:
    """An estimate of memory of which only the high end says anything."""
    return SimpleNamespace(
        total=Range(quantity("low", 0.0, "GiB", ""), quantity("high", high_gib, "GiB", ""))
    )


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimated peak depends on the mode alone: 30, 25, 20 and 10 GiB."""
    monkeypatch.setattr(
        resolved_setup,
        "memory_estimate",
        lambda setup: of_peak(PEAKS[setup.activation_checkpointing]),
    )


@pytest.mark.parametrize(
    ("memory_gib", "mode"),
    [
        (80, "none"),
        (30, "none"),
        (29.9, "memory-budget"),
        (24, "selective"),
        (19, "full"),
        (5, "full"),
        (None, "full"),
    ],
)
def test_auto_is_the_least_recomputation_that_fits(
    peaks: None, memory_gib: float | None, mode: str
) -> None:
    assert resolved(run_config(), memory_gib=memory_gib).setup.activation_checkpointing == mode


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"training__fp8_scaling": "rowwise"}, True),
        ({"model__lora": {"rank": 4, "variant": "dora"}}, False),
        ({"model__lora": None}, False),
        ({"training__precision": "bf16"}, False),
    ],
)
def test_frozen_weights_rest_in_fp8_beside_plain_adapters_where_they_are_whole(
    changes: dict[str, Any], expected: bool
) -> None:
    fp8 = {"training__precision": "fp8", "model__lora": {"rank": 4}}
    config = run_config(**fp8 | changes)
    alone = resolved(config, num_gpus=1, gpus_per_node=1).setup
    weight = next(tensor for tensor in alone.spec.blocks[0].tensors if tensor.linear)
    assert alone.rests_in_fp8(weight) == expected
    assert resolved(config).setup.rests_in_fp8(weight) == expected
    assert not resolved(config, memory_gib=None).setup.rests_in_fp8(weight)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"training__fp8_scaling": "rowwise"}, False),
        ({"training__precision": "bf16"}, False),
        ({"parallelism__shard": 1, "parallelism__replicate": 8}, False),
        ({"model__lora": {"rank": 4, "variant": "dora"}}, False),
        ({"model__lora": {"rank": 4}}, False),  # held whole where they fit
    ],
)
def test_ranks_that_share_weights_exchange_them_in_fp8(
    changes: dict[str, Any], expected: bool
) -> None:
    setup = resolved(run_config(**{"training__precision": "fp8"} | changes)).setup
    in_block = next(tensor for tensor in setup.spec.blocks[0].tensors if tensor.linear)
    head = next(tensor for tensor in setup.spec.root if tensor.linear)
    assert setup.gathers_fp8 == setup.is_gathered_in_fp8(in_block) == expected
    assert not setup.is_gathered_in_fp8(head)


def test_a_memory_budget_is_for_compiled_blocks(peaks: None) -> None:
    eager = {"training__compile": False}
    found = resolved(run_config(**eager), memory_gib=29.9)
    assert found.setup.activation_checkpointing == "selective"
    limited = {"training__activation_checkpointing": "memory-budget"}
    assert resolved(run_config(**limited)).setup.activation_checkpointing == "memory-budget"
    with pytest.raises(UserError, match="write selective, or"):
        resolved(run_config(**eager, **limited))
    for remedy in (
        eager | {"training__activation_checkpointing": "selective"},
        limited | {"training__compile": True},
    ):
        resolved(run_config(**remedy))


def test_the_reason_names_the_figures(peaks: None) -> None:
    reasons = {d.key: d.reason for d in resolved(run_config(), memory_gib=24.0).decisions}
    expected = "the least recomputation that fits: up to 20 of 24 GiB"
    assert reasons["training.activation_checkpointing"] == expected
    setup = resolved(run_config()).setup
    assert says(choose_checkpointing(setup, 5.0)[1], "nothing fits: ... 10 GiB ... 5 GiB")


def test_the_estimate_that_auto_was_decided_by_comes_with_the_answer() -> None:
    for memory_gib in (80.0, 30.0, 1.0):
        found = resolved(run_config(), memory_gib=memory_gib)
        assert found.memory == memory_estimate(found.setup)
    assert resolved(run_config(), memory_gib=None).memory is None
    assert resolved(run_config(training__activation_checkpointing="full")).memory is None


def test_what_the_user_set_is_neither_changed_nor_estimated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolved_setup, "memory_estimate", lambda setup: pytest.fail("asked"))
    explicit = {
        "training__activation_checkpointing": "selective",
        "training__compile": False,
        "training__loss_chunk_tokens": 77,
        "model__attention": "eager",
        "parallelism__shard": 4,
        "parallelism__replicate": 2,
    }
    found = resolved(run_config(**explicit))
    assert found.decisions == ()
    assert found.settings() == {
        "model.attention": "eager",
        "training.activation_checkpointing": "selective",
        "training.compile": False,
        "training.loss_chunk_tokens": 77,
        "parallelism.shard": 4,
    }


def test_every_setting_that_is_left_open_is_decided_with_a_reason(peaks: None) -> None:
    found = resolved(run_config(parallelism__replicate=2), memory_gib=80.0)
    assert [(d.key, d.value) for d in found.decisions] == list(found.settings().items())
    assert all(d.reason for d in found.decisions)
    assert found.settings()["parallelism.shard"] == 4
    assert found.setup.world_size == 8


def test_the_setup_has_the_numbers_of_the_config(peaks: None) -> None:
    config = run_config(
        training__global_batch_size=64,
        training__precision="fp32",
        training__gradient_clipping=None,
        model__lora={"rank": 8, "target_modules": ["q_proj"]},
    )
    setup = resolved(config, device_type="cpu").setup
    assert (setup.micro_batch_size, setup.gradient_accumulation, setup.tokens_per_step) == (
        4,
        2,
        64 * 2048,
    )
    assert (setup.kernel, setup.compiled, setup.clips_gradients, setup.precision) == (
        "sdpa",
        False,
        False,
        "fp32",
    )
    assert setup.adapters is not None
    assert (setup.adapters.rank, setup.adapters.targets) == (8, ("q_proj",))


def test_weights_stay_whole_where_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resolved_setup,
        "memory_estimate",
        lambda setup: of_peak(50.0 if setup.keeps_unsharded else 30.0),
    )
    kept, given_up, unknown = (
        resolved(run_config(), memory_gib=memory) for memory in (51.0, 49.0, None)
    )
    assert kept.setup.keeps_unsharded and kept.setup.activation_checkpointing == "none"
    assert kept.memory is not None and kept.memory.total.high.value == 50.0
    assert not given_up.setup.keeps_unsharded
    assert given_up.setup.activation_checkpointing == "none"
    assert not unknown.setup.keeps_unsharded
    given = run_config(training__activation_checkpointing="full")
    assert resolved(given, memory_gib=51.0).setup.keeps_unsharded
    assert not resolved(given, memory_gib=49.0).setup.keeps_unsharded


def test_frozen_weights_are_whole_on_every_rank_where_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the least recomputation, and before gathered weights are kept."""

    def estimate(setup: Setup) -> Any:
        in_bf16 = 5.0 if setup.keeps_frozen_whole and not setup.stores_fp8 else 0.0
        kept = 10.0 * setup.keeps_frozen_whole + 10.0 * setup.keeps_unsharded
        return of_peak(PEAKS[setup.activation_checkpointing] + kept + in_bf16)

    monkeypatch.setattr(resolved_setup, "memory_estimate", estimate)
    lora = {"model__lora": {"rank": 8}}
    modes = {56.0: (True, True), 54.0: (True, False), 39.0: (False, False), None: (False, False)}
    for memory_gib, expected in modes.items():
        found = resolved(run_config(**lora), memory_gib=memory_gib)
        setup = found.setup
        assert (setup.keeps_frozen_whole, setup.keeps_unsharded) == expected, memory_gib
        assert setup.activation_checkpointing == ("full" if memory_gib is None else "none")
        assert setup.holds_frozen_whole == setup.keeps_frozen_whole
        if memory_gib is not None:
            assert found.memory == estimate(setup)
    assert not resolved(run_config(), memory_gib=60.0).setup.holds_frozen_whole
    # Those in fp8 are loaded in bf16.
    fp8 = run_config(**lora, training__precision="fp8")
    assert resolved(fp8, memory_gib=46.0).setup.keeps_frozen_whole
    assert not resolved(fp8, memory_gib=44.0).setup.keeps_frozen_whole


def test_a_large_base_is_sharded_where_its_weights_fill_the_memory() -> None:
    """Of the 1.1B Llama frozen in bf16 2.05 GiB; of 8 ranks each has an eighth."""
    config = run_config(model__lora={"rank": 8}, training__activation_checkpointing="full")
    spec = model_spec(LLAMA)
    sharded, whole = (
        memory_estimate(replace(resolved(config, memory_gib=None).setup, **changes))
        for changes in ({}, {"keeps_frozen_whole": True})
    )
    frozen = whole.state_bytes["parameters"] - sharded.state_bytes["parameters"]
    assert frozen == pytest.approx(2 * spec.total_parameters * 7 / 8, rel=1e-3)
    high = whole.total.high.value
    assert resolved(config, memory_gib=high + 0.01).setup.keeps_frozen_whole
    assert not resolved(config, memory_gib=high - 0.01).setup.keeps_frozen_whole


def test_weights_of_a_model_that_cannot_be_estimated_stay_whole_where_they_are_few() -> None:
    # 1.1B parameters in fp32 are 4.1 GiB: a sixteenth of 66 GiB.
    few = spec_from_counts(model_spec(LLAMA).total_parameters)
    assert resolved(run_config(), spec=few, memory_gib=80.0).setup.keeps_unsharded
    assert not resolved(run_config(), spec=few, memory_gib=60.0).setup.keeps_unsharded


def test_a_model_that_cannot_be_estimated_recomputes_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(setup: Setup) -> MemoryEstimate:
        raise UserError("linear attention has no formula here\nsecond line")

    monkeypatch.setattr(resolved_setup, "memory_estimate", refuse)
    decisions = {d.key: d for d in resolved(run_config()).decisions}
    message = decisions["training.activation_checkpointing"]
    assert message.value == "full"
    assert says(message.reason, "memory ... linear attention")
    counted = resolved(run_config(), spec=spec_from_counts(10**9))
    assert counted.setup.activation_checkpointing == "full"


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"shard auto x replicate 3 .*8"):
        resolved(run_config(parallelism__replicate=3))
    with pytest.raises(UserError, match=r"shard 4 x replicate 1 .*8"):
        resolved(run_config(parallelism__shard=4))
    with pytest.raises(UserError, match="micro_batch_size 4 x 8"):
        resolved(run_config(training__global_batch_size=33))


@given(
    st.permutations(CHECKPOINTING_MODES),
    st.floats(0.1, 100),
    st.lists(st.floats(0.1, 100), min_size=4, max_size=4),
)
def test_no_mode_with_less_recomputation_would_have_fitted(
    order: Any, memory: float, sizes: list[float]
) -> None:
    highs = dict(zip(order, sizes, strict=True))
    found = with_peaks(
        highs, lambda: resolved(run_config(), memory_gib=memory).setup.activation_checkpointing
    )
    before = CHECKPOINTING_MODES[: CHECKPOINTING_MODES.index(found)]
    assert all(highs[mode] > memory for mode in before)
    assert highs[found] <= memory or found == "full"


def with_peaks(highs: dict[str, float], ask: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            resolved_setup,
            "memory_estimate",
            lambda setup: of_peak(highs[setup.activation_checkpointing]),
        )
        return ask()


def auto_batch(memory_gib: float | None, **changes: Any) -> ResolvedSetup:
    settings = {"training__micro_batch_size": "auto", "training__global_batch_size": 96}
    return resolved(run_config(**settings | changes), memory_gib=memory_gib)


def test_an_open_micro_batch_is_the_largest_that_fits_and_keeps_the_global_batch() -> None:
    sizes = []
    for memory_gib in (10_000.0, 200.0, 60.0, 1.0, None):
        found = auto_batch(memory_gib)
        setup = found.setup
        sequences = setup.micro_batch_size * setup.gradient_accumulation * setup.world_size
        assert sequences == 96
        assert setup.tokens_per_micro_batch <= resolved_setup.MOST_TOKENS
        assert found.settings()["training.micro_batch_size"] == setup.micro_batch_size
        sizes.append(setup.micro_batch_size)
    assert sizes == [*sorted(sizes[:-1], reverse=True), 1] and sizes[0] > 1


def test_an_open_micro_batch_has_the_loss_chunk_of_its_size() -> None:
    setup = auto_batch(10_000.0).setup
    assert setup.loss_chunk_tokens == resolve_loss_chunk(setup.tokens_per_micro_batch, None)
    assert auto_batch(10_000.0, training__loss_chunk_tokens=77).setup.loss_chunk_tokens == 77


def test_moments_in_8_bits_make_room() -> None:
    plain = memory_estimate(resolved(run_config()).setup)
    packed = memory_estimate(
        resolved(
            run_config(training__optimizer={"name": "adamw-8bit", "learning_rate": 1e-4})
        ).setup
    )
    ratio = packed.state_bytes["optimizer"] / plain.state_bytes["optimizer"]
    assert ratio == pytest.approx((1 + 4 / 256) / 4, rel=1e-3)
