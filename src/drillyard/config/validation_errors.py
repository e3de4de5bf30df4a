"""Explain to a user why a value does not fit a config model.

pydantic decides whether a config is valid; this module runs when it is not. It walks the model's
annotations along the value: a union is checked by the branch with the value's shape (a mapping is a
`SourceConfig`, a list is a list of sources), and an unknown key comes with the key that was
probably meant.
"""

from __future__ import annotations

import json
import math
import re
import types
import unicodedata
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from drillyard.allowed_values import Allowed
from drillyard.config.platforms import by_use, platforms
from drillyard.config.problems import Path, Problem, closest_name, dotted
from drillyard.config.run_checks import NOT_AVAILABLE
from drillyard.config.yaml_document import BOOLEANS, WrittenFloat, scalar

# What other trainers call our settings, where the spelling alone does not lead to ours.
_OTHER_NAMES = {
    "training.optimizer.learning_rate": "lr",
    "training.steps": "max_steps max_iters",
    "training.epochs": "num_train_epochs",
    "training.micro_batch_size": "per_device_train_batch_size batch_size",
    "training.gradient_accumulation": "gradient_accumulation_steps",
    "training.gradient_clipping": "max_grad_norm grad_clip",
    "training.activation_checkpointing": "gradient_checkpointing",
    "training.precision": "bf16 dtype torch_dtype",
    "training.schedule.warmup_steps": "warmup",
    "training.schedule.name": "lr_scheduler_type",
    "checkpoint.every_steps": "save_steps",
    "checkpoint.keep": "save_total_limit",
    "evaluation.every_steps": "eval_steps",
    "logging.every_steps": "logging_steps",
    "data.sequence_length": "max_seq_length seq_length seq_len block_size",
    "data.source": "dataset",
    "model.id": "model_name_or_path",
    "checkpoint.resume": "resume_from_checkpoint",
    "output": "output_dir",
    "model.attention": "attn_implementation",
    "parallelism": "gpus",
    "machine": "machine_type instance_type",
    "nodes": "node_count num_nodes count size replicas max_nodes",
    "consumption": "provisioning_model",
    "cluster.version": "kubernetes_version gke_version cluster_version min_master_version",
    "cluster.disk_gib": "disk_size_gb disk_size boot_disk_size_gb",
    "cluster.cpu_pool": "system_pool default_pool",
    "cluster.authorized_networks": "master_authorized_networks",
}
_OTHER_VALUES = {
    "preemptible": "spot",
    "dws": "flex-start-queued",
    "queued": "flex-start-queued",
    "reserved": "reservation",
    "dws-calendar": "calendar",
}
"""What others call our values."""
Settings = tuple[str, ...]
FOREIGN_NAMES = {name: setting for setting, names in _OTHER_NAMES.items() for name in names.split()}


def find_problems(model: type[BaseModel], value: Any) -> Iterator[Problem]:
    """Every reason why `value` (of a YAML document) is not a `model`."""
    return _walk(model, value, (), tuple(_offered(model, value)))


def _offered(model: type[BaseModel], value: Any) -> Iterator[str]:
    """The settings that an error may name: not those of another platform's section."""
    others: set[str] = set()
    name = str(value.get("platform")) if isinstance(value, dict) else ""
    if "platform" in model.model_fields and name in platforms():
        sections = {each: facts.section_key or each for each, facts in platforms().items()}
        others = {*sections.values()} - {sections[name]}
    return (each for each in _settings(model) if each.partition(".")[0] not in others)


def pydantic_problems(error: ValidationError) -> Iterator[Problem]:
    """The places where pydantic found problems, where `find_problems` finds none. Its messages are
    for programmers."""
    for detail in error.errors(include_url=False):
        yield Problem(
            tuple(detail["loc"]),
            f"found {describe_value(detail['input'])}, which is not allowed here",
        )


def option_problem(error: ValidationError) -> str:
    """Describe the error in a command-line option's value, which typer validates by pydantic from
    0.29 on."""
    detail = error.errors(include_url=False)[0]
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    number = next((words for prefix, words in _NUMBERS.items() if kind.startswith(prefix)), None)
    allowed = number or next(
        (f"{sign} {context[name]:g}" for name, sign in _SIGNS.items() if name in context), None
    )
    return f"found {describe_value(detail['input'])}" + (f"; allowed: {allowed}" if allowed else "")


