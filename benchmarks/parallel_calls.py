"""The judge of several calls against brute force: 10,000 damaged answers must get the verdict and
the category that the best of all pairings gives.

    python benchmarks/parallel_calls.py DIRECTORY

DIRECTORY is that of `function_calls.py`. Two to four accepted calls come from its rows (the same
row may come twice, with other accepted values); an answer is their calls in any order, of which
none to three are damaged. Also printed: the seconds that the judge takes for them. Exit code 1 if
one verdict is another.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from function_calls import Row, read_rows
from tests.unit.evaluation import call_oracle

from drillyard.data.function_rows import reference_call
from drillyard.evaluation.call_scoring import judge_calls

ANSWERS = 10_000


def several(rows: list[Row], draw: random.Random) -> tuple[Row, list[call_oracle.Call]]:
    """A row of two to four calls, and its answer; half of the rows have the same function twice."""
    parts: list[Row] = []
    known: dict[str, Row] = {}
    for row in draw.sample(rows, len(rows)):
        own = {tool["function"]["name"]: tool for tool in row["tools"]}
        # Rows may have different functions of one name.
        if all(known.get(name, tool) == tool for name, tool in own.items()):
            parts, known = [*parts, row], known | own
        if len(parts) == 4:
            break
    parts = parts[: draw.randint(2, 4)]
    if draw.random() < 0.5:
        first = parts[0]
        parts[1] = {**first, "accepted": [changed(call, draw) for call in first["accepted"]]}
    tools = {tool["function"]["name"]: tool for row in parts for tool in row["tools"]}
    accepted = [call for row in parts for call in row["accepted"]]
    row = {"tools": list(tools.values()), "accepted": accepted}
    calls = [reference_call(call, row["tools"]) for call in accepted]
    return row, [(call.name, call.arguments) for call in calls]


def changed(call: Row, draw: random.Random) -> Row:
    """The accepted call with another value for some of its parameters."""
    arguments = {
        name: [call_oracle.of_another_value(choices[0])]
        if draw.random() < 0.5 and choices[0] != "" and isinstance(choices[0], str | int | float)
        else choices
        for name, choices in call["arguments"].items()
    }
    return {**call, "arguments": arguments}


def main() -> int:
    """Print how many answers of each category were judged alike."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} DIRECTORY")
    rows, draw = read_rows(Path(sys.argv[1])), random.Random(0)
    if len(rows) < 4:
        sys.exit(f"{sys.argv[1]}: holds no rows: NAME.jsonl beside NAME_answers.jsonl")
    judged, alike, seconds = Counter[str](), Counter[str](), 0.0
    for _ in range(ANSWERS):
        row, calls = several(rows, draw)
        answer = call_oracle.damage(calls, draw)
        text = json.dumps([{"name": name, "arguments": given} for name, given in answer])
        expected = call_oracle.category(row["tools"], row["accepted"], answer)
        start = perf_counter()
        verdict = judge_calls(row["tools"], row["accepted"], text)
        seconds += perf_counter() - start
        judged[expected] += 1
        alike[expected] += verdict.outcome == expected
        if verdict.outcome != expected:
            print(f"{verdict} instead of {expected}: {text} for {json.dumps(row['accepted'])}")
    for kind in sorted(judged):
        print(f"{kind:20} {alike[kind]:5} of {judged[kind]:5}")
    print(f"{seconds:.2f} s for {ANSWERS:,} answers")
    return int(alike != judged)


if __name__ == "__main__":
    sys.exit(main())
