"""What to change so that a run fits: the smallest step on each lever, those that keep the training
first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import says

from drillyard.estimation import alternatives
from drillyard.estimation.alternatives import Alternative, find_alternatives
from drillyard.estimation.setup import Setup
from drillyard.modelspec import model_spec

LAYERS, HIDDEN = 22, 2048
SPEC = model_spec(
    {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": HIDDEN,
        "intermediate_size": 5632,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
)
KEPT_PER_LAYER = {"none": 34.0, "memory-budget": 24.0, "selective": 18.0, "full": 2.0}
GIB = 2**30


def setup(**changes: Any) -> Setup:
    settings: dict[str, Any] = {
        "spec": SPEC,
        "precision": "bf16",
        "sequence_length": 2048,
        "micro_batch_size": 8,
        "gradient_accumulation": 2,
        "activation_checkpointing": "none",
        "shard": 8,
        "replicate": 1,
        "gpus_per_node": 8,
        "kernel": "varlen",
        "compiled": True,
        "loss_chunk_tokens": 2048,
        **changes,
    }
    return Setup(**settings)


def peak_gib(setup: Setup) -> float:
    """A textbook's sum in place of the estimate: sharded state (of adapters next to none), and
    bytes per token."""
    state = (2 if setup.adapters else 16) * SPEC.total_parameters / setup.shard
    kept = (
        setup.tokens_per_micro_batch
        * LAYERS
        * HIDDEN
        * KEPT_PER_LAYER[setup.activation_checkpointing]
    )
    return (state + kept) / GIB


@pytest.fixture(autouse=True)
def textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "estimated_high_gib", peak_gib)


def settings_of(changes: list[Alternative]) -> list[Any]:
    return [
        change.settings if change.num_gpus is None else (change.num_gpus, change.settings)
        for change in changes
    ]


def test_what_fits_needs_no_change() -> None:
    assert find_alternatives(setup(), peak_gib(setup())) == []


def test_each_lever_is_moved_by_the_least_that_suffices() -> None:
    # 25.4 GiB as it is. Half of the micro-batch is 13.7; memory-budget 18.5; three quarters of the
    # sequence 19.6.
    assert settings_of(find_alternatives(setup(), 20.0)) == [
        {"training.activation_checkpointing": "memory-budget"},
        {"training.micro_batch_size": 4, "training.gradient_accumulation": 4},
        (32, {"training.micro_batch_size": 4, "training.gradient_accumulation": 1}),
        {"data.sequence_length": 1536},
    ]


def test_changes_that_keep_the_training_come_first_and_keep_the_global_batch() -> None:
    changes = find_alternatives(setup(), 10.0)
    kept = [change.keeps_training for change in changes]
    assert kept == sorted(kept, reverse=True)
    assert any(kept)
    for change in changes:
        if change.keeps_training:
            assert change.setup.tokens_per_step == setup().tokens_per_step
            assert change.num_gpus is None


def test_a_lever_that_does_not_suffice_alone_is_joined_by_recomputation() -> None:
    # Recomputing everything is 3.4 GiB, micro-batches of one alone 4.9.
    changes = find_alternatives(setup(), 2.9)
    assert settings_of(changes)[0] == {
        "training.activation_checkpointing": "full",
        "training.micro_batch_size": 4,
        "training.gradient_accumulation": 4,
    }
    assert says(changes[0].costs, "33 % more FLOPs")


def test_what_one_lever_does_alone_is_not_proposed_with_another() -> None:
    # Recomputing everything fits; the smallest micro-batch alone does not, and would only add to
    # it.
    settings = [change.settings for change in find_alternatives(setup(), 3.5)]
    assert settings[0] == {"training.activation_checkpointing": "full"}
    assert not any("training.activation_checkpointing" in other for other in settings[1:])


def test_fewer_copies_are_a_change_that_costs_no_gpu() -> None:
    changes = find_alternatives(
        setup(shard=2, replicate=8, micro_batch_size=1, activation_checkpointing="full"), 4.0
    )
    assert changes[0].settings == {"parallelism.replicate": 2, "parallelism.shard": 8}
    assert changes[0].setup.shard == 8
    assert changes[0].keeps_training


def test_where_only_more_gpus_do_the_global_batch_is_kept_as_long_as_it_divides() -> None:
    # Sharded state alone is 2.05 GiB on 8 GPUs.
    (many,) = find_alternatives(setup(), 1.5)
    assert many.num_gpus == 32
    assert many.setup.tokens_per_step == setup().tokens_per_step
    one = setup(micro_batch_size=1, gradient_accumulation=1, activation_checkpointing="full")
    (grown,) = find_alternatives(one, 1.0)
    assert grown.num_gpus == 32
    assert says(grown.costs, "4 times ... 32 sequences ... 8")


def test_a_chunk_that_follows_the_micro_batch_goes_on_to_and_one_set_by_hand_stays() -> None:
    followed = alternatives.with_micro_batch(setup(sequence_length=512, loss_chunk_tokens=1024), 1)
    assert followed.loss_chunk_tokens == 128
    assert alternatives.with_micro_batch(setup(loss_chunk_tokens=100), 1).loss_chunk_tokens == 100


def test_where_nothing_fits_nothing_is_proposed() -> None:
    assert find_alternatives(setup(), 1e-6) == []


def test_estimated_step_times_order_where_they_are_known() -> None:
    def slow_in_small_micro_batches(setup: Setup) -> float:
        return 10 / setup.micro_batch_size

    first = find_alternatives(setup(), 20.0, step_seconds=slow_in_small_micro_batches)[0]
    assert first.settings == {"training.activation_checkpointing": "memory-budget"}


def test_a_change_reads_as_settings_with_its_peak() -> None:
    words = find_alternatives(setup(), 20.0)[1].in_words()
    assert words.startswith(
        "training.micro_batch_size: 4, training.gradient_accumulation: 4 (up to 1"
    )
    assert words.endswith(" GiB)")


@pytest.mark.parametrize(
    ("length", "shorter"),
    [
        (1024, [768, 512, 384, 256, 192, 128, 64, 64]),
        (128, [64, 64]),
        (100, [64]),
        (127, [64]),
        (85, []),
        (63, []),
    ],
)
def test_sequences_are_shortened_by_quarters_and_halves_down_to_the_shortest(
    length: int, shorter: list[int]
) -> None:
    assert [
        to.sequence_length for to in alternatives._shorter_sequences(setup(sequence_length=length))
    ] == shorter


def test_sequences_are_halved_fifteen_times_at_most() -> None:
    lengths = [
        to.sequence_length for to in alternatives._shorter_sequences(setup(sequence_length=2**23))
    ]
    assert (len(lengths), lengths[0], lengths[-2:]) == (32, 3 * 2**21, [192, 128])


def test_gpus_are_doubled_to_the_most_there_are() -> None:
    grown = list(alternatives._more_gpus(setup(micro_batch_size=6, gradient_accumulation=2)))
    assert [to.world_size for to in grown] == [16 * 2**n for n in range(11)] and grown[
        -1
    ].world_size == 16_384
    assert [(to.micro_batch_size, to.gradient_accumulation) for to in grown[:3]] == [
        (6, 1),
        (3, 1),
        (3, 1),
    ]


def test_other_levers_start_at_the_least_that_a_run_can_be_cut_to() -> None:
    sizes = [
        to.micro_batch_size for to in alternatives._smaller_micro_batches(setup(micro_batch_size=6))
    ]
    assert sizes == [4, 3, 2, 1]
    cuts = [
        (to.shard, to.replicate) for to in alternatives._wider_sharding(setup(shard=2, replicate=6))
    ]
    assert cuts == [(3, 4), (4, 3), (6, 2), (12, 1)]
    modes = [to.activation_checkpointing for to in alternatives._more_recomputation(setup())]
    assert modes == ["memory-budget", "selective", "full"]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, []),
        ({"activation_checkpointing": "selective"}, ["17 % more FLOPs"]),
        ({"replicate": 1}, ["more ranks"]),
        ({"gradient_accumulation": 3}, ["smaller matrix"]),
        ({"sequence_length": 1024}, ["fewer tokens"]),
        ({"shard": 16}, ["2 times the GPUs", "512 sequences instead of 256"]),
        ({"shard": 16, "micro_batch_size": 4}, ["2 times the GPUs"]),
        ({"shard": 16, "micro_batch_size": 4, "device_type": "cpu"}, ["2 times the ranks"]),
    ],
)
def test_what_a_change_takes_in_return(changes: dict[str, Any], parts: list[str]) -> None:
    found = list(alternatives._costs(setup(replicate=2), setup(**{"replicate": 2, **changes})))
    assert len(found) == len(parts) and all(
        part in line for part, line in zip(parts, found, strict=True)
    )


@given(
    memory_gib=st.floats(0.5, 60),
    micro_batch=st.integers(1, 12),
    accumulation=st.integers(1, 6),
    mode=st.sampled_from(("none", "selective", "full")),
    layout=st.sampled_from([(1, 1), (8, 1), (2, 4), (4, 16)]),
)
def test_every_change_fits_and_is_one(
    memory_gib: float, micro_batch: int, accumulation: int, mode: str, layout: tuple[int, int]
) -> None:
    before = setup(
        micro_batch_size=micro_batch,
        gradient_accumulation=accumulation,
        activation_checkpointing=mode,
        shard=layout[0],
        replicate=layout[1],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alternatives, "estimated_high_gib", peak_gib)
        changes = find_alternatives(before, memory_gib)
    seen = []
    for change in changes:
        assert peak_gib(change.setup) <= memory_gib < peak_gib(before)
        assert change.memory_gib == peak_gib(change.setup)
        assert change.settings or change.num_gpus
        assert change.costs
        assert (change.num_gpus, change.settings) not in seen
        seen.append((change.num_gpus, change.settings))
        if change.keeps_training:
            assert change.setup.tokens_per_step == before.tokens_per_step
