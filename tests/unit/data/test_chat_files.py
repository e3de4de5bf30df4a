"""The same chat rows give the same tokens and masks from every kind of file, and what a row cannot
say is refused."""

from __future__ import annotations

import csv
import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.facts import says
from tests.unit.data.chat_templates import QWEN3

from drillyard.config.run import RunConfig
from drillyard.data.prepared_data import prepare
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    tool("add", x={"type": "integer"}),
    tool("weather", city={"type": "string", "description": "where"}),
]
ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "Add one."},
            {"role": "assistant", "content": None, "tool_calls": [call("add", {"x": 1})]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Two ✓"},
        ],
        "tools": TOOLS,
    },
    {
        "messages": [
            {"role": "user", "content": "And the weather?"},
            {"role": "assistant", "content": "", "tool_calls": [call("weather", {"city": "Bern"})]},
            {"role": "tool", "content": "Sunny"},
            {"role": "assistant", "content": "It is sunny.", "weight": 1},
            {"role": "user", "content": "Really?"},
            {"role": "assistant", "content": "So it is.", "weight": 0},
        ],
        "tools": TOOLS[1:],
    },
    {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        "tools": None,
    },
    {
        "messages": [
            {"role": "user", "content": "None?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call("weather", {"city": None, "x": 3})],
            },
        ],
        "tools": TOOLS,
    },
]


Rendered = Callable[..., str]


@pytest.fixture
def rendered(
    make_config: MakeConfig, write_rows: Any, chat_tokenizer: Callable[[str], Path]
) -> Rendered:
    """The text of all documents that one row becomes under a template."""

    def render(template: str, row: dict[str, Any], loss_on: str = "completion") -> str:
        settings = {
            "format": "chat",
            "tokenizer": str(chat_tokenizer(template)),
            "loss_on": loss_on,
            "packing": False,
        }
        data = prepare(make_config(write_rows([row]), sequence_length=512, **settings))
        batch = data.train.sources[0].read(range(len(data.train.sources[0])))
        return str(data.tokenizer.decode(batch.input_ids[batch.document_ids >= 0]))

    return render


def write_csv(rows: list[dict[str, Any]], path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "tools"])
        writer.writeheader()
        for row in rows:
            tools = row.get("tools")
            writer.writerow(
                {
                    "messages": json.dumps(row["messages"]),
                    "tools": "" if tools is None else json.dumps(tools),
                }
            )
    return path


def write_parquet(rows: list[dict[str, Any]], path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_data_set(rows: list[dict[str, Any]], path: Path) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def write_json_data_set(rows: list[dict[str, Any]], path: Path) -> Path:
    features = datasets.Features(
        {"messages": datasets.List(datasets.Json()), "tools": datasets.Json()}
    )
    datasets.Dataset.from_list(rows, features=features).save_to_disk(path)
    return path


def write_text_columns(rows: list[dict[str, Any]], path: Path) -> Path:
    text = [
        {key: None if value is None else json.dumps(value) for key, value in row.items()}
        for row in rows
    ]
    return write_parquet(text, path)


def write_text_arguments(rows: list[dict[str, Any]], path: Path) -> Path:
    """Arguments as JSON text, as OpenAI writes them."""
    changed = json.loads(json.dumps(rows))
    for message in (message for row in changed for message in row["messages"]):
        for called in message.get("tool_calls") or []:
            arguments = called["function"]["arguments"]
            called["function"]["arguments"] = json.dumps(
                {k: v for k, v in arguments.items() if v is not None}
            )
    return write_parquet(changed, path)


def write_other_key_order(rows: list[dict[str, Any]], path: Path) -> Path:
    """Arrow keeps one order of keys for all rows, whatever a file had."""
    changed = [
        {**row, "messages": [dict(reversed(message.items())) for message in row["messages"]]}
        for row in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "name", "fraction"),
    [
        (write_csv, "rows.csv", 0.5),
        (write_parquet, "rows.parquet", 0.5),
        (write_data_set, "saved", 0.5),
        (write_json_data_set, "saved-json", 0.5),
        (write_text_columns, "rows.parquet", 0.5),
        (write_text_arguments, "rows.parquet", 0.5),
        (write_other_key_order, "rows.jsonl", 0.5),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_same_rows_give_the_same_tokens_masks_and_parts_from_every_kind_of_file(
    write: Any,
    name: str,
    fraction: float,
    make_config: MakeConfig,
    write_rows: Any,
    chat_tokenizer: Path,
    tmp_path: Path,
) -> None:
    rows = [
        {
            **row,
            "messages": [
                {"role": "user", "content": f"{n}: {row['messages'][0]['content']}"},
                *row["messages"][1:],
            ],
        }
        for n in range(8)
        for row in ROWS
    ]
    settings: dict[str, Any] = {
        "format": "chat",
        "tokenizer": str(chat_tokenizer(QWEN3)),
        "sequence_length": 512,
    }
    settings["held_out"] = {"fraction": fraction}
    expected = prepare(make_config(write_rows(rows), **settings))
    found = prepare(make_config(write(rows, tmp_path / name), **settings))
    parts = [(expected.train.sources[0], found.train.sources[0])]
    if fraction:
        parts += list(zip(expected.held_out.values(), found.held_out.values(), strict=True))
    for mine, theirs in parts:
        assert len(mine) == len(theirs)
        one, other = mine.read(range(len(mine))), theirs.read(range(len(theirs)))
        assert np.array_equal(one.input_ids, other.input_ids)
        assert np.array_equal(one.labels, other.labels)
    text = found.tokenizer.decode(
        found.train.sources[0].read(range(len(found.train.sources[0]))).input_ids.ravel()
    )
    assert "null" not in text
    assert "None" not in text.replace("None?", "")


def test_messages_of_the_assistant_in_a_row_are_learnt_or_refused_with_what_to_do(
    rendered: Rendered,
) -> None:
    messages = [
        {"role": "user", "content": "?"},
        *({"role": "assistant", "content": text} for text in "ab"),
    ]
    assert rendered(CHATML, {"messages": messages}) == "<user>?;<assistant>a;<assistant>b;"
    with pytest.raises(UserError, match=r"message 3.*Join it"):
        rendered(QWEN3, {"messages": messages})
    assert rendered(QWEN3, {"messages": messages}, "all").count("<|im_start|>") == 3


def test_a_null_argument_is_kept_where_the_arguments_are_json_text(rendered: Rendered) -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call("f", '{"city":null}')]},
    ]
    assert '{"name": "f", "arguments": {"city": null}}' in rendered(QWEN3, {"messages": messages})


