"""`drillyard generate`, also called `drillyard chat`: a saved model answers a prompt, a file of
prompts, or a person at the terminal.

Standard output has the answers and nothing else; notes and errors go to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drillyard.cli.options import TrustConfig, find_run, print_json, print_trusted
from drillyard.cli.torch_import import import_without_collection

if TYPE_CHECKING:
    from drillyard.data.raw_batches import Row
    from drillyard.errors import UserError
    from drillyard.evaluation.generate import Sampling
    from drillyard.training.saved_generation import Answer, AnsweringModel, Opening, Prompt

CHAT_HELP = "Type a message. /clear forgets the conversation; /exit or Ctrl-D ends."


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("generate")(generate)
    app.command("chat")(generate)


def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A run (its directory or name), a checkpoint, an adapter, a model directory, or a"
            " Hugging Face id."
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Option(help="The prompt. Default: a chat in a terminal, else standard input."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="A file of prompts, JSON lines: {prompt}, {messages, tools}, or rows as the model"
            " was trained on. Prints a JSON object for each.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    tools: Annotated[
        Path | None,
        typer.Option(help="A JSON file with a list of tools (JSON schemas) that may be called."),
    ] = None,
    template: Annotated[
        bool | None,
        typer.Option(
            "--template/--no-template",
            help="Prompts go through the model's chat template, or are continued as they are.",
            show_default="as the model was trained",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Another model, such as the base: its answers beside.", metavar="MODEL"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, help="0: always the most likely token; above: drawn.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens of this share.")
    ] = 1,
    top_k: Annotated[
        int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0: all.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the draws.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of --input at a time.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as a JSON object.")
    ] = False,
    trust_config: TrustConfig = False,
) -> None:
    """Let MODEL answer: a prompt, a file of prompts, or you in a chat.

    Prompts go through the model's own chat template where it was trained on chats, and otherwise as
    plain text. Answers are greedy unless --temperature is given. In a terminal the answer appears
    as it is made; a pipe gets the text alone.
    """
    from drillyard.errors import UserError
    from drillyard.training.saved_generation import (
        LONGEST_PROMPT_BYTES,
        Opening,
        read_questions,
    )

    if prompt is not None and file is not None:
        raise UserError("--prompt and --input: give one of them")
    if temperature == 0 and (top_p != 1 or top_k):
        raise UserError("--top-p and --top-k need --temperature above 0, such as 0.7")
    if template is False and (system is not None or tools is not None):
        raise UserError("--system and --tools need the model's chat template: drop --no-template")
    opening = Opening(system, () if tools is None else tuple(_read_tools(tools)))
    names = [_model_argument(name) for name in (model, compare) if name is not None]
    if file is None and prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read(LONGEST_PROMPT_BYTES + 1)
        if len(prompt) > LONGEST_PROMPT_BYTES:
            raise UserError(
                f"standard input has more than {LONGEST_PROMPT_BYTES >> 20} MiB, which no context"
                " holds; give many prompts by --input FILE"
            )
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt is empty: give --prompt TEXT, or text on standard input")
    # Before torch is imported and a model loaded.
    questions = [] if file is None else list(read_questions(file))
    answering = _open_models(names, template, trust_config=trust_config)
    from drillyard.evaluation.generate import Sampling
    from drillyard.parallel.ranks import stop_ranks

    sampling = Sampling(temperature, top_p, top_k, seed) if temperature else None
    settings = _Settings(max_new_tokens, sampling)
    try:
        if file is not None:
            _answer_file(answering, file, questions, opening, settings, batch_size)
        elif prompt is not None:
            _answer_prompt(answering, prompt, opening, settings, as_json=as_json)
        else:
            _chat(answering, opening, settings)
    finally:
        stop_ranks()


@dataclass(frozen=True)
class _Settings:
    max_new_tokens: int
    sampling: Sampling | None


def _model_argument(name: str) -> str:
    """The model that an argument names: of a run its final/ or newest checkpoint, which is said."""
    from drillyard.training.saved_model import find_in_run

    path = find_run(Path(name), is_model=True)
    if not path.exists():
        return name
    found = find_in_run(path)
    if found != path:
        typer.echo(f"{path} is a run; taking {found}", err=True)
    return str(found)


def _open_models(
    names: list[str], template: bool | None, *, trust_config: bool
) -> list[AnsweringModel]:
    """The models in memory. Mistakes in all names are found before the first is loaded."""
    from drillyard.training.saved_generation import find_model, open_model
    from drillyard.training.saved_model import fetch_limits_of

    for name in names:
        saved, _ = find_model(name)
        if trust_config and saved is not None:
            print_trusted(fetch_limits_of(saved, typed={name}))
    import_without_collection("drillyard.training.model_setup")
    return [open_model(name, use_template=template, trust_config=trust_config) for name in names]


def _read_tools(path: Path) -> list[Row]:
    from drillyard.data.chat_messages import normalised_tools
    from drillyard.data.tool_schemas import openai_tool
    from drillyard.errors import UserError
    from drillyard.guarded_files import read_json

    try:
        value = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is not JSON: {error}"
        raise UserError(f"{path}: {reason}. Give a JSON list of tools.") from None
    found = normalised_tools(value if isinstance(value, list) else [value], str(path)) or []
    return [openai_tool(tool, str(path)) for tool in found]


def _prompt_of(model: AnsweringModel, row: Row, where: str, opening: Opening) -> Prompt:
    """The prompt of a row, whose notes are printed. Raises UserError where it does not fit."""
    prompt = model.prompt(row, where, opening)
    for note in prompt.notes:
        typer.echo(f"note: {note}", err=True)
    model.room(prompt, where)
    return prompt


def _answer_prompt(
    models: list[AnsweringModel], text: str, opening: Opening, settings: _Settings, *, as_json: bool
) -> None:
    prompts = [_prompt_of(model, {"prompt": text}, "the prompt", opening) for model in models]
    streamed = len(models) == 1 and not as_json and sys.stdout.isatty()
    answers = [
        _answer(model, prompt, settings, 0, _write if streamed else None)
        for model, prompt in zip(models, prompts, strict=True)
    ]
    if as_json:
        print_json(_objects(models, prompts, answers), indent=None)
    elif len(models) > 1:
        _print_beside(models, answers)
    else:
        typer.echo("" if streamed else answers[0].text)


def _answer(
    model: AnsweringModel,
    prompt: Prompt,
    settings: _Settings,
    number: int,
    on_text: Callable[[str], None] | None,
) -> Answer:
    return model.answers(
        [prompt],
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling,
        numbers=[number],
        on_text=on_text,
    )[0]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _objects(
    models: list[AnsweringModel], prompts: list[Prompt], answers: list[Answer]
) -> dict[str, Any]:
    """The JSON object of one prompt: the first model's answer, and that of the other under
    `compared`."""
    found = [
        {
            "model": model.name,
            "prompt": prompt.text,
            "answer": answer.text,
            "prompt_tokens": len(prompt.tokens),
            "answer_tokens": len(answer.tokens),
            "finish_reason": answer.finish_reason,
        }
        for model, prompt, answer in zip(models, prompts, answers, strict=True)
    ]
    return found[0] if len(found) == 1 else {**found[0], "compared": found[1]}


def _print_beside(models: list[AnsweringModel], answers: list[Answer]) -> None:
    """The answers side by side in a terminal, one below the other elsewhere."""
    from rich.table import Column, Table
    from rich.text import Text

    from drillyard.console import SafeConsole

    if not sys.stdout.isatty():
        for model, answer in zip(models, answers, strict=True):
            typer.echo(f"--- {model.name}\n{answer.text}")
        return
    table = Table(*(Column(model.name, overflow="fold", ratio=1) for model in models), expand=True)
    table.add_row(*(Text(answer.text) for answer in answers))
    SafeConsole().print(table)


def _answer_file(
    models: list[AnsweringModel],
    file: Path,
    questions: list[tuple[str, Row | UserError]],
    opening: Opening,
    settings: _Settings,
    batch_size: int,
) -> None:
    """Print a JSON object for each line of a file, in its order: answers, or the error of the line.

    UserError where every line is at fault.
    """
    from drillyard.errors import UserError

    at_fault = 0
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        rows = [(where, _prompts_of_row(models, row, opening, where)) for where, row in batch]
        good = [prompts for _, prompts in rows if not isinstance(prompts, UserError)]
        numbers = [
            start + place
            for place, (_, prompts) in enumerate(rows)
            if not isinstance(prompts, UserError)
        ]
        by_model = [
            model.answers(
                list(prompts),
                max_new_tokens=settings.max_new_tokens,
                sampling=settings.sampling,
                numbers=numbers,
            )
            for model, prompts in zip(models, zip(*good, strict=True), strict=False)
        ]
        answered = iter(zip(*by_model, strict=True))
        for where, prompts in rows:
            if isinstance(prompts, UserError):
                at_fault += 1
                print_json({"line": _line_of(where), "error": str(prompts)}, indent=None)
            else:
                found = _objects(models, prompts, list(next(answered)))
                print_json({"line": _line_of(where), **found}, indent=None)
        sys.stdout.flush()
    if at_fault == len(questions):
        reason = "every line is at fault, see above" if at_fault else "has no prompts"
        raise UserError(f"{file}: {reason}")
    if at_fault:
        typer.echo(f"{file}: {at_fault} of {len(questions)} lines at fault", err=True)


def _prompts_of_row(
    models: list[AnsweringModel], row: Row | UserError, opening: Opening, where: str
) -> list[Prompt] | UserError:
    """The prompt of a row for each model, or what is wrong with the row."""
    from drillyard.errors import UserError

    if isinstance(row, UserError):
        return row
    try:
        return [_prompt_of(model, row, where, opening) for model in models]
    except UserError as error:
        return error


def _line_of(where: str) -> int:
    return int(where.rpartition(":")[2])


def _chat(models: list[AnsweringModel], opening: Opening, settings: _Settings) -> None:
    """A conversation in the terminal; each model goes on with its own answers. Ctrl-C ends an
    answer, or the chat."""
    import contextlib

    from drillyard.errors import UserError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() gets its line editing and history

    typer.echo(CHAT_HELP, err=True)
    conversations: list[list[Row]] = [[] for _ in models]
    turn = 0
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            typer.echo("", err=True)
            return
        if text == "/exit":
            return
        if text == "/clear":
            conversations = [[] for _ in models]
        if not text or text == "/clear":
            continue
        for model, messages in zip(models, conversations, strict=True):
            messages.append({"role": "user", "content": text})
            row: Row = {"prompt": text} if model.renderer is None else {"messages": messages}
            if len(models) > 1:
                typer.echo(f"--- {model.name}")
            pieces: list[str] = []

            def on_text(piece: str, pieces: list[str] = pieces) -> None:
                pieces.append(piece)
                _write(piece)

            try:
                _answer(model, _prompt_of(model, row, "the chat", opening), settings, turn, on_text)
            except UserError as error:
                typer.echo(f"{error}, or forget the conversation: /clear", err=True)
                messages.pop()
                continue
            except KeyboardInterrupt:
                typer.echo(" [interrupted]", err=True)
            typer.echo("")
            messages.append({"role": "assistant", "content": "".join(pieces)})
        turn += 1
