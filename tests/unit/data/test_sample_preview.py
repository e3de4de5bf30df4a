"""The preview tells learnt tokens from context, and finds documents whose loss is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer
import yaml
from click.testing import Result
from tests.facts import says
from typer.testing import CliRunner

from drillyard.cli.data import register
from drillyard.config.run import RunConfig
from drillyard.data import prepare
from drillyard.data.sample_preview import coloured_tokens, loss_problems, spans_of
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]


def test_learnt_tokens_and_context_are_told_apart(make_config: MakeConfig, write_rows: WriteRows) -> None:
    path = write_rows([{"prompt": "first prompt", "completion": " one"}, {"prompt": "second", "completion": " two"}])
    data = prepare(make_config(path, format="prompt-completion"))
    batch = data.train.read([(0, 0)])
    spans = spans_of(batch, 0)
    assert [(span.document, span.learnt) for span in spans] == [(0, False), (0, True), (1, False), (1, True)]
    text = coloured_tokens(batch, 0, data.tokenizer.backend_tokenizer)
    green = ["".join(text.plain[s.start : s.end]) for s in text.spans if str(s.style).startswith("green")]
    assert green == [" one<|endoftext|>", " two<|endoftext|>"]
    assert "padding" in text.plain
    assert loss_problems(batch, 0, completions_only=True) == []


def test_a_document_that_is_learnt_whole_is_a_fault(make_config: MakeConfig, write_rows: WriteRows) -> None:
    data = prepare(make_config(write_rows([{"prompt": "", "completion": "c"}]), format="prompt-completion"))
    batch = data.train.read([(0, 0)])
    (fault,) = loss_problems(batch, 0, completions_only=True)
    assert "all of its" in fault
    assert loss_problems(batch, 0, completions_only=False) == []


def test_a_document_of_which_nothing_is_learnt_is_a_fault(make_config: MakeConfig, write_rows: WriteRows) -> None:
    batch = prepare(make_config(write_rows([{"text": "abc"}]))).train.read([(0, 0)])
    batch.labels[:] = -100
    (fault,) = loss_problems(batch, 0, completions_only=False)
    assert "none of its" in fault


def preview(config: RunConfig, tmp_path: Path, *arguments: str) -> Result:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    app = typer.Typer()
    register(app)

    @app.callback()
    def main() -> None:
        """Keeps `data` a subcommand."""

    return CliRunner().invoke(app, ["data", "preview", str(tmp_path / "run.yaml"), *arguments])


def test_the_command_shows_samples_and_counts(make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path) -> None:
    path = write_rows([{"prompt": f"prompt {n}", "completion": " answer"} for n in range(9)])
    result = preview(make_config(path, format="prompt-completion"), tmp_path, "--samples", "1")
    assert result.exit_code == 0, result.output
    output = result.output
    assert "data, sequence 1 of" in output
    assert "data: 9 documents" in output
    assert "% filled" in output


def test_the_command_stops_at_a_fault(make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path) -> None:
    path = write_rows([{"prompt": "", "completion": "answer"}])
    result = preview(make_config(path, format="prompt-completion"), tmp_path)
    error = result.exception
    assert isinstance(error, UserError)
    assert says(str(error), "data, sequence 1, document 1: all")