_NUMBERS = {"int_": "a whole number", "float_": "a number", "bool_": "true or false"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _walk(annotation: Any, value: Any, path: Path, settings: Settings) -> Iterator[Problem]:
    bare = _bare(annotation)
    if _is_union(bare):
        yield from _union(annotation, value, path, settings)
    elif isinstance(bare, type) and issubclass(bare, BaseModel) and isinstance(value, dict):
        yield from _model(bare, value, path, settings)
    elif _is_sequence(bare) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(get_args(bare)[0], item, (*path, index), settings)
        yield from _shape(annotation, value, path)
    elif (
        get_origin(bare) is tuple and isinstance(value, list) and len(value) == len(get_args(bare))
    ):
        for index, (inner, item) in enumerate(zip(get_args(bare), value, strict=True)):
            yield from _walk(inner, item, (*path, index), settings)
    elif get_origin(bare) is dict and isinstance(value, dict):
        of_key, of_item = get_args(bare)
        for key, item in value.items():
            if not _fits(of_key, key):
                message = f"keys here are {describe(of_key)}{_correction(of_key, key)}"
                yield Problem((*path, key), message)
            yield from _walk(of_item, item, (*path, key), settings)
    elif annotation is Any and isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(Any, item, (*path, key), settings)
    elif not _fits(annotation, value):
        yield _mismatch(annotation, value, path)


def _model(
    model: type[BaseModel], value: dict[str, Any], path: Path, settings: Settings
) -> Iterator[Problem]:
    fields = model.model_fields
    mistyped = set()
    for key in value:
        if key not in fields:
            near = closest_name(key, fields)
            yield Problem(
                (*path, key),
                f"unknown key; {_meant(key, path, model, settings)}",
                depends_on=((*path, near),) if near is not None else (),
            )
            mistyped.add(near)
    for key, field in fields.items():
        if value.get(key, field) is None and field.is_required() and _is_model(field.annotation):
            yield Problem((*path, key), f"is empty{_what_to_write(key, field)}")
        elif key in value:
            yield from _walk(_annotation(field), value[key], (*path, key), settings)
        elif field.is_required() and key not in mistyped:
            yield Problem((*path, key), f"missing{_what_to_write(key, field)}")


def _what_to_write(key: str, field: FieldInfo) -> str:
    """Describe a missing setting: an example of it, else its description or its type."""
    if field.examples:
        example = yaml.safe_dump(
            {key: field.examples[0]}, default_flow_style=True, sort_keys=False
        ).strip()[1:-1]
        return f"; write for example `{example}`"
    if field.description:
        return f": {field.description}"
    if _is_model(field.annotation):
        return f"; a mapping with {_keys(_bare(field.annotation))}"
    return f"; allowed: {describe(_annotation(field))}"


def _meant(key: str, path: Path, model: type[BaseModel], settings: Settings) -> str:
    """Suggest a replacement for the unknown `key`: a similar key, the section that has it, or all
    keys."""
    prefix = dotted(tuple(part for part in path if isinstance(part, str)))
    if (alias := FOREIGN_NAMES.get(key.lower())) in settings:
        return f"did you mean '{alias.removeprefix(f'{prefix}.')}'?"
    if (plural := closest_name(key, model.model_fields, cutoff=0.95)) is not None:
        return f"did you mean '{plural}'?"
    elsewhere = [setting for setting in settings if setting.rpartition(".")[2] == key]
    if len(elsewhere) == 1 and not _is_refused(elsewhere[0]):
        return f"it belongs to '{elsewhere[0].rpartition('.')[0] or 'the top level'}'"
    allowed = [name for name in model.model_fields if f"{prefix}.{name}" not in NOT_AVAILABLE]
    if (here := closest_name(key, model.model_fields)) in allowed:
        return f"did you mean '{here}'?"
    # Within a section, a setting of another one must be more alike.
    words = [setting.rpartition(".")[2] for setting in settings]
    near = closest_name(key, words, cutoff=0.8 if prefix else 0.6)
    setting = next((setting for setting in settings if setting.rpartition(".")[2] == near), "")
    if here is None and setting and not _is_refused(setting):
        return f"did you mean '{setting}'?"
    return f"allowed: {', '.join(allowed)}"


def _is_refused(setting: str) -> bool:
    """Whether training refuses it, so that no error may recommend it."""
    return f"{setting}.".startswith(tuple(f"{key}." for key in NOT_AVAILABLE))


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings of a model, sections included."""
    for key, field in model.model_fields.items():
        yield prefix + key
        for member in (
            get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
        ):
            if _is_model(member):
                yield from _settings(member, f"{prefix}{key}.")


def _union(annotation: Any, value: Any, path: Path, settings: Settings) -> Iterator[Problem]:
    """Check the member that has the value's shape; all of them where none has it."""
    members = get_args(_bare(annotation))
    if isinstance(value, dict):
        fitting = [m for m in members if get_origin(_bare(m)) is dict or _is_model(m)]
    elif isinstance(value, list):
        fitting = [m for m in members if get_origin(_bare(m)) in (list, tuple)]
    else:
        fitting = []
    if len(fitting) == 1:
        yield from _walk(fitting[0], value, path, settings)
    elif not _fits(annotation, value):
        yield _mismatch(annotation, value, path)


def _shape(annotation: Any, value: list[Any], path: Path) -> Iterator[Problem]:
    """Constraints on a list as a whole, such as its least length."""
    least = max(
        (getattr(part, "min_length", 0) or 0 for part in _constraints(annotation)), default=0
    )
    if len(value) < least:
        yield Problem(path, f"found {describe_value(value)}; allowed: a list of at least {least}")


def _mismatch(annotation: Any, value: Any, path: Path) -> Problem:
    if value is None and _is_model(annotation):
        return Problem(
            path, f"is empty; give it settings ({_keys(_bare(annotation))}) or remove the key"
        )
    if annotation is Any:
        return Problem(path, f"found {describe_value(value)}; allowed: finite numbers")
    message = f"found {describe_value(value)}; allowed: {describe(annotation)}"
    choices = [choice for choice in _literals(annotation) if isinstance(choice, str)]
    if path == ("platform",):
        choices, estimated = by_use()
        message = f"found {describe_value(value)}; allowed: {describe(Literal[tuple(choices)])}"
        message += f"; without a launcher: {', '.join(estimated)}" if estimated else ""
    meant = closest_name(value, choices, cutoff=0.8) if isinstance(value, str) else None
    if isinstance(value, str) and _OTHER_VALUES.get(value.lower()) in choices:
        meant = _OTHER_VALUES[value.lower()]
    if meant is not None:
        message += f"; did you mean '{meant}'?"
    elif isinstance(value, float) and value.is_integer() and _fits(annotation, int(value)):
        message += f"; write {int(value)}"
    elif isinstance(value, bool) and path == ("checkpoint", "resume"):
        # yes, no, on and off are booleans in YAML too.
        message = (
            f"found {describe_value(value)}; allowed: auto, never, or the path of a checkpoint; "
        )
        message += f"did you mean '{'auto' if value else 'never'}'?"
    elif isinstance(value, bool | int | float):
        written = value.text if isinstance(value, WrittenFloat) else json.dumps(value)
        if _fits(annotation, written):
            message += f'; put it in quotes: "{written}"'
    elif isinstance(value, str) and value.lower() in BOOLEANS and _fits(annotation, True):
        message += f"; write {json.dumps(BOOLEANS[value.lower()])}, without quotes"
    elif isinstance(value, str) and _is_number(annotation, value.replace(",", "").strip()):
        message += f"; write {value.replace(',', '').strip()}, without quotes"
    elif isinstance(value, list) and len(value) == 1 and _fits(annotation, value[0]):
        message += f"; write {value[0]}"
    elif isinstance(value, str) and _fits(_list_of(annotation), [value]):
        message += f"; write [{value}]"
    elif isinstance(value, str):
        message += _correction(annotation, value)
    return Problem(path, message)


def _is_number(annotation: Any, text: str) -> bool:
    """Whether a quoted text is a number that the setting takes."""
    number = scalar(text)
    return isinstance(number, int | float) and _fits(annotation, number)


def _correction(annotation: Any, text: str) -> str:
    """`; write my-lab` where a text that a pattern refuses has a likely spelling."""
    members = get_args(_bare(annotation)) if _is_union(_bare(annotation)) else (annotation,)
    if not any(_words(each) for each in members):
        return ""
    likely = [text.strip(), text.lower(), text.removeprefix("gs://").strip("/")]
    likely += [text.removeprefix("v"), re.sub(r"(\.[x*])+$", "", text)]
    if any(part.is_name for each in members for part in _patterns(each)):
        plain = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
        word = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
        likely += [word[:length].rstrip("-") for length in (None, 63, 40)]
    for each in likely:
        if each != text and _fits(annotation, each):
            return f"; write {each}" if scalar(each) == each else f'; write "{each}"'
    return ""


def _words(annotation: Any) -> str:
    """What the pattern of an annotation allows, in words; empty: it has none."""
    return next((part.words for part in _patterns(annotation)), "")


def _patterns(annotation: Any) -> list[Allowed]:
    return [part for part in _constraints(annotation) if isinstance(part, Allowed)]


def _fits(annotation: Any, value: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    has_own_config = _is_model(annotation) or _is_union(_bare(annotation))
    config = None if has_own_config else ConfigDict(strict=True, allow_inf_nan=False)
    try:
        TypeAdapter(annotation, config=config).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    return True


def describe(annotation: Any) -> str:
    """Describe an annotation: `an integer > 0`, `'bf16', 'fp32' or 'fp64'`, `a mapping (rank,
    alpha) or null`."""
    bare = _bare(annotation)
    if words := _words(annotation):
        return words
    if _is_union(bare):
        members = get_args(bare)
        # Words of a pattern are a sentence, and null is what leaving the key out means.
        patterns = [each for each in members if _words(each)]
        return " or ".join(describe(each) for each in patterns or members)
    if get_origin(bare) is Literal:
        *most, last = [
            f"'{choice}'" if isinstance(choice, str) else json.dumps(choice)
            for choice in get_args(bare)
        ]
        return f"{', '.join(most)} or {last}" if most else last
    if _is_sequence(bare):
        return f"a list of ({describe(get_args(bare)[0])})"
    if get_origin(bare) is tuple:
        return (
            f"a list of {len(get_args(bare))}:"
            f" {', '.join(describe(inner) for inner in get_args(bare))}"
        )
    if _is_model(bare):
        return f"a mapping ({_keys(bare)})"
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        type(None): "null",
    }
    return names.get(bare, "a mapping") + _bounds(annotation)


def describe_value(value: Any) -> str:
    """Return the user's value as text, short enough for one line."""
    if isinstance(value, dict):
        keys = ", ".join(str(key) for key in list(value)[:4])
        return (
            f"a mapping ({keys}{', ...' if len(value) > 4 else ''})"
            if value
            else "an empty mapping"
        )
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:57]}...")
    return json.dumps(value)


