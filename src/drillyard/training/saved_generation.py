"""`drillyard generate`: what a saved model answers to prompts and conversations, as it was trained.

A prompt reaches the model as in training: a conversation through the model's own chat template, a
prompt of another format as the plain text that the format makes of its rows. One process holds the
whole model, in the precision that its files have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drillyard.config.fetch_limits import limited
from drillyard.config.load import config_from_options
from drillyard.config.problems import HUB_ID
from drillyard.config.run import RunConfig
from drillyard.data.raw_batches import Row
from drillyard.data.row_formats import RowFormat, row_format
from drillyard.errors import UserError
from drillyard.guarded_files import open_input
from drillyard.training.saved_evaluation import date_of_run
from drillyard.training.saved_model import (
    SavedModel,
    as_pretrained,
    fetch_limits_of,
    find_saved_model,
    load_saved_model,
    without_training_layout,
)

if TYPE_CHECKING:
    from drillyard.data.chat_template import ChatRenderer
    from drillyard.data.tokenizer import TextTokenizer
    from drillyard.evaluation.generate import Sampling
    from drillyard.models.loss import LanguageModelLoss
    from drillyard.parallel.ranks import Ranks

LONGEST_PROMPT_BYTES = 16 << 20
"""Of a line of a file of prompts, and of standard input: far more than any context holds."""
SHORTEST_SEQUENCE = 8
"""Sequence length of a model that no run made, where nothing is packed: no model has fewer
positions."""


@dataclass(frozen=True)
class Opening:
    """What the user gives besides the prompts: it opens every conversation that has none itself."""

    system: str | None = None
    tools: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model gets it; `notes`: what of the question it does not hold."""

    text: str
    tokens: list[int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A model's answer. `finish_reason`: "stop" where the model ended it, "length" where there was
    no room for more."""

    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class AnsweringModel:
    """A model in memory that answers prompts. `renderer` is None where prompts are plain text."""

    name: str
    root: LanguageModelLoss
    ranks: Ranks
    tokenizer: TextTokenizer
    form: RowFormat
    renderer: ChatRenderer | None
    end_tokens: frozenset[int]
    positions: int | None

    def prompt(self, row: Row, where: str, opening: Opening) -> Prompt:
        """The prompt of a row: {prompt}, {messages, tools}, or of the format that the model was
        trained on.

        Answers in `row` are left out. Raises UserError for a row without a question, and for an
        opening where prompts are plain text.
        """
        from drillyard.data.tokenizer import chat_prompt_tokens, prompt_tokens

        tokenizer = self.tokenizer.pretrained
        if self.renderer is None:
            if opening.system is not None or opening.tools:
                raise UserError(
                    f"{self.name}: continues plain text, so it takes no system message and no tools"
                    "\nleave out --system and --tools, or give --template for its chat template"
                )
            text = _plain_prompt(row, self.form, where)
            return Prompt(text, prompt_tokens(tokenizer, text))
        question = _question(row, self.form, where, opening)
        text = self.renderer.prompt(question, where)
        notes = []
        if question["tools"] and text == self.renderer.prompt({**question, "tools": None}, where):
            notes.append(f"{where}: the model's chat template does not render tools")
        return Prompt(text, chat_prompt_tokens(tokenizer, text), tuple(notes))

    def room(self, prompt: Prompt, where: str) -> int | None:
        """The number of tokens that fit behind the prompt; None without a limit. Raises UserError
        for a prompt that fills the context."""
        if self.positions is None:
            return None
        if len(prompt.tokens) >= self.positions:
            raise UserError(
                f"{where}: the prompt has {len(prompt.tokens):,} tokens, and {self.name} has"
                f" {self.positions:,} positions for prompt and answer\nshorten the prompt"
            )
        return self.positions - len(prompt.tokens)

    def answers(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        numbers: Sequence[int] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Answer]:
        """The answers to prompts that `room` accepts, in one batch.

        `on_text` gets the text of a single prompt's answer, piece by piece. `numbers`: see
        `generate`. Raises UserError where the memory does not suffice.
        """
        from drillyard.evaluation.failures import EvaluationFailed
        from drillyard.evaluation.generate import generate

        rooms = [self.room(prompt, self.name) for prompt in prompts]
        limits = [min(max_new_tokens, max_new_tokens if room is None else room) for room in rooms]
        pieces = None if on_text is None else TextPieces(self.decode, self.end_tokens, on_text)
        try:
            found = generate(
                self.root,
                [prompt.tokens for prompt in prompts],
                self.ranks,
                end_tokens=self.end_tokens,
                max_new_tokens=max(limits),
                batch_size=len(prompts),
                sampling=sampling,
                numbers=numbers,
                on_tokens=(lambda tokens: None) if pieces is None else pieces.add,
            )
        except EvaluationFailed as failure:
            if failure.stack is not None and "OutOfMemory" not in failure.reason:
                raise RuntimeError(f"{failure.reason}\n\n{failure.stack}") from None
            raise UserError(f"{self.name}: {failure.reason}") from None
        if pieces is not None:
            pieces.end()
        answers = []
        for tokens, limit in zip(found, limits, strict=True):
            kept = tokens[:limit]
            answers.append(
                Answer(self.decode(kept), kept, "length" if len(kept) == limit else "stop")
            )
        return answers

    def decode(self, tokens: list[int]) -> str:
        """The text of an answer's tokens. Special tokens stay: some mark a call."""
        return str(self.tokenizer.pretrained.decode(tokens, skip_special_tokens=False))


class TextPieces:
    """Turns tokens that come one by one into pieces of text, whole characters each."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        end_tokens: frozenset[int],
        on_text: Callable[[str], None],
    ) -> None:
        self.decode, self.end_tokens, self.on_text = decode, end_tokens, on_text
        self._tokens: list[int] = []
        # Tokens from `_context` on are decoded; those before `_shown` have been.
        self._context = self._shown = 0
        self._ended = False

    def add(self, tokens: list[int]) -> None:
        """Take the next token of the answer, the only element of `tokens`."""
        self._ended = self._ended or tokens[0] in self.end_tokens
        if not self._ended:
            self._tokens.append(tokens[0])
            self._show(whole_only=True)

    def end(self) -> None:
        """Give out what waits for the rest of its last character."""
        self._show(whole_only=False)

    def _show(self, *, whole_only: bool) -> None:
        before = self.decode(self._tokens[self._context : self._shown])
        text = self.decode(self._tokens[self._context :])
        if len(text) <= len(before) or (whole_only and text.endswith("\N{REPLACEMENT CHARACTER}")):
            return
        self.on_text(text[len(before) :])
        # The tokens before it stay: whether a token begins with a space depends on them.
        self._context, self._shown = self._shown, len(self._tokens)


def open_model(
    model: str, *, use_template: bool | None = None, trust_config: bool = False
) -> AnsweringModel:
    """The model at `model` (a directory, a checkpoint, an adapter, or a hub id), in memory.

    `use_template`: whether prompts are conversations; default: as in the model's training, and of a
    model from elsewhere whether its tokenizer has a template. Joins the process group of one rank
    (`stop_ranks`). Raises UserError.
    """
    from drillyard.data.chat_template import chat_renderer
    from drillyard.data.tokenizer import configured_tokenizer, today
    from drillyard.evaluation.evaluator import turn_end_tokens
    from drillyard.parallel.ranks import start_ranks

    saved, config = find_model(model)
    with limited(None if trust_config or saved is None else fetch_limits_of(saved, typed={model})):
        own_tokenizer = None if saved is None else saved.tokenizer_directory
        tokenizer = configured_tokenizer(config, own_tokenizer)
        tokenizer = tokenizer.on((saved and date_of_run(saved)) or today())
        form = _format_of(saved, tokenizer, use_template)
        renderer = None
        if form.is_chat:
            if not tokenizer.chat_template:
                raise UserError(
                    f"{model}: its tokenizer has no chat template, so a prompt can only be"
                    " continued: give --no-template"
                )
            renderer = chat_renderer(
                tokenizer.chat_template,
                tokenizer.special_tokens,
                form,
                tokenizer.template_file or "the chat template",
                tokenizer.date,
            )
        config = _in_own_precision(config)
        ranks = start_ranks(config.training, config.parallelism)
        sharded = load_saved_model(
            saved or SavedModel(Path(model), False, None),
            config,
            tokenizer.pretrained,
            ranks,
            "evaluation",
        )
    causal_lm = sharded.causal_lm
    ends = causal_lm.generation_config.eos_token_id
    end_tokens = {tokenizer.eos_id, *(ends if isinstance(ends, list) else [ends])}
    if renderer is not None:
        end_tokens |= turn_end_tokens(renderer, tokenizer.pretrained)
    return AnsweringModel(
        model,
        sharded.root,
        ranks,
        tokenizer,
        form,
        renderer,
        frozenset(token for token in end_tokens if token is not None),
        getattr(causal_lm.config, "max_position_embeddings", None),
    )


def find_model(model: str) -> tuple[SavedModel | None, RunConfig]:
    """The saved model and the config to load it under; None for a hub id. No torch. UserError."""
    path = Path(model)
    is_in_directory = path.parent != Path() and path.parent.is_dir()
    if not path.exists() and not is_in_directory and HUB_ID.fullmatch(model):
        return None, without_training_layout(_config_of_foreign_model(model))
    saved = find_saved_model(path)
    if saved.is_checkpoint:
        return saved, without_training_layout(saved.config_from_run())
    base = saved.config or _config_of_foreign_model(str(saved.path))
    return saved, without_training_layout(as_pretrained(base, saved))


def _config_of_foreign_model(model: str) -> RunConfig:
    """A config for a model that no run made. Its data and training sections are never used."""
    return config_from_options(
        RunConfig,
        {
            "name": "generate",
            "model": {"id": model},
            "data": {"source": "none", "format": "text", "sequence_length": SHORTEST_SEQUENCE},
            "training": {"steps": 1, "precision": "fp32", "optimizer": {"learning_rate": 1e-3}},
        },
    )


def _format_of(
    saved: SavedModel | None, tokenizer: TextTokenizer, use_template: bool | None
) -> RowFormat:
    form = None if saved is None or saved.config is None else row_format(saved.config.data)
    if use_template is None:
        use_template = form.is_chat if form is not None else bool(tokenizer.chat_template)
    if form is not None and form.is_chat == use_template:
        return form
    return RowFormat("chat" if use_template else "text")


def _in_own_precision(config: RunConfig) -> RunConfig:
    """`config` with the precision of the base's files, as transformers loads and export writes
    them; that of training for a model without a base, or under quantization."""
    import torch

    from drillyard.models.meta_model import load_config

    if config.model.init != "pretrained" or config.model.quantization is not None:
        return config
    precisions = {torch.bfloat16: "bf16", torch.float64: "fp64"}
    dtype: Any = load_config(config.model).dtype
    precision = precisions.get(dtype, "fp32")
    training = config.training.model_copy(update={"precision": precision})
    return config.model_copy(update={"training": training})


def _question(row: Row, form: RowFormat, where: str, opening: Opening) -> Row:
    """The conversation {messages, tools} of a row, up to the question that the model answers."""
    from drillyard.data.function_rows import question_of

    if isinstance(row.get("prompt"), str):
        row = {**row, "messages": [{"role": "user", "content": row["prompt"]}]}
    canonical = form.canonical(row, where)
    messages = canonical["messages"]
    if form.name == "function-calling":
        messages = question_of(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise UserError(f"{where}: has no message to answer. Give it a message of the role user.")
    if opening.system is not None and all(each["role"] != "system" for each in messages):
        messages = [{"role": "system", "content": opening.system}, *messages]
    return {"messages": messages, "tools": canonical.get("tools") or list(opening.tools) or None}


def _plain_prompt(row: Row, form: RowFormat, where: str) -> str:
    """The text that the model continues: a `prompt` as it is, or what the format makes of a row."""
    if isinstance(row.get("prompt"), str):
        return str(row["prompt"])
    if form.name == "text":
        if isinstance(row.get("text"), str):
            return str(row["text"])
        has_messages = "messages" in row
        advice = (
            "This model continues text: give a prompt, or --template for its chat template."
            if has_messages
            else 'Give {"prompt": TEXT}.'
        )
        raise UserError(f"{where}: has no prompt. {advice}")
    return form.prompt({**form.canonical(_with_answer(row, form), where)}, where)


def _with_answer(row: Row, form: RowFormat) -> Row:
    """The row with an empty answer where it has none: a format's rows need one, a question does
    not."""
    answers = {"prompt-completion": "completion", "text-to-sql": "sql"}
    own = answers.get(form.name)
    return row if own is None else {form.columns.get(own, own): "", **row}


def read_questions(path: Path) -> Iterator[tuple[str, Row | UserError]]:
    """The rows of a file of prompts, each with its place FILE:LINE: JSON objects, one a line, or
    JSON strings.

    A line that is neither is given as its error. Raises UserError where the file cannot be read.
    """
    try:
        with open_input(path) as file:
            number = 0
            while line := file.readline(LONGEST_PROMPT_BYTES + 1):
                number += 1
                where = f"{path}:{number}"
                if len(line) > LONGEST_PROMPT_BYTES:
                    raise UserError(
                        f"{where}: the line has more than {LONGEST_PROMPT_BYTES >> 20} MiB. Write"
                        " one JSON object a line."
                    )
                if line.strip():
                    yield where, _row(line, where)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _row(line: bytes, where: str) -> Row | UserError:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, dict):
        return value
    return UserError(
        f'{where}: is not a JSON object. Write one a line: {{"prompt": TEXT}} or {{"messages":'
        " [...]}}."
    )
