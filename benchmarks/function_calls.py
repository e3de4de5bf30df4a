"""The judge of function calls on the BFCL: every reference passes, every damaged one fails in its
category.

    python benchmarks/function_calls.py DIRECTORY

DIRECTORY holds NAME.jsonl (id, question, function) and NAME_answers.jsonl (id, ground_truth) of
single-call categories of the Berkeley Function-Calling Leaderboard, such as simple_python and
multiple. Each reference is written in four notations. Joined rows (two questions, the functions and
calls of both, in the other order) must pass too. Exit code 1 if one verdict is wrong.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drillyard.data.call_syntax import FunctionCall
from drillyard.data.function_rows import function_calling_row, reference_call
from drillyard.evaluation.call_scoring import judge_calls

JOINED_ROWS = 200
Row = dict[str, Any]


def read_rows(directory: Path) -> list[Row]:
    """The rows of all files, with their accepted calls."""
    rows = []
    for answers in sorted(directory.glob("*_answers.jsonl")):
        truth = {
            row["id"]: row["ground_truth"]
            for row in map(json.loads, answers.read_text().splitlines())
        }
        questions = answers.with_name(answers.name.replace("_answers", ""))
        for number, line in enumerate(questions.read_text().splitlines(), 1):
            row = json.loads(line)
            row["ground_truth"] = truth[row["id"]]
            rows.append(function_calling_row(row, {}, f"{questions.name}, line {number}"))
    return rows


def as_json(call: FunctionCall) -> Row:
    return {"name": call.name, "arguments": call.arguments}


def tagged(calls: list[FunctionCall]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(as_json(call))}\n</tool_call>" for call in calls)


def as_python(calls: list[FunctionCall]) -> str:
    written = (
        f"{c.name}({', '.join(f'{name}={value!r}' for name, value in c.arguments.items())})"
        for c in calls
    )
    return f"[{', '.join(written)}]"


def notations(calls: list[FunctionCall]) -> Iterator[str]:
    """The calls as Hermes, Mistral, plain JSON and Python write them; Python only where the names
    allow it."""
    yield tagged(calls)
    yield f"[TOOL_CALLS] {json.dumps([as_json(call) for call in calls])}"
    yield json.dumps([{"name": call.name, "parameters": call.arguments} for call in calls])
    if all(name.isidentifier() for call in calls for name in call.arguments):
        yield as_python(calls)


def damaged(row: Row, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Wrong answers to a row of one call, each with the outcome that it must have."""
    call = reference_call(row["accepted"][0], row["tools"])
    schema = row["tools"][[tool["function"]["name"] for tool in row["tools"]].index(call.name)][
        "function"
    ]["parameters"]
    yield "wrong_name", tagged([FunctionCall(f"{call.name}_", call.arguments)])
    yield "wrong_count", "I cannot help with that."
    yield "wrong_count", tagged([call, call])
    yield "unparseable", tagged([call]).replace("}", "", 1)
    yield (
        "invented_parameter",
        tagged([FunctionCall(call.name, {**call.arguments, "not_a_parameter": 1})]),
    )
    if required := [name for name in schema.get("required", []) if name in call.arguments]:
        chosen = draw.choice(required)
        yield (
            "missing_parameter",
            tagged(
                [FunctionCall(call.name, {k: v for k, v in call.arguments.items() if k != chosen})]
            ),
        )
    for outcome, change in (("wrong_type", of_another_type), ("wrong_value", of_another_value)):
        names = [name for name in call.arguments if "type" in schema["properties"][name]]
        if names:
            changed = copy.deepcopy(call.arguments)
            chosen = draw.choice(names)
            changed[chosen] = change(changed[chosen])
            yield outcome, tagged([FunctionCall(call.name, changed)])


def of_another_type(value: Any) -> Any:
    """A number or other value as text, text as a number."""
    return 7 if isinstance(value, str) else json.dumps(value)


def of_another_value(value: Any) -> Any:
    """A value of the same type that no reference has."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1_000_003
    if isinstance(value, str):
        return f"{value} zzyzx"
    if isinstance(value, dict):
        return {**value, "zzyzx": 1}
    return [*value, of_another_value(value[0])] if value else ["zzyzx"]


def joined(rows: list[Row], draw: random.Random) -> Iterator[Row]:
    """Rows of two calls, made from two rows that share no function."""
    made = 0
    while made < JOINED_ROWS:
        first, second = draw.sample(rows, 2)
        names = [tool["function"]["name"] for row in (first, second) for tool in row["tools"]]
        if len(set(names)) == len(names):
            yield {
                "tools": first["tools"] + second["tools"],
                "accepted": first["accepted"] + second["accepted"],
            }
            made += 1


def main() -> int:
    """Print a table of kinds of answers with the numbers judged as they should be."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} DIRECTORY")
    rows, draw = read_rows(Path(sys.argv[1])), random.Random(0)
    if len(rows) < 2:
        sys.exit(f"{sys.argv[1]}: holds no rows: NAME.jsonl beside NAME_answers.jsonl")
    judged, right = Counter[str](), Counter[str]()

    def judge(kind: str, row: Row, text: str, outcome: str, name: str = "") -> None:
        verdict = judge_calls(row["tools"], row["accepted"], text)
        judged[kind] += 1
        right[kind] += verdict.outcome == outcome
        if verdict.outcome != outcome:
            print(
                f"{row.get('id', 'joined')}: {kind}: {verdict.outcome} instead of {outcome}"
                f" ({verdict.reason}): {text}"
            )

    for row in rows:
        for number, text in enumerate(
            notations([reference_call(call, row["tools"]) for call in row["accepted"]])
        ):
            judge(f"reference, notation {number + 1}", row, text, "correct")
        for outcome, text in damaged(row, draw):
            judge(f"damaged: {outcome}", row, text, outcome)
    for row in joined(rows, draw):
        calls = [reference_call(call, row["tools"]) for call in row["accepted"]]
        judge("joined, in order", row, tagged(calls), "correct")
        judge("joined, reversed", row, tagged(calls[::-1]), "correct")
        judge("joined, one call twice", row, tagged([calls[0], calls[0]]), "wrong_name")
        judge("joined, one call left out", row, tagged(calls[:1]), "wrong_count")
    for kind in judged:
        print(f"{kind:29} {right[kind]:5} of {judged[kind]:5}")
    return int(right != judged)


if __name__ == "__main__":
    sys.exit(main())
