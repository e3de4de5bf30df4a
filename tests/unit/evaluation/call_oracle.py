"""The judgement of several calls by brute force: every pairing is tried.

Written from the rules in the docstring of `call_scoring.py` alone; it shares no code with it.
"""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

Call = tuple[str, dict[str, Any]]
ORDER = ("wrong_name", "missing_parameter", "invented_parameter", "wrong_type", "wrong_value")


def category(tools: list[dict[str, Any]], accepted: list[dict[str, Any]], calls: list[Call]) -> str:
    """The outcome of an answer that can be read."""
    if len(calls) != len(accepted):
        return "wrong_count"
    parameters = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    best: list[str] | None = None
    for chosen in itertools.permutations(calls):
        wrong = [
            how
            for want, call in zip(accepted, chosen, strict=True)
            if (how := of_pair(parameters.get(want["name"], {}), want, call)) != "correct"
        ]
        key = [len(wrong), *(wrong.count(each) for each in ORDER)]
        if best is None or key < [len(best), *(best.count(each) for each in ORDER)]:
            best = wrong
    assert best is not None
    return next((each for each in ORDER if each in best), "correct")


def of_pair(schema: dict[str, Any], want: dict[str, Any], call: Call) -> str:
    name, given = call
    choices, optional = want["arguments"], not want.get("exact")
    if name != want["name"]:
        return "wrong_name"
    needed = set(schema.get("required", [])) | {
        key for key, values in choices.items() if not (optional and "" in values)
    }
    if needed - given.keys():
        return "missing_parameter"
    if given.keys() - choices.keys():
        return "invented_parameter"
    properties = schema.get("properties", {})
    if any(not typed(v, properties.get(k, {}), choices[k], optional) for k, v in given.items()):
        return "wrong_type"
    if any(not any(same(v, each, optional) for each in choices[k]) for k, v in given.items()):
        return "wrong_value"
    return "correct"


def typed(value: Any, schema: dict[str, Any], choices: list[Any], optional: bool) -> bool:
    others = {type(e) for e in choices if not (optional and e == "") and not has_type(e, schema)}
    return has_type(value, schema) or type(value) in others


def has_type(value: Any, schema: dict[str, Any]) -> bool:
    kinds = {
        "string": "str",
        "integer": "int",
        "number": "int float",
        "boolean": "bool",
        "array": "list",
        "object": "dict",
    }
    wanted = kinds.get(schema.get("type", ""))
    if wanted is not None and type(value).__name__ not in wanted.split():
        return False
    return not isinstance(value, list) or all(has_type(v, schema.get("items", {})) for v in value)


def same(value: Any, choice: Any, optional: bool) -> bool:
    if isinstance(value, str) and isinstance(choice, str):
        left, right = (
            re.sub(r"[ ,./_*^-]", "", text).lower().replace("'", '"') for text in (value, choice)
        )
        return left == right
    if isinstance(value, list) and isinstance(choice, list):
        return len(value) == len(choice) and all(
            same(a, b, optional) for a, b in zip(value, choice, strict=True)
        )
    if isinstance(value, dict) and isinstance(choice, dict):
        return set(value) <= set(choice) and all(
            any(same(value[k], each, optional) for each in values)
            if k in value
            else optional and "" in values
            for k, values in choice.items()
        )
    return (type(value) is bool) == (type(choice) is bool) and value == choice


def damage(calls: list[Call], draw: random.Random) -> list[Call]:
    """The calls in another order, and none to three of them changed."""
    changed = [(name, dict(arguments)) for name, arguments in calls]
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        place = draw.randrange(len(changed))
        name, arguments = changed[place]
        key = draw.choice(sorted(arguments)) if arguments else None
        kind = draw.choice(("name", "drop", "invent", "type", "value", "copy", "other", "count"))
        if kind == "name":
            changed[place] = (draw.choice([f"{name}_", *(other for other, _ in calls)]), arguments)
        elif kind == "invent":
            arguments[draw.choice(["zzyzx", *(k for _, a in calls for k in a)])] = 1
        elif kind == "copy":
            other, same_arguments = draw.choice(calls)
            changed[place] = (other, dict(same_arguments))
        elif kind == "count" and draw.random() < 0.3:
            changed.append((name, dict(arguments)))
        elif key is not None and kind == "drop":
            del arguments[key]
        elif key is not None and kind == "type":
            arguments[key] = 7 if isinstance(arguments[key], str) else str(arguments[key])
        elif key is not None and kind == "value":
            arguments[key] = of_another_value(arguments[key])
        elif key is not None and kind == "other":
            arguments[key] = draw.choice([arguments[key], *(a[key] for _, a in calls if key in a)])
    draw.shuffle(changed)
    return changed


def of_another_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1_000_003
    if isinstance(value, str):
        return f"{value} zzyzx"
    return {**value, "zzyzx": 1} if isinstance(value, dict) else [*value, *value, "zzyzx"]
