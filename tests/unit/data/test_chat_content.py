"""Nothing that a conversation says is lost in silence: roles, system columns, thoughts, results,
and turns found by their place. Templates are in the manner of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.chat_templates import FILES, QWEN3, plain
from tests.unit.data.test_chat_template import CHATML, TALK

from drillyard.config.run import RunConfig
from drillyard.data.chat_template import ChatRenderer, RenderedChat, chat_renderer
from drillyard.data.prepared_data import prepare
from drillyard.data.row_formats import RowFormat
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]

ASK = {"role": "user", "content": "Where is the lake?"}
ANSWER = {"role": "assistant", "content": "Behind the hill."}
THOUGHT = "Hills hide lakes."
CALL = {"type": "function", "function": {"name": "find_lake", "arguments": {"near": "Thun"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "find_lake",
        "parameters": {"type": "object", "properties": {"near": {"type": "string"}}},
    },
}
ROLE_TAGS = "{% for m in messages %}[{{ m.role }}]"
END = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def rendered(
    template: str, messages: Any, loss_on: str = "completion", **columns: Any
) -> RenderedChat:
    row = RowFormat("chat").canonical({"messages": messages, **columns}, "here")
    return ChatRenderer(template, {"eos_token": "</s>"}, loss_on).render(row, "here")


def text_of(found: RenderedChat) -> str:
    return "".join(text for document in found.documents for text, _ in document)


def learnt(found: RenderedChat) -> list[list[str]]:
    return [[text for text, loss in document if loss] for document in found.documents]


LLAMA_FACTORY: dict[str, Any] = {
    "conversations": [
        {"from": "human", "value": "How deep is it?"},
        {"from": "function_call", "value": '{"name": "find_lake", "arguments": {"near": "Thun"}}'},
        {"from": "observation", "value": '{"metres": 217}'},
        {"from": "gpt", "value": "It is 217 metres deep."},
    ],
    "system": "Be exact.",
    "tools": json.dumps([TOOL["function"]]),
}


@pytest.mark.parametrize("name", ["chat", "function-calling"])
def test_roles_and_the_system_column_of_llama_factory_are_rendered(name: str) -> None:
    form = RowFormat(name)
    found = chat_renderer(QWEN3, {}, form).render(form.canonical(LLAMA_FACTORY, "here"), "here")
    text = text_of(found)
    assert "<|im_start|>system\nBe exact." in text
    assert '{"name": "find_lake", "arguments": {"near": "Thun"}}' in learnt(found)[0][0]
    assert '<tool_response>\n{"metres": 217}\n</tool_response>' in text
    assert "It is 217 metres deep." in learnt(found)[-1][-1]
    assert not [count for count in found.counts if count.startswith("not_rendered")]


def test_calls_that_follow_each_other_are_one_turn() -> None:
    calls = [
        {"role": "tool_call", "content": json.dumps({"name": name, "arguments": {"near": "x"}})}
        for name in ("find_lake", "find_hill")
    ]
    results = [{"role": "tool_response", "content": text} for text in ("here", "there")]
    found = rendered(QWEN3, [ASK, *calls, *results, ANSWER])
    turn = learnt(found)[0][0]
    assert turn.count("<tool_call>") == 2
    row = RowFormat("chat").canonical({"messages": [ASK, *calls, *results, ANSWER]}, "here")
    ids = [call["id"] for call in row["messages"][1]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in row["messages"][2:4]]


def test_a_call_that_cannot_be_read_is_not_learnt_in_a_chat() -> None:
    broken = [ASK, {"role": "function_call", "content": '{"name": '}, ANSWER]
    found = rendered(CHATML, [*broken[:2], ASK, ANSWER])
    assert found.counts == ["broken_call"]
    assert learnt(found) == [["Behind the hill.<|im_end|>\n"]]


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_a_system_column_is_the_first_message(column: str) -> None:
    for name in ("chat", "function-calling"):
        form = RowFormat(name)
        row = form.canonical({column: [ASK, ANSWER], "system": "Be brief."}, "here")
        assert row["messages"][0] == {"role": "system", "content": "Be brief."}
        again = form.canonical({column: row["messages"], "system": "Be brief."}, "here")
        assert len(again["messages"]) == 3
        for nothing in (None, "", " "):
            assert len(form.canonical({column: [ASK], "system": nothing}, "here")["messages"]) == 1
        with pytest.raises(UserError, match="'system'"):
            form.canonical({column: [ASK], "system": ["a"]}, "here")
    mapped = RowFormat("chat", {"system": "persona", "messages": column})
    row = mapped.canonical({column: [ASK], "persona": "A pirate."}, "here")
    assert row["messages"][0]["content"] == "A pirate."


def test_a_system_column_stands_beside_a_system_message() -> None:
    messages = [{"role": "system", "content": "Use metres."}, ASK, ANSWER]
    found = rendered(CHATML, messages, system="Be brief.")
    assert "Be brief." in text_of(found) and "Use metres." in text_of(found)
    first_alone = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]"
        "{{ m.content }}{% endif %}" + END
    )
    found = rendered(first_alone, messages, system="Be brief.")
    assert text_of(found).startswith("[system]Be brief.\n\nUse metres.[user]")
    assert found.counts == []


def test_a_role_that_nobody_knows_is_refused_and_one_of_the_template_is_not() -> None:
    messages = [{"role": "narrator", "content": "It rains."}, ASK, ANSWER]
    with pytest.raises(UserError, match=r"message 1 .*'narrator'"):
        rendered(CHATML, messages)
    known = (
        "{% for m in messages %}{% if m.role == 'narrator' %}* {% endif %}[{{ m.role }}]"
        "{{ m.content }};" + END
    )
    assert text_of(rendered(known, messages)).startswith("* [narrator]It rains.")


# Templates of their own that leave something out, and what they leave out.
ONLY_CONTENT = ROLE_TAGS + "{{ m.content or '' }};" + END
ONLY_FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and loop.first %}<{{ m.content }}>"
    "{% elif m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }};{% endif %}" + END
)
CALLS_OR_CONTENT = (
    ROLE_TAGS + "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %};" + END
)
WITHOUT_THOUGHTS = (
    ROLE_TAGS + "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1]"
    " %}{% endif %}{{ c }};" + END
)
FIRST_CALL = (
    ROLE_TAGS + "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
    "{{ m.content }};" + END
)


@pytest.mark.parametrize(
    ("template", "messages", "count"),
    [
        *(
            (ONLY_CONTENT, [ASK, {**ANSWER, key: THOUGHT}], "assistant:reasoning")
            for key in ("reasoning_content", "reasoning", "thinking")
        ),
        (
            ONLY_FIRST_SYSTEM,
            [*TALK, {"role": "system", "content": "Now be brief."}, ASK, ANSWER],
            "system:content",
        ),
        (
            ONLY_FIRST_SYSTEM,
            [ASK, {"role": "developer", "content": "Use no tables."}, ANSWER],
            "developer:content",
        ),
        (
            CALLS_OR_CONTENT,
            [ASK, {"role": "assistant", "content": "I look it up.", "tool_calls": [CALL]}],
            "assistant:content",
        ),
        (
            WITHOUT_THOUGHTS,
            [ASK, {"role": "assistant", "content": f"<think>{THOUGHT}</think>Behind it."}],
            "assistant:think",
        ),
        (
            FIRST_CALL,
            [
                ASK,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        CALL,
                        {"function": {"name": "find_hill", "arguments": {"by": "Spiez"}}},
                    ],
                },
            ],
            "assistant:tool_calls",
        ),
    ],
)
def test_a_text_that_the_template_leaves_out_is_counted_by_role_and_kind(
    template: str, messages: Any, count: str
) -> None:
    found = rendered(template, messages)
    assert found.counts == [f"not_rendered:{count}"]
    assert learnt(found)[0][-1].endswith(";")


def test_short_texts_that_stand_in_the_template_anyway_are_missed_too() -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }};"
        "{% endif %}"
    )
    messages = [{"role": "system", "content": "user"}, ASK, ANSWER]
    assert rendered(template + END, messages).counts == ["not_rendered:system:content"]
    assert rendered(ONLY_CONTENT, messages).counts == []


def test_what_only_the_documents_of_single_turns_have_is_not_missing() -> None:
    messages = [ASK, {**ANSWER, "reasoning_content": THOUGHT}, ASK, ANSWER]
    assert rendered(QWEN3, messages).counts == ["cut_by_turn"]
    found = rendered(QWEN3, messages, "last")
    assert found.counts == ["not_rendered:assistant:reasoning"]


def test_the_note_on_a_lost_text_names_role_count_and_line(
    make_config: MakeConfig, write_rows: WriteRows, chat_tokenizer: Callable[[str], Path]
) -> None:
    rows = [{"messages": [ASK, {**ANSWER, "reasoning": THOUGHT}]}, {"messages": TALK}]
    path = write_rows([rows[1], *rows])
    settings = {"format": "chat", "tokenizer": str(chat_tokenizer(CHATML)), "sequence_length": 512}
    for _ in range(2):  # built, and from the cache
        (note,) = prepare(make_config(path, **settings)).report.notes
        assert "1 of 3 rows" in note and "assistant" in note and f"{path}, line 2" in note
        assert "reasoning_content" in note


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_rendered_under_whichever_name_the_template_has(key: str, read: str) -> None:
    template = (
        ROLE_TAGS
        + f"{{% if m.{read} %}}({{{{ m.{read} }}}}){{% endif %}}{{{{ m.content }}}};"
        + END
    )
    found = rendered(template, [ASK, {**ANSWER, key: THOUGHT}])
    assert learnt(found) == [[f"({THOUGHT})Behind the hill.;"]] and found.counts == []


def test_thoughts_in_the_content_are_given_to_a_template_that_has_a_key_for_them() -> None:
    template = (
        ROLE_TAGS + "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
        "{{ m.content.split('</think>')[-1] }};" + END
    )
    found = rendered(
        template, [ASK, {"role": "assistant", "content": f"<think>{THOUGHT}</think>Yes"}]
    )
    assert learnt(found) == [[f"({THOUGHT})Yes;"]] and found.counts == []


def test_an_answer_of_which_nothing_is_rendered_is_not_learnt() -> None:
    silent = {"role": "assistant", "content": "", "reasoning_content": THOUGHT}
    found = rendered(CHATML, [ASK, silent, ASK, ANSWER])
    assert learnt(found) == [["Behind the hill.<|im_end|>\n"]]
    assert found.counts == ["empty_answer", "not_rendered:assistant:reasoning"]
    marked = FILES["chatml"]
    assert learnt(rendered(marked, [ASK, silent, ASK, ANSWER]))[0] == [
        "Behind the hill.<|im_end|>\n"
    ]
    assert THOUGHT in learnt(rendered(QWEN3, [ASK, silent]))[0][0]


def test_a_template_that_expects_parts_gets_them() -> None:
    template = ROLE_TAGS + "{% for part in m.content %}{{ part.text }}{% endfor %};" + END
    found = rendered(template, [ASK, ANSWER])
    assert learnt(found) == [["Behind the hill.;"]] and "Where is the lake?" in text_of(found)


def test_a_developer_is_the_system_of_a_template_that_has_none() -> None:
    messages = [{"role": "developer", "content": "Use metres."}, ASK, ANSWER]
    assert text_of(rendered(ONLY_FIRST_SYSTEM, messages)).startswith("<Use metres.>")
    assert "<|im_start|>developer\nUse metres." in text_of(rendered(CHATML, messages))


ARGUMENTS = {
    "object": "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
    "text": "{{ '' + c.function.arguments }}",
}
RESULTS = {
    "object": "{% for k in m.content %}{{ k }}:{{ m.content[k] }}{% endfor %}",
    "text": "{{ '' + m.content }}",
    "keys of objects": "{% if m.content is string %}{{ m.content }}{% else %}{% for k in m.content"
    " %}{{ k }}{% endfor %}{% endif %}",
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("results", RESULTS)
@pytest.mark.parametrize("written", [{"near": "Thun"}, '{"near": "Thun"}'])
def test_forms_of_arguments_and_of_results_are_chosen_apart(
    arguments: str, results: str, written: Any
) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}" + RESULTS[results] +
        "{% elif m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}("
        + ARGUMENTS[arguments] + "){% endfor %}{% else %}{{ m.content }}{% endif %};" + END
    )  # fmt: skip
    call = {"type": "function", "function": {"name": "find_lake", "arguments": written}}
    result = {"role": "tool", "content": {"metres": 217}}
    talk = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, result, ANSWER]
    found = rendered(template, talk)
    assert "Thun" in learnt(found)[0][0] and "217" in text_of(found)
    assert found.counts == []


def test_a_call_in_another_shape_is_given_as_the_template_reads_it() -> None:
    template = (
        ROLE_TAGS + "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content or '' }};" + END
    )
    for message in (
        {"role": "assistant", "tool_calls": [CALL["function"]]},
        {"role": "assistant", "function_call": CALL["function"]},
    ):
        assert learnt(rendered(template, [ASK, message])) == [['find_lake{"near": "Thun"};']]


# In the manner of templates for Phi-3 that end every rendering with a block of their own.
END_BLOCK = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }};{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ eos_token }}{% endif %}"
)
TWO_BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<{{ m.role }}>"
    "{% endgeneration %}{% generation %}{{ m.content }};{% endgeneration %}{% else %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def test_blocks_belong_to_the_message_whose_text_they_have() -> None:
    whole = learnt(rendered(END_BLOCK, TALK))
    assert whole == [["Hello;", "So long;", "</s>"]]
    assert learnt(rendered(END_BLOCK, TALK, "last")) == [["So long;", "</s>"]]
    assert learnt(rendered(END_BLOCK, TALK, "each")) == [["Hello;", "</s>"], ["So long;", "</s>"]]
    first = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    assert learnt(rendered(END_BLOCK, first)) == [["So long;", "</s>"]]
    last = [*TALK[:3], {**TALK[3], "weight": 0}]
    assert learnt(rendered(END_BLOCK, last)) == [["Hello;"]]
    assert learnt(rendered(END_BLOCK, last, "all"))[0][1] == "</s>" or "So long;" not in "".join(
        learnt(rendered(END_BLOCK, last, "all"))[0]
    )
    assert learnt(rendered(TWO_BLOCKS, first)) == [["<assistant>", "So long;"]]
    assert learnt(rendered(TWO_BLOCKS, last)) == [["<assistant>", "Hello;"]]


NEEDS_A_QUESTION = (
    "{% set ns = namespace(asked=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = true %}{% endif %}{% endfor %}{% if not ns.asked %}"
    "{{ raise_exception('no question') }}{% endif %}"
)


@pytest.mark.parametrize("opening", [[], [{"role": "system", "content": "Be brief."}]])
@pytest.mark.parametrize("loss_on", ["completion", "last", "each"])
@pytest.mark.parametrize("template", [CHATML, FILES["chatml"]], ids=["prefix", "marked"])
def test_an_answer_before_any_question_ends_no_chat(
    opening: list[Any], loss_on: str, template: str
) -> None:
    talk = [*opening, {"role": "assistant", "content": "Hello there"}, ASK, ANSWER]
    found = rendered(NEEDS_A_QUESTION + template, talk, loss_on)
    assert learnt(found)[-1][-1] == "Behind the hill.<|im_end|>\n"
    assert ("begins_with_assistant" in found.counts) == (template == CHATML or loss_on == "each")
    assert "Hello there" in text_of(found)


def test_a_turn_is_found_by_its_place_where_its_beginning_cannot_be_rendered() -> None:
    even = (
        "{% if add_generation_prompt and messages | length > 2 %}"
        "{{ raise_exception('too long to ask') }}{% endif %}" + CHATML
    )
    assert learnt(rendered(even, TALK)) == [["Hello<|im_end|>\n", "So long<|im_end|>\n"]]
    assert learnt(rendered(even, [*TALK, ASK])) == learnt(rendered(even, TALK))


def test_an_error_says_which_text_of_the_template_differs() -> None:
    thinking = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n<think>\n{% endif %}"
    )
    with pytest.raises(UserError, match=r"data\.chat_template") as caught:
        rendered(thinking, [ASK, ANSWER])
    assert r"<assistant>\n<think>\n" in str(caught.value)
    assert "<assistant>Behind the hill." in str(caught.value)


def test_an_error_of_a_template_names_its_line() -> None:
    template = "{% for m in messages %}\n{{ m.content }}\n{{ 1 / 0 }}\n{% endfor %}"
    with pytest.raises(UserError, match=r"here: .*line 3.*division"):
        rendered(template, [ASK, ANSWER])


def test_a_hermes_system_message_that_is_replaced_is_counted() -> None:
    form = RowFormat("function-calling")
    system = {"from": "system", "value": f"Use these. <tools>{json.dumps(TOOL)}</tools>"}
    row = form.canonical({"conversations": [system, ASK, ANSWER]}, "here")
    assert chat_renderer(plain(QWEN3), {}, form).render(row, "here").counts == ["system_replaced"]