def _bounds(annotation: Any) -> str:
    words = [
        f"{sign} {getattr(bound, attribute):g}"
        for bound in _constraints(annotation)
        for kind, (attribute, sign) in zip((Gt, Ge, Lt, Le), _SIGNS.items(), strict=True)
        if isinstance(bound, kind)
    ]
    return f" {' and '.join(words)}" if words else ""


def _annotation(field: FieldInfo) -> Any:
    """A field's annotation with the constraints that pydantic has moved to its metadata."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _constraints(annotation: Any) -> list[Any]:
    """The constraints of an Annotated, also those inside a `Field` of it."""
    parts = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return [constraint for part in parts for constraint in getattr(part, "metadata", [part])]


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _list_of(annotation: Any) -> Any:
    """The annotation itself, or the list among the members of a union."""
    bare = _bare(annotation)
    lists = [each for each in get_args(bare) if _is_sequence(_bare(each))]
    return _bare(lists[0]) if _is_union(bare) and lists else bare


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _is_sequence(annotation: Any) -> bool:
    """Whether it is a list, or a tuple of any length."""
    return get_origin(annotation) is list or get_args(annotation)[1:] == (...,)


def _is_model(annotation: Any) -> bool:
    bare = _bare(annotation)
    return isinstance(bare, type) and issubclass(bare, BaseModel)


def _literals(annotation: Any) -> list[Any]:
    bare = _bare(annotation)
    if _is_union(bare):
        return [choice for member in get_args(bare) for choice in _literals(member)]
    return list(get_args(bare)) if get_origin(bare) is Literal else []


def _keys(model: Any) -> str:
    return ", ".join(model.model_fields)
