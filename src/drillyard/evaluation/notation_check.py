"""Whether the judge can read the calls that a model's own chat template writes.

A right answer is what the template renders for an accepted call. It is rendered, cut where
generation would end, and judged like an answer. If it is not `correct`, every figure about calls
says nothing of the model, so this is found out before anything is generated.
"""

from __future__ import annotations

from collections.abc import Callable

from drillyard.data.chat_template import ChatRenderer
from drillyard.data.function_rows import question_of
from drillyard.data.raw_batches import Row
from drillyard.errors import UserError
from drillyard.evaluation.call_scoring import judge_calls

_ARGUMENTS = {"city": "Paris", "days": 3, "units": ["C", "mm"], "cached": True}
_TYPES = {"city": "string", "days": "integer", "units": "array", "cached": "boolean"}
_PROBE: Row = {
    "messages": [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call00000",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": _ARGUMENTS},
                }
            ],
        },
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Weather of a city",
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": kind, "description": name} for name, kind in _TYPES.items()
                    },
                    "required": ["city"],
                },
            },
        }
    ],
    "accepted": [
        {
            "name": "get_weather",
            "arguments": {name: [value] for name, value in _ARGUMENTS.items()},
            "exact": True,
        }
    ],
}


AsGenerated = Callable[[str], str]
"""From the text that a model writes to what is decoded as its answer."""


def template_problem(renderer: ChatRenderer, as_generated: AsGenerated) -> str:
    """Why no call of this template can be judged; empty if an example is read as it was meant."""
    return _problem(renderer, _PROBE, as_generated, "an example")


def require_readable(
    renderer: ChatRenderer, rows: list[Row], part: str, as_generated: AsGenerated
) -> str:
    """UserError if no row's accepted calls are judged as correct when the template writes them; a
    warning if some are not, else an empty text."""
    calling = [row for row in rows if row["accepted"]]
    problems = [
        problem for row in calling if (problem := _problem(renderer, row, as_generated, part))
    ]
    if not problems:
        return ""
    found = (
        f"{part}: {len(problems):,} of {len(calling):,} rows have calls that the judge cannot read"
        f" as the model's own chat template writes them; the first: {problems[0]}"
    )
    if len(problems) < len(calling):
        return found
    raise UserError(
        f"{found}. Right answers would count as wrong. Set data.tokenizer to one whose template"
        " writes calls in a notation that docs/data.md lists, or take function-call out of"
        " evaluation.metrics."
    )


def _problem(renderer: ChatRenderer, row: Row, as_generated: AsGenerated, where: str) -> str:
    """Why the template's own rendering of a row's calls is not judged as correct; empty if it is,
    or where the row has no call."""
    asked = question_of(row["messages"])
    if len(asked) == len(row["messages"]) or not row["accepted"]:
        return ""
    turn = {**row, "messages": row["messages"][: len(asked) + 1]}
    try:
        prompt = renderer.prompt({**row, "messages": asked}, where)
        documents = renderer.render(turn, where).documents
    except UserError as error:
        return str(error)
    if not documents:
        return ""
    text = "".join(part for part, _ in documents[-1])
    learnt = [part for part, is_learnt in documents[-1] if is_learnt and part]
    # Some templates begin a turn in another way than their generation prompt.
    answer = text.removeprefix(prompt) if text.startswith(prompt) else learnt[-1]
    answer = as_generated(answer).strip()
    verdict = judge_calls(row["tools"] or [], row["accepted"], answer)
    if verdict.outcome in ("correct", "unjudged"):
        return ""
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"the judge reads {_shown(answer)} as {verdict.outcome}{reason}"


def _shown(text: str) -> str:
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= 160 else f"{shown[:157]}...")
