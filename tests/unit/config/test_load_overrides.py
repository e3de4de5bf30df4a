"""`--set a.b=c`: typed, applied in order, and reported like the file's own mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.facts import says

from .conftest import RUN, Load, Refuse


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [
            leaf
            for key, inner in value.items()
            for leaf in leaves(inner, f"{path}.{key}" if path else key)
        ]
    return [(path, value)]


@given(data=st.data())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=40,
)
def test_setting_any_values_that_a_config_has_gives_the_same_config(
    data: st.DataObject, load: Load
) -> None:
    config = load()
    every = leaves(config.model_dump(mode="json"))
    chosen = data.draw(st.lists(st.sampled_from(every), max_size=6))
    assert load(RUN, *(f"{key}={json.dumps(value)}" for key, value in chosen)) == config


@given(
    steps=st.integers(1, 10**9),
    rate=st.floats(1e-300, 1e300),
    name=st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z]", fullmatch=True),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=40,
)
def test_what_is_set_is_what_is_read(steps: int, rate: float, name: str, load: Load) -> None:
    config = load(
        RUN,
        f"training.steps={steps}",
        f"training.optimizer.learning_rate={rate!r}",
        f"name='{name}'",
    )
    assert (config.training.steps, config.training.optimizer.learning_rate, config.name) == (
        steps,
        rate,
        name,
    )


def test_values_are_typed_by_yaml(load: Load) -> None:
    config = load(
        RUN,
        "training.optimizer.learning_rate=2e-5",
        "training.compile=false",
        "training.gradient_clipping=null",
        "data.source=[a.jsonl,{path: b.jsonl, weight: 3}]",
        "data.format=text",
        'output="a=b.c"',
        "checkpoint.every_steps=5",
    )
    assert config.training.optimizer.learning_rate == 2e-5
    assert config.training.compile is False
    assert config.training.gradient_clipping is None
    sources = [getattr(source, "path", source) for source in config.data.source]
    assert [Path(source).name for source in sources] == ["a.jsonl", "b.jsonl"]
    assert config.output == "a=b.c"
    assert config.checkpoint.every_steps == 5


def test_entries_of_a_list_are_set_by_position_and_later_overrides_win(load: Load) -> None:
    config = load(
        RUN, "data.source=[{path: a},{path: b}]", "data.source.1.weight=2", "data.source.1.weight=4"
    )
    assert [source.weight for source in config.data.source] == [1.0, 4.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stps=3", "training.stps: ... 'steps'"),
        ("trainin.steps=3", "trainin: ... 'training'"),
        ("training.steps='3'", "training.steps: ... '3' ... > 0 ... null"),
        ("training.precision=fp23", "training.precision: ... 'fp23' ... 'bf16', 'fp8' ... 'fp64'"),
        ("name.x=1", "name.x: name ... 'small' ... name"),
        (
            "training.optimizer.betas={a: 1, a: 2}",
            "training.optimizer.betas.a: ... 1 ... 1",
        ),
    ],
)
def test_a_wrong_override_is_reported_like_a_wrong_line(
    override: str, message: str, refuse: Refuse
) -> None:
    assert says(refuse(RUN, override)[0], f"--set {override}: {message}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.source.2.weight=3", "data.source ... 2 ... 0 ... data.source.2"),
        ("data.source.path=x", "data.source ... data.source.0.path"),
    ],
)
def test_a_position_that_is_not_there_is_reported(
    override: str, message: str, refuse: Refuse
) -> None:
    assert says(refuse(RUN, "data.source=[a, b]", override)[0], message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("training..steps=3", "expected KEY=VALUE"),
        ("training.steps=", "training.steps=null"),
        ("training.steps=[1", "not valid YAML"),
    ],
)
def test_what_is_no_override_is_reported(override: str, message: str, refuse: Refuse) -> None:
    (line,) = refuse(RUN, override)
    assert line.startswith(f"--set {override}") and says(line, message)


def test_mistakes_of_the_file_come_before_those_of_overrides(refuse: Refuse) -> None:
    output = refuse(RUN.replace("precision: fp32", "precision: fp9"), "training.stps=3", "output=5")
    assert [line.split(": ")[0] for line in output] == [
        "run.yaml:12",
        "--set training.stps=3",
        "--set output=5",
    ]
