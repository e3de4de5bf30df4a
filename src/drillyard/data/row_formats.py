"""Conversion of rows to documents: lists of text segments, each with or without loss.

Segments are tokenised one by one and concatenated. So a prompt has the same tokens in training,
where a completion follows, and in generation: no merge crosses from prompt to completion.

    text               text                          -> loss on everything
    prompt-completion  prompt, completion            -> loss on the completion
    text-to-sql        schema, question, sql         -> loss on the SQL; columns of
                                                     gretelai/synthetic_text_to_sql
                                                        (sql_context, sql_prompt, sql) and of Spider
                                                        are known
    chat               messages, tools (may be absent) -> loss on the assistant's turns
                       (chat_template.py); ShareGPT's
                                                        conversations and Alpaca's rows are known
                                                        (chat_messages.py)
    function-calling   messages, tools               -> the same; the layouts are those of
                                                     function_rows.py

`data.columns` maps a format's own column names to those of the data. `data.loss_on: all` puts loss
on every token; `data.train_on` chooses among the turns of a chat.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drillyard.config.data_checks import CHAT_FORMATS
from drillyard.config.kernel_rules import resolve_loss_on
from drillyard.config.run_data import DataConfig
from drillyard.data.chat_messages import (
    MESSAGE_COLUMNS,
    TOOL_COLUMNS,
    alpaca_messages,
    identity_key,
    is_alpaca,
    normalised_messages,
    normalised_tools,
    with_system_column,
)
from drillyard.data.function_rows import function_calling_row, question_of
from drillyard.data.raw_batches import Row
from drillyard.errors import UserError

Segments = list[tuple[str, bool]]
"""Consecutive pieces of a document and whether their tokens carry loss."""

COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "text": {"text": ("text",)},
    "prompt-completion": {"prompt": ("prompt",), "completion": ("completion",)},
    "text-to-sql": {
        "schema": ("schema", "sql_context"),
        "question": ("question", "sql_prompt"),
        "sql": ("sql",),
    },
    "chat": {"messages": MESSAGE_COLUMNS},
    "function-calling": {},
}
"""The columns of each format, each with the names to look for, in this order."""

OPTIONAL_COLUMNS = {
    "chat": ("tools", "system"),
    "function-calling": ("messages", "tools", "system"),
}


def render_prompt(row: Mapping[str, Any]) -> str:
    """The prompt of a text-to-SQL row {schema, question}; the completion is the bare SQL.

    The schema's CREATE TABLE statements, then the question as an SQL comment on one line: short,
    and close to what models have seen of SQL files.
    """
    return f"{row['schema'].strip()}\n-- {' '.join(row['question'].split())}\n"


@dataclass(frozen=True)
class RowFormat:
    """A format with its column names; turns rows into segments. Picklable: workers use it.

    loss_on: "all", "completion", or of a chat "last" or "each" (`data.train_on`).
    """

    name: str
    columns: dict[str, str] = field(default_factory=dict)
    loss_on: str = "completion"

    @property
    def is_chat(self) -> bool:
        """Whether a row is a conversation, which the tokenizer's chat template renders."""
        return self.name in CHAT_FORMATS

    def canonical(self, row: Row, where: str) -> Row:
        """The row with the format's own column names besides the row's others. UserError if one is
        missing."""
        if self.name == "function-calling":
            return function_calling_row(row, self.columns, where)
        canonical = dict(row)
        is_converted = self.name == "chat" and not self.columns and is_alpaca(row)
        if is_converted:
            row = {**row, "messages": alpaca_messages(row, where)}
        for own, names in COLUMNS[self.name].items():
            canonical[own] = row[self._column(own, names, row, where)]
        for own in OPTIONAL_COLUMNS.get(self.name, ()):
            if own in self.columns:
                canonical[own] = row[self._column(own, (own,), row, where)]
        if self.name == "chat":
            messages = normalised_messages(canonical["messages"], where)
            system = None if is_converted else canonical.get("system")
            canonical["messages"] = with_system_column(messages, system, where)
            named = ("tools",) if "tools" in self.columns else TOOL_COLUMNS
            tools = next((canonical[name] for name in named if canonical.get(name)), None)
            canonical["tools"] = normalised_tools(tools, where)
        return canonical

    def _column(self, own: str, names: tuple[str, ...], row: Row, where: str) -> str:
        expected = (self.columns[own],) if own in self.columns else names
        # A file with rows of both names has null in the other column.
        if found := [name for name in expected if name in row]:
            return next((name for name in found if row[name] is not None), found[0])
        near = difflib.get_close_matches(expected[0], list(row), 1, cutoff=0.5)
        mapping = f"data.columns: {{{own}: {near[0] if near else 'NAME'}}}"
        hint = f" Did you mean {near[0]!r}? Then set {mapping}." if near else f" Set {mapping}."
        raise UserError(
            f"{where}: no column {' or '.join(repr(name) for name in expected)}, which format"
            f" {self.name} needs; the columns are: {', '.join(map(str, row)) or '(none)'}.{hint}"
        )

    def text_of(self, row: Row, own: str, where: str) -> str:
        """The text in a column. UserError if it is not text."""
        value = row[own]
        if not isinstance(value, str):
            column = self.columns.get(own, own)
            found = (
                "no value (null)" if value is None else f"a value of type {type(value).__name__}"
            )
            raise UserError(
                f"{where}: column {column!r} has {found}; expected text. Fix or remove this row."
            )
        return value

    def segments(self, row: Row, where: str) -> Segments:
        """Segments of a canonical row of any format but those of chats."""
        if self.name == "text":
            return [(self.text_of(row, "text", where), True)]
        prompt = self.prompt(row, where)
        is_sql = self.name == "text-to-sql"
        completion = (
            self.text_of(row, "sql", where).strip()
            if is_sql
            else self.text_of(row, "completion", where)
        )
        return [(prompt, self.loss_on == "all"), (completion, True)]

    def prompt(self, row: Row, where: str) -> str:
        """The text before the completion."""
        if self.name == "prompt-completion":
            return self.text_of(row, "prompt", where)
        for own in ("schema", "question"):
            self.text_of(row, own, where)
        return render_prompt(row)

    def identity(self, row: Row, where: str) -> str:
        """The key by which equal rows go to the same part: the prompt if there is one, else the
        text or messages.

        So no prompt is in both training and held-out data, whatever its answers.
        """
        if self.name == "text":
            return self.text_of(row, "text", where)
        if self.name == "function-calling":
            return identity_key(question_of(row["messages"]))
        return identity_key(row["messages"]) if self.is_chat else self.prompt(row, where)


def row_format(data: DataConfig) -> RowFormat:
    """The format of a run's data. UserError for an unknown column in the mapping."""
    known = (*COLUMNS[data.format], *OPTIONAL_COLUMNS.get(data.format, ()))
    for own in data.columns:
        if own not in known:
            near = difflib.get_close_matches(own, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(
                f"data.columns: format {data.format} has no column {own!r}; it has"
                f" {', '.join(known)}.{hint}"
            )
    loss_on = resolve_loss_on(data)
    if data.format == "text" and loss_on == "completion":
        raise UserError(
            "data.loss_on: format text has no completion; use loss_on: all or another format."
        )
    return RowFormat(
        data.format, dict(data.columns), loss_on if data.train_on == "all" else data.train_on
    )
