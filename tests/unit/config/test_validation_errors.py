"""Every way in which a value can be refused has a message of this program, never in pydantic's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from drillyard.config.cluster import ClusterConfig, find_setting
from drillyard.config.load import load_cluster_config, load_run_config
from drillyard.config.run import RunConfig, WorkloadRunConfig
from drillyard.config.run_checks import NOT_AVAILABLE
from drillyard.config.validation_errors import find_problems, pydantic_problems
from drillyard.errors import UserError

GOOD: dict[type[BaseModel], dict[str, Any]] = {
    RunConfig: {
        "name": "a",
        "model": {"id": "x"},
        "data": {"source": "a", "sequence_length": 8},
        "training": {"steps": 1, "optimizer": {"learning_rate": 1}},
    },
    ClusterConfig: {"name": "a", "platform": "local"},
    WorkloadRunConfig: {"name": "a", "workload": {"command": ["x"]}},
}
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    2**70,
    float("inf"),
    float("nan"),
    "",
    "x",
    "A B",
    "\ud800",
    "x" * 300,
    [],
    [None],
    ["x"],
    [0.5, 2],
    [0.9, 0.95, 0.1],
    {},
    {"x": 1},
    {"path": 1, "weight": -1},
    {"train": "x"},
    [{"y": 1}],
]
KINDS = {
    "missing",
    "extra_forbidden",
    "string_type",
    "int_type",
    "float_type",
    "bool_type",
    "list_type",
    "tuple_type",
    "dict_type",
    "model_type",
    "literal_error",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "string_pattern_mismatch",
    "too_short",
    "too_long",
    "finite_number",
    "json_invalid",
}
"""What pydantic can find wrong with our models; references to the environment are checked before
(value_error)."""


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        if not isinstance(part, str | int):
            yield from sections(part)


def keys(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """All settings, sections included, of a model."""
    for name, field in model.model_fields.items():
        yield (*path, name), field
        for section in sections(field.annotation):
            yield from keys(section, (*path, name))


def with_value(model: type[BaseModel], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    document = json.loads(json.dumps(GOOD[model]))
    here = document
    for name in path[:-1]:
        here[name] = here[name] if isinstance(here.get(name), dict) else {}
        here = here[name]
    here[path[-1]] = value
    return dict(document)


@pytest.mark.slow
def test_what_pydantic_refuses_is_reported_in_our_own_words() -> None:
    seen = set()
    for model in GOOD:
        validator = TypeAdapter(model)
        # One setting of each type is enough.
        for path in {
            repr((field.annotation, field.metadata)): path for path, field in keys(model)
        }.values():
            for value in ODD:
                document = with_value(model, path, value)
                try:
                    validator.validate_json(json.dumps(document), strict=True)
                except ValidationError as error:
                    seen |= {detail["type"] for detail in error.errors()}
                    theirs = {detail["msg"] for detail in error.errors()}
                    ours = [problem.message for problem in find_problems(model, document)]
                    assert ours and theirs.isdisjoint(ours), (model, path, value, theirs)
                    assert theirs.isdisjoint(
                        problem.message for problem in pydantic_problems(error)
                    )
    assert seen == KINDS


@pytest.mark.parametrize("model", list(GOOD))
def test_the_example_of_every_setting_that_must_be_there_is_allowed(model: type[BaseModel]) -> None:
    for path, field in keys(model):
        if field.is_required():
            assert field.examples, path
            TypeAdapter(field.annotation).validate_python(field.examples[0])


@pytest.mark.parametrize(
    ("section", "given", "allowed"),
    [
        ("parallelism", {"tensr": 2}, "shard, replicate"),
        ("parallelism", {"contxt": 2}, "shard, replicate"),
    ],
)
def test_no_setting_is_recommended_that_training_refuses(
    section: str, given: Any, allowed: str
) -> None:
    (problem,) = find_problems(RunConfig, {**GOOD[RunConfig], section: given})
    assert f"allowed: {allowed}" in problem.message and "did you mean" not in problem.message
    assert not {"tensor", "context"} & set(problem.message.replace(",", "").split())


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"model": {"id": "x", "lora": {"rank": 1, "alpa": 2}}}, "did you mean 'alpha'?"),
        ({"model": {"id": "x", "lroa": {}}}, "did you mean 'lora'?"),
        ({"model": {"id": "x", "rank": 8}}, "it belongs to 'model.lora'"),
        ({"lora_rank": 8}, "did you mean 'model.lora.rank'?"),
    ],
)
def test_keys_of_adapters_are_recommended(settings: dict[str, Any], meant: str) -> None:
    (problem,) = find_problems(RunConfig, {**GOOD[RunConfig], **settings})
    assert meant in problem.message


def test_descriptions_say_what_training_refuses() -> None:
    for key in NOT_AVAILABLE:
        field = find_setting(RunConfig, tuple(key.split(".")))
        assert field is not None and "training" in (field.description or "")


@pytest.mark.parametrize(
    ("load", "given", "names"),
    [
        (
            load_run_config,
            {"name": "a", "platform": "slurm", "nodes": 2},
            ("cluster config", "--cluster"),
        ),
        (load_cluster_config, GOOD[RunConfig], ("run config", "cluster config")),
        (load_run_config, GOOD[WorkloadRunConfig], ("drillyard launch",)),
    ],
)
def test_a_file_of_another_kind_is_recognised(
    tmp_path: Path, load: Any, given: Any, names: tuple[str, ...]
) -> None:
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump(given))
    with pytest.raises(UserError) as raised:
        load(path)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"{path}: is a") and all(name in line for name in names)
