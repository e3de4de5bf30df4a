"""Format function-calling through chat templates: the model's own calls where it has them, else
calls as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.chat_templates import FILES, plain
from tests.unit.data.test_function_rows import CALL, FUNCTION, GLAIVE, OPENAI, SHAREGPT
from transformers import AutoTokenizer

from drillyard.config.run import RunConfig
from drillyard.data.chat_template import ChatRenderer, chat_renderer
from drillyard.data.function_rows import question_of
from drillyard.data.mapped_sequences import IGNORED
from drillyard.data.prepared_data import prepare
from drillyard.data.row_formats import RowFormat
from drillyard.data.tokenizer import chat_template
from drillyard.errors import UserError
from drillyard.evaluation.evaluator import turn_end_tokens

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]
FORM = RowFormat("function-calling")
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif"
    " %}[{{ m.role }}] {{ m.content }};{% endfor %}{% if add_generation_prompt %}[assistant] {%"
    " endif %}"
)


def rendered(template: str, row: dict[str, Any], form: RowFormat = FORM) -> list[tuple[str, bool]]:
    (document,) = (
        chat_renderer(template, {"eos_token": "</s>"}, form)
        .render(form.canonical(row, "here"), "here")
        .documents
    )
    return document


def learnt(template: str, row: dict[str, Any]) -> list[str]:
    return [text for text, loss in rendered(template, row) if loss]


def test_a_template_that_knows_tools_writes_them_itself() -> None:
    row = FORM.canonical(OPENAI, "here")
    text = "".join(part for part, _ in rendered(FILES["qwen3"], OPENAI))
    assert text == AutoTemplate(FILES["qwen3"]).render(row["messages"], row["tools"])


class AutoTemplate:
    """A chat template as transformers applies it."""

    def __init__(self, template: str) -> None:
        self.template = template

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        result: Any = render_jinja_template([messages], tools=tools, chat_template=self.template)
        text: str = result[0][0]
        return text


def test_the_template_of_trained_tokenizers_writes_tools_and_calls() -> None:
    renderer = chat_renderer(chat_template(), {}, FORM)
    row = FORM.canonical(OPENAI, "here")
    (document,) = renderer.render(row, "here").documents
    text = "".join(part for part, _ in document)
    assert "\nweather(city: string) Weather of a city<|im_end|>" in text
    call = (
        '<tool_call>\n{"name": "weather", "arguments":'
        f" {json.dumps(CALL['arguments'])}}}\n</tool_call>"
    )
    assert [part for part, loss in document if loss] == [f"{call}<|im_end|>\n"]
    prompt = renderer.prompt({**row, "messages": question_of(row["messages"])}, "here")
    assert text == f"{prompt}{call}<|im_end|>\n"


@pytest.mark.parametrize("name", ["chatml", "zephyr", "qwen2", "phi3"])
def test_a_template_without_tools_gets_them_as_text(name: str) -> None:
    """As Qwen 2.5 and Hermes write them: signatures in <tools>, calls in <tool_call>, results in
    <tool_response>."""
    document = rendered(FILES[name], SHAREGPT)
    text = "".join(part for part, _ in document)
    assert f"<tools>\n{json.dumps({'type': 'function', 'function': FUNCTION})}\n</tools>" in text
    assert "<tool_response>\nclear\n</tool_response>" in text
    (answer,) = [part for part, loss in document if loss]
    assert answer.startswith(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>")
    assert "call00000" not in text


def test_tools_stand_before_the_first_message_where_the_template_refuses_a_system_message() -> None:
    document = rendered(
        NO_SYSTEM,
        {**OPENAI, "messages": [{"role": "system", "content": "Be brief."}, *OPENAI["messages"]]},
    )
    text = "".join(part for part, _ in document)
    assert text.startswith("[user] Be brief.\n\n# Tools")
    assert "</tool_call>\n\nWeather in Paris?;" in text
    assert [part for part, loss in document if loss] == [
        f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>;"
    ]


def test_a_conversation_without_tools_stays_as_it_is() -> None:
    row = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    }
    assert rendered(FILES["chatml"], row) == rendered(FILES["chatml"], row, RowFormat("chat"))


def test_both_turns_of_glaive_are_learnt() -> None:
    assert learnt(plain(FILES["chatml"]), GLAIVE) == [
        f"<tool_call>\n{json.dumps(CALL)}\n</tool_call><|im_end|>\n",
        "It is clear.<|im_end|>\n",
    ]


def test_the_end_of_a_turn_is_found_in_the_template() -> None:
    assert (
        ChatRenderer(FILES["llama3"], {"bos_token": "<s>"}, "completion").turn_end() == "<|eot_id|>"
    )
    assert ChatRenderer(FILES["chatml"], {}, "completion").turn_end() == "<|im_end|>\n"
    assert ChatRenderer("{{ raise_exception('no') }}", {}, "completion").turn_end() == ""


TEMPLATE_WITH_A_CALL_TOKEN = """\
{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{%- if message.tool_calls %} to={{ message.tool_calls[0].function.name }}<|message|>
{{- message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"""


def test_the_token_that_ends_a_call_ends_an_answer(chat_tokenizer: Callable[[str], Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer(FILES["chatml"]))
    added = ["<|start|>", "<|message|>", "<|call|>", "<|end|>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([*added, "<|im_end|>"], special_tokens=True)
    for template, text, ends in (
        (TEMPLATE_WITH_A_CALL_TOKEN, '"}<|call|>', {"<|call|>", "<|end|>"}),
        # One turn may have several calls.
        (FILES["qwen3"], '"}}\n</tool_call><|im_end|>\n', {"<|im_end|>"}),
        (FILES["chatml"], "", {"<|im_end|>"}),
    ):
        renderer = ChatRenderer(template, {}, "completion", writes_calls=True)
        assert renderer.call_end() == text
        found = turn_end_tokens(renderer, tokenizer)
        assert {tokenizer.convert_ids_to_tokens(token) for token in found} == ends


def test_a_trained_tokenizer_has_a_template_whose_tokens_end_turns(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    config = make_config(
        write_rows([OPENAI, GLAIVE]),
        format="function-calling",
        sequence_length=512,
        tokenizer={"train": "bpe", "vocab_size": 320},
    )
    prepared = prepare(config)
    batch = prepared.train.sources[0].read([0])
    text = prepared.tokenizer.decode(
        [token for token in batch.labels[0].tolist() if token != IGNORED]
    )
    assert text.count("<|im_end|>") == 3
    assert text.count('{"name": "weather", "arguments": {"city": "Paris"}}') == 2
    assert prepared.tokenizer.eos_token == "<|im_end|>"
    reloaded = AutoTokenizer.from_pretrained(prepared.text_tokenizer.origin)
    row = FORM.canonical(OPENAI, "here")
    text = reloaded.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    assert text == "".join(part for part, _ in rendered(chat_template(), OPENAI))


def test_a_row_whose_call_cannot_be_read_is_counted(
    make_config: MakeConfig, write_rows: WriteRows, chat_tokenizer: Callable[[str], Path]
) -> None:
    broken = {
        **GLAIVE,
        "chat": "USER: Hi\nASSISTANT: <functioncall> {<|endoftext|>\nUSER: So?\nASSISTANT: Well.",
    }
    config = make_config(
        write_rows([GLAIVE, broken]),
        format="function-calling",
        sequence_length=4096,
        tokenizer=str(chat_tokenizer(FILES["chatml"])),
    )
    report = prepare(config).report
    assert next(iter(report.parts.values()))["broken_call"] == 1
    assert any("1 of 2 rows" in note and "line 2" in note for note in report.notes)


def test_a_tool_that_is_no_schema_is_named_with_its_row(
    make_config: MakeConfig, write_rows: WriteRows, chat_tokenizer: Callable[[str], Path]
) -> None:
    bad = {
        **OPENAI,
        "tools": [{"name": "weather", "parameters": {"type": "object", "properties": 3}}],
    }
    config = make_config(
        write_rows([OPENAI, bad]),
        format="function-calling",
        tokenizer=str(chat_tokenizer(FILES["chatml"])),
        on_error="refuse",
    )
    with pytest.raises(UserError, match=r"data\.jsonl, line 2: tool weather: .*properties.*3"):
        prepare(config)
