"""Contradictions between settings, found before anything starts, all at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import says

from drillyard.config.data_checks import ROLES
from drillyard.config.problems import dotted, refused_address
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import (
    check_run,
    require_valid,
    resolve_accumulation,
    resolve_global_batch,
)
from drillyard.data.row_formats import COLUMNS, OPTIONAL_COLUMNS
from drillyard.errors import UserError

from .conftest import RUN, Load


@pytest.mark.parametrize(
    "address", ["gs://b/x.jsonl", "s3://b/x", "hf://a/b", "file:///tmp/x", "https://a.org/x"]
)
@pytest.mark.parametrize(
    "key",
    ["data.source", "data.held_out.source", "checkpoint.resume", "model.id", "data.tokenizer"],
)
def test_an_address_is_not_a_path(key: str, address: str, load: Load) -> None:
    if key.endswith("source") and not address.startswith("file"):
        assert found(load(RUN, f"{key}={address}")) == {}
        return
    assert says(
        found(load(RUN, f"{key}={address}"))[key], f"{address}: ... not a path on this machine"
    )


def test_only_what_begins_with_a_scheme_is_an_address() -> None:
    for path in (
        "a/b",
        "runs/a:b",
        "C/gs://b",
        "./x://y",
        "1://y",
        Path("a/b"),
        Path("/gs:/b"),
        Path("file:"),
        None,
    ):
        assert refused_address(path) is None
    assert says(str(refused_address(Path("file:///tmp/x"))), "file:///tmp/x: ... not a path")


def found(config: RunConfig, num_ranks: int | None = None) -> dict[str, str]:
    return {
        dotted(problem.path): problem.message for problem in check_run(config, num_ranks=num_ranks)
    }


def test_a_sound_config_has_no_problems_with_any_number_of_ranks(load: Load) -> None:
    for num_ranks in (None, 1, 2, 7, 1024):
        assert check_run(load(), num_ranks=num_ranks) == []


PRETRAINED = ["model={id: some/model}", "data.tokenizer=null"]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["model={init: random}"], "model", "name a model"),
        (["model.id=a/b"], "model.config", "not by both"),
        (["model.init=pretrained"], "model.init", "no pretrained weights"),
        (["model.config={hidden_size: 8}"], "model.config.architecture", "missing"),
        (["model.lora={rank: 4}"], "model.lora", "pretrained weights"),
        (
            [*PRETRAINED, "model.lora={target_modules: []}"],
            "model.lora.target_modules",
            "empty list",
        ),
        ([*PRETRAINED, "model.lora={adapter: 'gs://b/a'}"], "model.lora.adapter", "gs://b/a"),
        (
            [*PRETRAINED, "data.tokenizer={train: bpe, vocab_size: 512}"],
            "data.tokenizer",
            "own tokenizer",
        ),
        (["data.tokenizer=null"], "data.tokenizer", "missing"),
        (["model.config.vocab_size=1000"], "model.config.vocab_size", "1000 ... 1024"),
        (["model.config.max_position_embeddings=64"], "data.sequence_length", "128 is over"),
        (["data.source=[]"], "data.source", "empty list"),
        (["data.source=builtin:text-to-sq"], "data.source", "'builtin:text-to-sq' ... text-to-sql"),
        (["data.source=builtin:python-stdlib"], "data.format", "builtin:python-stdlib"),
        (
            ["data.source={path: a.jsonl, options: {seed: 1}}"],
            "data.source.options",
            "a.jsonl' is neither",
        ),
        (["data.source=[x/a.jsonl, y/a.jsonl]"], "data.source.1", "'a.jsonl' ... 0"),
        (["data.held_out={source: b.jsonl, fraction: 0.1}"], "data.held_out", "not from both"),
        (["data.held_out={split_by: db_id}"], "data.held_out.fraction", "split_by ... fraction"),
        (["data.columns={prompt: x}"], "data.columns.prompt", "schema, question, sql"),
        (
            ["data.source=a.txt", "data.format=text", "data.loss_on=completion"],
            "data.loss_on",
            "text",
        ),
        (["training.steps=null"], "training.steps", "by `steps` or by `epochs`"),
        (["training.epochs=2.0"], "training.epochs", "not both"),
        (["training.schedule.warmup_steps=100"], "training.schedule.warmup_steps", "100 ... 100"),
        (
            ["training.schedule.decay_steps=5"],
            "training.schedule.decay_steps",
            "only warmup-stable-decay",
        ),
        (
            ["training.schedule={name: warmup-stable-decay, warmup_steps: 50, decay_steps: 51}"],
            "training.schedule.decay_steps",
            "50 ... 51 ... 100",
        ),
        (
            ["training.schedule={name: warmup-stable-decay, warmup_steps: 81}"],
            "training.schedule.decay_steps",
            "decay_steps ... 19",
        ),
        (
            ["training.schedule={name: constant, final_fraction: 0.1}"],
            "training.schedule.final_fraction",
            "no decay",
        ),
        (["model.attention=flex", "training.device=cpu"], "model.attention", "flex ... CPU"),
        (["model.attention=varlen"], "model.attention", "bf16 ... fp32"),
        (["parallelism.tensor=2"], "parallelism.tensor", "not available"),
        (["parallelism.context=2"], "parallelism.context", "not available"),
        (["evaluation.metrics=[]"], "evaluation.metrics", "empty list"),
        (
            [
                "data.source=a.txt",
                "data.format=text",
                "data.held_out.fraction=0.1",
                "evaluation.metrics=[sql-execution]",
            ],
            "evaluation.metrics",
            "data.format: text-to-sql ... text",
        ),
        (
            ["data.source=a.jsonl", "evaluation.every_steps=5"],
            "evaluation.every_steps",
            "no held-out data",
        ),
        (
            ["data.source=a.jsonl", "evaluation.at_start=true"],
            "evaluation.at_start",
            "no held-out data",
        ),
        (
            ["data.source=a.jsonl", "evaluation.metrics=[sql-execution]"],
            "evaluation.metrics",
            "no held-out data",
        ),
        (["checkpoint.resume=atuo"], "checkpoint.resume", "auto, never"),
        (["checkpoint.resume=' '"], "checkpoint.resume", "is empty"),
    ],
)
def test_a_contradiction_is_found_at_its_key(
    overrides: list[str], key: str, words: str, load: Load
) -> None:
    problems = found(load(RUN, *overrides))
    assert list(problems) == [key]
    assert says(problems[key], words)


@pytest.mark.parametrize(
    "overrides",
    [
        PRETRAINED,
        ["model={id: some/model, init: random}", "data.tokenizer=null"],
        ["model={id: some/model, init: random}"],
        ["training.steps=null", "training.epochs=1.5"],
        ["data.source=a.jsonl", "data.held_out.fraction=0.1", "evaluation.every_steps=5"],
        [
            "data.source=a.jsonl",
            "data.held_out.source=b.jsonl",
            "evaluation.metrics=[loss, sql-execution]",
        ],
        ["data.source={path: org/set, options: {name: main}}"],
        [
            "data.source={path: builtin:text-to-sql, options: {examples: 10}}",
            "evaluation.every_steps=5",
        ],
        ["data.source=a.jsonl", "checkpoint.keep_best=true"],
        ["training.schedule={name: warmup-stable-decay, warmup_steps: 50, decay_steps: 50}"],
        ["training.schedule={name: warmup-stable-decay, warmup_steps: 81, decay_steps: 19}"],
        ["training.schedule={name: warmup-stable-decay, warmup_steps: 80}"],
        ["model.attention=varlen", "training.precision=bf16"],
        ["checkpoint.resume=runs/other/checkpoints/step-00000010"],
        ["training.loss_chunk_tokens=100000"],
    ],
)
def test_what_only_looks_odd_is_let_through(overrides: list[str], load: Load) -> None:
    assert found(load(RUN, *overrides)) == {}


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "key", "words"),
    [
        (
            ["parallelism.shard=4"],
            2,
            "parallelism.shard",
            "4 ... 2 ... auto ... 4",
        ),
        (["parallelism.replicate=2"], 3, "parallelism", "3 ... replicate 2"),
        (["training.global_batch_size=9"], 2, "training.global_batch_size", "8 ... 10"),
        (["training.global_batch_size=1"], 2, "training.global_batch_size", "set it to 2"),
        (
            ["training.global_batch_size=8", "training.gradient_accumulation=2"],
            2,
            "training.gradient_accumulation",
            "= 4, but global_batch_size is 8",
        ),
        (
            [
                "training.micro_batch_size=auto",
                "training.global_batch_size=8",
                "training.gradient_accumulation=2",
            ],
            2,
            "training.micro_batch_size",
            "no gradient_accumulation",
        ),
        (["parallelism.replicate=4"], 3, "parallelism", "3 ranks ... replicate 4"),
    ],
)
def test_what_does_not_fit_the_ranks_is_found(
    overrides: list[str], num_ranks: int, key: str, words: str, load: Load
) -> None:
    problems = found(load(RUN, *overrides), num_ranks)
    assert list(problems) == [key]
    assert says(problems[key], words)


def test_the_setting_by_which_ranks_do_not_divide_is_named(load: Load) -> None:
    problems = found(load(RUN, "parallelism.tensor=2", "parallelism.replicate=3"), 4)
    assert says(problems["parallelism"], "4 ranks ... replicate 3 x tensor 2")
    assert "replicate" not in found(load(RUN, "parallelism.tensor=2"), 3)["parallelism"]


def test_a_fixed_shard_tells_the_batch_without_knowing_the_ranks(load: Load) -> None:
    assert "training.global_batch_size" in found(
        load(RUN, "parallelism.shard=2", "training.global_batch_size=9")
    )
    assert found(load(RUN, "training.global_batch_size=9")) == {}


def test_all_contradictions_come_in_one_error_with_their_lines(load: Load) -> None:
    text = RUN.replace("  init: random", "  init: random\n  lora: {rank: 4}").replace(
        "steps: 100", "schedule: {name: linear}"
    )
    config = load(text, "evaluation.metrics=[]")
    with pytest.raises(UserError) as caught:
        require_valid(config, 2)
    message = str(caught.value).splitlines()
    assert [line.split(": ")[:2] for line in message] == [
        ["run.yaml:5", "model.lora"],
        ["run.yaml:11", "training.steps"],
        ["--set evaluation.metrics=[]", "evaluation.metrics"],
    ]


def test_a_config_that_comes_from_no_file_is_reported_by_keys(load: Load) -> None:
    config = RunConfig.model_validate(load(RUN, "parallelism.tensor=2").model_dump())
    with pytest.raises(UserError, match=r"^parallelism\.tensor: "):
        require_valid(config)


def test_the_formats_columns_are_those_that_the_data_room_reads() -> None:
    for name, roles in ROLES.items():
        assert set(roles) == {*COLUMNS[name], *OPTIONAL_COLUMNS.get(name, ())}


def batch(micro: int, accumulation: int | None, total: int | None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "x",
            "model": {"id": "a/b"},
            "data": {"source": "a", "sequence_length": 8},
            "training": {
                "steps": 1,
                "optimizer": {"learning_rate": 1.0},
                "micro_batch_size": micro,
                "gradient_accumulation": accumulation,
                "global_batch_size": total,
            },
        }
    )


SIZES = st.integers(1, 40)


@given(micro=SIZES, ranks=SIZES, accumulation=SIZES)
def test_the_batch_is_the_same_however_it_is_written(
    micro: int, ranks: int, accumulation: int
) -> None:
    total = micro * ranks * accumulation
    for config in (
        batch(micro, accumulation, None),
        batch(micro, None, total),
        batch(micro, accumulation, total),
    ):
        assert resolve_accumulation(config, ranks) == accumulation
        assert resolve_global_batch(config, ranks) == total


@given(micro=SIZES, ranks=SIZES, total=st.integers(1, 4000))
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(
    micro: int, ranks: int, total: int
) -> None:
    if total % (micro * ranks) == 0:
        assert resolve_accumulation(batch(micro, None, total), ranks) * micro * ranks == total
        return
    with pytest.raises(UserError) as caught:
        resolve_accumulation(batch(micro, None, total), ranks)
    proposed, _, smaller = str(caught.value).rpartition("; ")[2].partition(",")
    for size in re.findall(r"\d+", proposed):
        resolve_accumulation(batch(micro, None, int(size)), ranks)
    assert bool(smaller) == (total % ranks == 0)
    if smaller:
        resolve_accumulation(batch(int(smaller.split()[-1]), None, total), ranks)


def test_without_any_wish_a_step_is_one_micro_batch() -> None:
    assert resolve_accumulation(batch(4, None, None), 8) == 1
    assert resolve_global_batch(batch(4, None, None), 8) == 32