TEXT_ARGUMENTS = (
    "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}{{ c.function.name }}:"
    "%s{% endfor %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("form", ["{{ c.function.arguments }}", "{{ 'a' + c.function.arguments }}"])
@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_a_template_that_prints_arguments_as_text_gets_json(
    form: str, arguments: Any, rendered: Rendered
) -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call("f", arguments)]},
    ]
    text = rendered(TEXT_ARGUMENTS.replace("%s", form), {"messages": messages})
    assert '{"x": 1}' in text
    assert "None" not in text


def test_a_template_that_asks_whether_content_is_null_gets_a_null(rendered: Rendered) -> None:
    """In the manner of DeepSeek V3, which writes calls only where content is null."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and m['content'] is none %}calls {{"
        " m.tool_calls[0].name }}{% else %}{{ '[' + m.role + ']' + m['content'] }}{% endif %}{%"
        " endfor %}"
    )
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
    ]
    assert rendered(template, {"messages": messages}) == "[user]?calls f"


PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
]


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",
        "{{ '' + m.content }}",
        "{% if m.content is string %}{{ m.content }}{% endif %}",
        (
            "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{%"
            " endfor %}"
        ),
    ],
)
def test_text_parts_are_what_the_template_takes(content: str, rendered: Rendered) -> None:
    template = "{% for m in messages %}[{{ m.role }}]" + content + "{% endfor %}"
    assert rendered(template, {"messages": PARTS}) == "[user]Hi you[assistant]Hello"


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
RESULT = [
    {"role": "user", "content": "?"},
    {"role": "tool", "content": {"a": [1, None], "b": True}},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if m.content is string %}{{ m.content }}{% endif %}", '{"a": [1, null], "b": true}'),
        ("{{ m.content }}", '{"a": [1, null], "b": true}'),
        (
            "{{ m.content | tojson if m.content is mapping else m.content }}",
            '{"a": [1, null], "b": true}',
        ),
    ],
)
def test_a_tool_s_result_that_is_no_text_is_never_left_out(
    template: str, expected: str, rendered: Rendered
) -> None:
    """Qwen3's template renders content that is not a string as nothing."""
    whole = "{% for m in messages %}[{{ m.role }}]" + template + "{% endfor %}"
    messages = [*RESULT, {"role": "assistant", "content": "ok"}]
    assert rendered(whole, {"messages": messages}) == f"[user]?[tool]{expected}[assistant]ok"
    numbers = [
        messages[0],
        {"role": "tool", "content": 5},
        {"role": "tool", "content": []},
        messages[2],
    ]
    assert rendered(whole, {"messages": numbers}) == "[user]?[tool]5[tool][][assistant]ok"


