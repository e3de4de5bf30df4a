"""All metrics on held-out data, in one call that training and `drillyard eval` share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drillyard.config.run import RunConfig
from drillyard.config.run_checks import least_micro_batch
from drillyard.data.chat_template import ChatRenderer, chat_renderer
from drillyard.data.function_rows import question_of
from drillyard.data.held_out_parts import RowsAtFault, evaluation_rows, find_part
from drillyard.data.prepared_data import PreparedData
from drillyard.data.raw_batches import Row
from drillyard.data.row_formats import render_prompt, row_format
from drillyard.data.tokenizer import chat_prompt_tokens, prompt_tokens
from drillyard.errors import UserError
from drillyard.evaluation.call_scoring import CallVerdict, call_accuracy, judge_calls
from drillyard.evaluation.failures import EvaluationFailed, FailureAgreement
from drillyard.evaluation.generate import generate
from drillyard.evaluation.held_out_loss import evaluate_loss
from drillyard.evaluation.notation_check import require_readable, template_problem
from drillyard.evaluation.sql_scoring import SqlVerdict, accuracy, judge
from drillyard.guarded_files import read_lines
from drillyard.models.loss import LanguageModelLoss
from drillyard.parallel.ranks import Ranks
from drillyard.safe_files import describe_os_error, make_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Verdict = TypeVar("Verdict", SqlVerdict, CallVerdict)
_NOT_WRONG = ("correct", "unjudged", "judged", "accuracy")


@dataclass(frozen=True)
class MetricFailure:
    """A metric that could not be measured on a held-out part. `reason`, `stack`: see
    EvaluationFailed."""

    part: str
    metric: str
    reason: str
    stack: str | None


@dataclass(frozen=True)
class EvaluationResults:
    """{part: {loss, perplexity, bits_per_byte, tokens, sql_execution, ...}}, and the metrics that
    failed."""

    results: dict[str, dict[str, Any]]
    failures: list[MetricFailure]


@dataclass
class HeldOutEvaluator:
    """Measures a model on the held-out parts of a run; called on every rank alike.

    `warn(text)` is called when predictions cannot be written. `before_forward`: see
    FailureAgreement. `before_write`: called on rank 0 before predictions are written.
    """

    config: RunConfig
    data: PreparedData
    root: LanguageModelLoss
    ranks: Ranks
    directory: Path
    attention: str
    warn: Callable[[str], None] = lambda text: print(f"drillyard: {text}", file=sys.stderr)
    before_forward: Callable[[], None] = lambda: None
    before_write: Callable[[], None] = lambda: None
    parts: list[str] = field(init=False)

    def __post_init__(self) -> None:
        wanted = (
            list(self.data.held_out)
            if self.config.evaluation.parts is None
            else self.config.evaluation.parts
        )
        self.parts = [find_part(name, self.data.held_out) or name for name in wanted]
        if missing := [name for name in self.parts if name not in self.data.held_out]:
            raise UserError(
                f"evaluation.parts: no held-out part is {missing[0]!r}; there are:"
                f" {', '.join(self.data.held_out)}"
            )
        self._agreement = FailureAgreement(self.root, self.ranks)
        if "function-call" in self.config.evaluation.metrics and self.ranks.rank == 0:
            renderer = self._renderer()
            if problem := template_problem(renderer, lambda text: self._generated(renderer, text)):
                self.warn(
                    "evaluation.metrics: function-call cannot judge calls as this model's chat"
                    f" template writes them: {problem}"
                )

    @property
    def batch_size(self) -> int:
        """Sequences or prompts per rank in one forward: as configured, or what training is known to
        fit (1 where that was left to `auto` and no run decided it)."""
        return self.config.evaluation.batch_size or least_micro_batch(self.config)

    def evaluate(self, label: str) -> EvaluationResults:
        """Every metric of every part; a failed metric does not affect the others. Raises
        EvaluationStopped."""
        found = EvaluationResults({}, [])
        for name in self.parts:
            result: dict[str, Any] = {}
            for metric in self.config.evaluation.metrics:
                try:
                    result |= self._measure(metric, name, label)
                except EvaluationFailed as failure:
                    found.failures.append(
                        MetricFailure(name, metric, failure.reason, failure.stack)
                    )
            if result:
                found.results[name] = result
        return found

    def _measure(self, metric: str, part: str, label: str) -> dict[str, Any]:
        if metric == "loss":
            return self.loss(part)
        return (
            self.sql_execution(part, label)
            if metric == "sql-execution"
            else self.function_call(part, label)
        )

    def loss(self, part: str) -> dict[str, Any]:
        """Loss, perplexity and bits per byte on one held-out part. Raises EvaluationFailed."""
        return evaluate_loss(
            self.root,
            self.data.held_out[part],
            self.ranks,
            attention=self.attention,
            batch_size=self.batch_size,
            limit=self.config.evaluation.max_sequences,
            chunk_tokens=self.config.training.loss_chunk_tokens,
            before_forward=self.before_forward,
        )

    def sql_execution(self, part: str, label: str) -> dict[str, Any]:
        """Answer a part's questions, run the answers, write `directory`/LABEL/PART.jsonl. Raises
        EvaluationFailed."""
        tokenizer = self.data.tokenizer
        verdicts, left_out = self._answers(
            part,
            label,
            prompt_of=render_prompt,
            tokens_of=lambda prompt: prompt_tokens(tokenizer, prompt),
            ends=lambda: {tokenizer.eos_token_id} - {None},
            skip_special_tokens=True,
            judge=judge,
            too_long=lambda reason: SqlVerdict("unjudged", reason),
        )
        return {**_shares("sql_execution", accuracy(verdicts)), **left_out}

    def function_call(self, part: str, label: str) -> dict[str, Any]:
        """Answer a part's questions by calls, compare them with those accepted, write the
        predictions as above.

        Besides the accuracy, the answers that are wrong in each way, where there are any. Raises
        EvaluationFailed.
        """
        tokenizer, renderer = self.data.tokenizer, self._renderer()

        def check(rows: list[Row]) -> None:
            unreadable = require_readable(
                renderer, rows, part, lambda text: self._generated(renderer, text)
            )
            if unreadable and self.ranks.rank == 0:
                self.warn(unreadable)

        verdicts, left_out = self._answers(
            part,
            label,
            check=check,
            prompt_of=lambda row: renderer.prompt(
                {**row, "messages": question_of(row["messages"])}, part
            ),
            tokens_of=lambda prompt: chat_prompt_tokens(tokenizer, prompt),
            ends=lambda: turn_end_tokens(renderer, tokenizer),
            skip_special_tokens=False,  # one may mark a call
            judge=lambda row, predicted: judge_calls(
                row["tools"] or [], row["accepted"], predicted
            ),
            too_long=lambda reason: CallVerdict("unjudged", reason),
        )
        figures = call_accuracy(verdicts)
        wrong = {key: count for key, count in figures.items() if key not in _NOT_WRONG and count}
        return {**_shares("function_call", figures), **left_out, **wrong}

    def _renderer(self) -> ChatRenderer:
        text = self.data.text_tokenizer
        return chat_renderer(
            text.chat_template or "",
            text.special_tokens,
            row_format(self.config.data),
            text.template_file or "the chat template",
            text.date,
        )

    def _generated(self, renderer: ChatRenderer, text: str) -> str:
        """What is found to be the answer of a model that writes this text."""
        tokenizer = self.data.tokenizer
        tokens, ends = chat_prompt_tokens(tokenizer, text), turn_end_tokens(renderer, tokenizer)
        decoded = tokenizer.decode([*takewhile(lambda token: token not in ends, tokens)])
        assert isinstance(decoded, str)
        return decoded

    def _answers(
        self,
        part: str,
        label: str,
        *,
        prompt_of: Callable[[Row], str],
        tokens_of: Callable[[str], list[int]],
        check: Callable[[list[Row]], None] = lambda rows: None,
        ends: Callable[[], Set[int]],
        skip_special_tokens: bool,
        judge: Callable[[Row, str], Verdict],
        too_long: Callable[[str], Verdict],
    ) -> tuple[list[Verdict], dict[str, int]]:
        """The verdicts on the answers to a part's questions, which are written with the
        predictions; and how many rows could not be read or asked, where there are any.

        `check` gets the rows that are asked. `ends`: the tokens that end an answer. `too_long`: the
        verdict where the prompt leaves no room for an answer. Raises EvaluationFailed.
        """
        tokenizer, evaluation = self.data.tokenizer, self.config.evaluation
        at_fault = RowsAtFault()

        def questions() -> tuple[list[Row], list[str], list[list[int]], Set[int]]:
            found = evaluation_rows(self.config, part, evaluation.samples, at_fault)
            rows, prompts = self._asked(found, prompt_of, at_fault)
            check(rows)
            return rows, prompts, [tokens_of(prompt) for prompt in prompts], ends()

        rows, prompts, tokens, end_tokens = self._agreement.alone(questions)
        context = context_length(self.root.causal_lm.config)
        asked = [n for n, each in enumerate(tokens) if context is None or len(each) < context]
        left_out = self._left_out(part, tokens, asked, context, at_fault)
        generated = generate(
            self.root,
            [tokens[number] for number in asked],
            self.ranks,
            end_tokens=end_tokens,
            max_new_tokens=evaluation.max_new_tokens,
            batch_size=self.batch_size,
            before_forward=self.before_forward,
        )
        outputs: list[list[int]] = [[] for _ in rows]
        for number, output in zip(asked, generated, strict=True):
            outputs[number] = output
        predictions = self._agreement.alone(
            lambda: [
                text.strip()
                for text in tokenizer.batch_decode(outputs, skip_special_tokens=skip_special_tokens)
            ]
        )
        # Each data rank judges its share of them.
        size = self.ranks.num_data_ranks
        share = list(zip(rows, predictions, tokens, strict=True))[self.ranks.data_rank :: size]
        mine = self._agreement.alone(
            lambda: [
                judge(row, text)
                if context is None or len(prompt) < context
                else too_long(f"a prompt of {len(prompt):,} tokens, a context of {context:,}")
                for row, text, prompt in share
            ]
        )
        parts = self.ranks.gather_from_data_ranks(mine)
        verdicts = [parts[index % size][index // size] for index in range(len(rows))]
        if self.ranks.rank == 0:
            lines = [
                {
                    **row,
                    "prompt": prompt,
                    "max_new_tokens": evaluation.max_new_tokens,
                    "predicted": predicted,
                    "verdict": verdict.outcome,
                    "reason": verdict.reason,
                }
                for row, prompt, predicted, verdict in zip(
                    rows, prompts, predictions, verdicts, strict=True
                )
            ]
            self.before_write()
            self.write_predictions(
                self.directory / label / f"{part.replace('/', '_')}.jsonl", lines
            )
        return verdicts, left_out

    def _left_out(
        self,
        part: str,
        tokens: list[list[int]],
        asked: list[int],
        context: int | None,
        at_fault: RowsAtFault,
    ) -> dict[str, int]:
        """Counts of rows that cannot be read, and of prompts that leave no room for an answer; each
        is warned of."""
        counts = {"rows_at_fault": at_fault.count, "too_long": len(tokens) - len(asked)}
        if self.ranks.rank == 0 and at_fault.count:
            self.warn(
                f"{part}: {at_fault.count:,} rows cannot be read and are not asked; the first:"
                f" {at_fault.first}"
            )
        if self.ranks.rank == 0 and counts["too_long"]:
            self.warn(
                f"{part}: {counts['too_long']:,} of {len(tokens):,} prompts leave no room for an"
                f" answer and are not judged: the longest has {max(map(len, tokens)):,} tokens, the"
                f" model's context {context:,}"
            )
        return {key: count for key, count in counts.items() if count}

    def _asked(
        self, rows: list[Row], prompt_of: Callable[[Row], str], at_fault: RowsAtFault
    ) -> tuple[list[Row], list[str]]:
        """The rows and their prompts, without rows at fault, which are counted."""
        asked, prompts = [], []
        failure: UserError | None = None
        for row in rows:
            try:
                prompts.append(prompt_of(row))
            except UserError as error:
                if self.config.data.on_error == "refuse":
                    raise
                failure = failure or error
                at_fault.add(error)
            else:
                asked.append(row)
        if failure is not None and not asked:
            raise failure
        return asked, prompts

    def write_predictions(self, path: Path, lines: list[dict[str, Any]]) -> None:
        """Write one JSON line per question. A failure is only a warning: the figures do not depend
        on the file."""
        # Path.exists would raise where the disk cannot be read.
        if os.path.lexists(path) and not _holds_predictions(path):
            self.warn(
                f"{path}: is there already and holds no predictions: it is left, and predictions"
                " are not written"
            )
            return
        try:
            make_directory(path.parent, parents=True)
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except (
            Exception
        ) as error:  # only rank 0 writes: the others would wait for it until the timeout
            with contextlib.suppress(OSError):
                path.unlink()  # part of it would look like all of it
            cause = (
                describe_os_error(error)
                if isinstance(error, OSError)
                else f"{type(error).__name__}: {error}"
            )
            self.warn(f"{path}: predictions are not written: {cause}")


def _shares(metric: str, figures: dict[str, float | int]) -> dict[str, Any]:
    return {
        metric: figures["accuracy"] if figures["judged"] else None,
        "questions": figures["judged"],
        "unjudged": figures["unjudged"] or None,
    }


def context_length(config: Any) -> int | None:
    """Tokens of prompt and answer together that a model was made for; None if its config does not
    say."""
    found = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return found if isinstance(found, int) else None


def turn_end_tokens(renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The tokens that end an assistant's turn: the first special one that the template puts after a
    text (EOS where it puts none), and the last one after a call, where that is another one
    (`<|call|>` of gpt-oss); the special tokens before it may end one call of several."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)

    def ends(text: str) -> list[int]:
        return [token for token in chat_prompt_tokens(tokenizer, text) if token in special]

    after_text = ends(renderer.turn_end())[:1] or [tokenizer.eos_token_id]
    found = {*after_text, *ends(renderer.call_end())[-1:]}
    return frozenset(token for token in found if token is not None)


def _holds_predictions(path: Path) -> bool:
    """Whether a file was written here: its first line is a prediction, or it is empty."""
    try:
        first = next(read_lines(path), b"")
        return not first or {"predicted", "verdict", "reason"} <= json.loads(first).keys()
    except (OSError, UserError, ValueError, AttributeError, RecursionError):
        return False
