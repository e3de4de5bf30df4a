"""Chat templates by name (default, tool_use), and from a file (data.chat_template)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.test_chat_content import ANSWER, ASK, CALL, TOOL
from tests.unit.data.test_chat_template import CHATML, TALK
from transformers import AutoTokenizer

from drillyard.config.fetch_limits import FetchLimits, WithheldError, limited
from drillyard.config.load import load_run_config, save_resolved
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import check_run
from drillyard.config.run_identity import differences
from drillyard.data.mapped_sequences import IGNORED
from drillyard.data.prepared_data import PreparedData, prepare
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]

NAMED = {
    "default": "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "tool_use": "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
}
OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}|{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"  # noqa: E501


def texts(data: PreparedData) -> str:
    source = data.train.sources[0]
    batch = source.read(range(len(source)))
    return str(data.tokenizer.decode(batch.input_ids[batch.document_ids >= 0]))


@pytest.mark.parametrize("name", ["chat", "function-calling"])
def test_templates_by_name_are_used_as_transformers_uses_them(
    name: str,
    make_config: MakeConfig,
    write_rows: WriteRows,
    chat_tokenizer: Callable[[Any], Path],
) -> None:
    called = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    directory = str(chat_tokenizer(NAMED))
    settings = {"format": name, "tokenizer": directory, "sequence_length": 512}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for row in ({"messages": [ASK, ANSWER]}, {"messages": called, "tools": [TOOL]}):
        data = prepare(make_config(write_rows([row]), **settings))
        if name == "chat":
            expected = tokenizer.apply_chat_template(
                row["messages"], tools=row.get("tools"), tokenize=False
            )
            assert texts(data) == expected
        assert texts(data).startswith("[{") == ("tools" in row)
        assert not data.report.notes


def test_named_templates_without_a_default_say_what_to_do(
    make_config: MakeConfig, write_rows: WriteRows, chat_tokenizer: Callable[[Any], Path]
) -> None:
    tokenizer = str(chat_tokenizer({"tool_use": NAMED["tool_use"], "rag": CHATML}))
    config = make_config(write_rows([{"messages": TALK}]), format="chat", tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"tool_use.*data\.chat_template"):
        prepare(config)


@pytest.fixture
def template_file(tmp_path: Path) -> Path:
    path = tmp_path / "other.jinja"
    path.write_text(OTHER)
    return path


def test_a_file_takes_the_place_of_the_tokenizer_s_template_and_is_saved_with_it(
    template_file: Path,
    make_config: MakeConfig,
    write_rows: WriteRows,
    chat_tokenizer: Callable[[str], Path],
    tokenizer_directory: Path,
    tmp_path: Path,
) -> None:
    path = write_rows([{"messages": TALK}])
    # One tokenizer has no template at all.
    for tokenizer in (chat_tokenizer(CHATML), tokenizer_directory):
        config = make_config(
            path,
            format="chat",
            tokenizer=str(tokenizer),
            chat_template=str(template_file),
            sequence_length=256,
        )
        assert check_run(config) == []
        data = prepare(config)
        assert texts(data) == "[user] Hi|[assistant] Hello|[user] Bye|[assistant] So long|"
        batch = data.train.read([(0, 0)])
        labels = batch.labels[0][batch.labels[0] != IGNORED]
        assert data.tokenizer.decode(labels) == "Hello|So long|"
        data.tokenizer.save_pretrained(tmp_path / "saved")
        saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert saved.apply_chat_template(TALK, tokenize=False) == texts(data)
        # A saved tokenizer has the template: the file is not needed.
        template = template_file.read_text()
        template_file.unlink()
        assert texts(prepare(config, tmp_path / "saved")) == texts(data)
        template_file.write_text(template)


def test_another_template_is_other_data(
    template_file: Path,
    make_config: MakeConfig,
    write_rows: WriteRows,
    chat_tokenizer: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    config = make_config(
        write_rows([{"messages": TALK}]),
        format="chat",
        tokenizer=str(chat_tokenizer(CHATML)),
        chat_template=str(template_file),
        sequence_length=256,
    )
    record = prepare(config).record
    assert prepare(config, known=record).record == record
    template_file.write_text(OTHER.replace("|", "!"))
    with pytest.raises(UserError, match=r"data\.chat_template"):
        prepare(config, known=record)
    plain = config.model_copy(
        update={"data": config.data.model_copy(update={"chat_template": None})}
    )
    assert [line.partition(":")[0] for line in differences(config, plain)] == ["data.chat_template"]
    save_resolved(config, tmp_path / "run.yaml")
    assert load_run_config(tmp_path / "run.yaml").data.chat_template == str(template_file)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"a\n{% for m in messages %}\n{{ m.content }", r"other\.jinja, line 3: "),
        (b"{% for m in messages %}\n{{ m.content }}\n", r"other\.jinja, line \d: .*for"),
        (b"{{ messages | nothing }}", r"other\.jinja, line 1: .*nothing"),
        (b"\xff\xfe", r"other\.jinja is not UTF-8"),
        (b"{% for m in messages %}\n\n{{ m.content + 1 }}{% endfor %}", r"other\.jinja, line 3,"),
        (None, r"other\.jinja cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_render_is_named_with_its_line(
    content: bytes | None,
    found: str,
    template_file: Path,
    make_config: MakeConfig,
    write_rows: WriteRows,
    chat_tokenizer: Callable[[str], Path],
) -> None:
    template_file.unlink() if content is None else template_file.write_bytes(content)
    config = make_config(
        write_rows([{"messages": TALK}]),
        format="chat",
        tokenizer=str(chat_tokenizer(CHATML)),
        chat_template=str(template_file),
    )
    with pytest.raises(UserError, match=found):
        prepare(config)


def test_a_template_cannot_leave_its_sandbox(
    template_file: Path,
    make_config: MakeConfig,
    write_rows: WriteRows,
    chat_tokenizer: Callable[[str], Path],
) -> None:
    template_file.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    config = make_config(
        write_rows([{"messages": TALK}]),
        format="chat",
        tokenizer=str(chat_tokenizer(CHATML)),
        chat_template=str(template_file),
    )
    with pytest.raises(UserError, match=r"__class__|unsafe"):
        prepare(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "text"},
        {"format": "chat", "tokenizer": {"train": "bpe", "vocab_size": 300}},
    ],
)
def test_a_template_that_would_have_no_effect_is_refused(
    settings: dict[str, Any], make_config: MakeConfig
) -> None:
    problems = check_run(make_config("builtin:text-to-sql", chat_template="a.jinja", **settings))
    assert ("data", "chat_template") in [problem.path for problem in problems]


def test_a_received_config_names_no_address_and_no_variable(
    make_config: MakeConfig, write_rows: WriteRows, chat_tokenizer: Callable[[str], Path]
) -> None:
    settings = {"format": "chat", "tokenizer": str(chat_tokenizer(CHATML))}
    path = write_rows([{"messages": TALK}])
    with pytest.raises(UserError, match=r"data\.chat_template: https://host/a"):
        prepare(make_config(path, chat_template="https://host/a", **settings))
    config = RunConfig.model_validate(
        make_config(path, chat_template="${env:HOME}/a.jinja", **settings).model_dump(),
        context={"resolve_environment": False},
    )
    named = frozenset({str(path), str(settings["tokenizer"]), str(config.data.cache_directory)})
    with limited(FetchLimits(typed=named)), pytest.raises(WithheldError):
        prepare(config)