def test_short_text_parts_that_a_template_leaves_out_are_joined(rendered: Rendered) -> None:
    """The words stand in what Qwen3's template writes around every turn, even when it leaves out
    the content."""
    parts = [[{"type": "text", "text": text}] for text in ("im", "a")]
    messages = [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant"), parts, strict=True)
    ]
    text = rendered(QWEN3, {"messages": messages})
    assert text.startswith("<|im_start|>user\nim<|im_end|>\n")
    assert text.endswith("</think>\n\na<|im_end|>\n")


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ 10.0 ** 400 }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"],
)
def test_whatever_a_template_raises_is_an_error_of_the_row_or_the_template(
    template: str, rendered: Rendered
) -> None:
    with pytest.raises(UserError, match=r"line 1: .*chat template"):
        rendered(template, {"messages": PARTS})


def test_values_that_json_does_not_have(
    make_config: MakeConfig, chat_tokenizer: Any, tmp_path: Path
) -> None:
    """Arrow has dates; a message may carry one, a call's arguments may not."""
    calls = [{"role": "assistant", "tool_calls": [call("f", {"x": 1})], "at": dt.date(2026, 1, 2)}]
    messages = [{"role": "user", "content": "?", "at": dt.date(2026, 1, 1)}, *calls]
    settings = {"format": "chat", "tokenizer": str(chat_tokenizer(QWEN3)), "sequence_length": 512}
    path = write_parquet([{"messages": messages}], tmp_path / "rows.parquet")
    assert len(prepare(make_config(path, **settings)).train.sources[0]) == 1
    calls[0]["tool_calls"] = [call("f", {"x": dt.date(2026, 1, 2)})]
    path = write_parquet([{"messages": messages}], tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"row 1: message 2.*JSON"):
        prepare(make_config(path, **settings))


def test_invalid_json_in_a_json_column(
    make_config: MakeConfig, chat_tokenizer: Any, tmp_path: Path
) -> None:
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{bad"]))
    pq.write_table(pa.table({"messages": column}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"row 1: .*JSON column"):
        prepare(
            make_config(
                tmp_path / "rows.parquet", format="chat", tokenizer=str(chat_tokenizer(CHATML))
            )
        )


def test_each_row_is_read_from_the_column_that_it_has(rendered: Rendered) -> None:
    """Rows with `messages` and rows with `conversations` share a Parquet file, which fills the
    other with null."""
    messages = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert (
        rendered(CHATML, {"messages": None, "conversations": messages})
        == "<user>Hi;<assistant>Hello;"
    )


def test_empty_text_for_tool_calls_is_none(rendered: Rendered) -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "a", "tool_calls": ""},
    ]
    assert rendered(CHATML, {"messages": messages}) == "<user>?;<assistant>a;"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "image_url",
        ),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "content of message 1"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
            "message 1 has weight 0.5",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": "0"}]},
            "message 1 has weight '0'",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "no content ... tool_calls"),
        ({"messages": [{"role": "assistant", "content": []}]}, "no content ... tool_calls"),
        (
            {"messages": [{"role": "user", "text": "Hi"}, PARTS[1]]},
            "message 1 ... user ... content",
        ),
        (
            {"messages": [{"role": "user", "content": []}, PARTS[1]]},
            "message 1 ... user ... content",
        ),
        ({"messages": "[{"}, "messages: ... JSON text"),
        ({"messages": PARTS, "tools": "[{"}, "tools: ... JSON text"),
        ({"messages": PARTS, "tools": "f(x)"}, "tools: ... JSON text"),
        ({"messages": PARTS, "tools": '{"name": "f"}'}, "'tools' ... list"),
        ({"messages": PARTS, "tools": [1]}, "'tools' ... list"),
        (
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "tool_calls": [{"name": "f"}]},
                ]
            },
            "tool calls of message 2",
        ),
    ],
)
def test_an_invalid_row_is_refused_with_its_place(
    row: dict[str, Any], words: str, rendered: Rendered
) -> None:
    with pytest.raises(UserError) as error:
        rendered(CHATML, row)
    assert "data.jsonl, line 1: " in str(error.value)
    assert says(str(error.value), words)


@pytest.mark.parametrize(
    "names", [("human", "gpt"), ("human", "bot"), ("User", "Assistant"), ("prompter", "assistant")]
)
@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_roles_of_other_tools_are_known(
    names: tuple[str, str], keys: tuple[str, str], column: str, rendered: Rendered
) -> None:
    messages = [{keys[0]: name, keys[1]: "Hi"} for name in names]
    assert rendered(CHATML, {column: messages}) == "<user>Hi;<assistant>Hi;"
    filled = [
        {"role": None, "content": None, "from": None, "value": None, **message}
        for message in messages
    ]
    assert rendered(CHATML, {column: filled}) == "<user>Hi;<assistant>Hi;"
    assert (
        rendered(CHATML, {column: [json.dumps(message) for message in messages]})
        == "<user>Hi;<assistant>Hi;"
    )
