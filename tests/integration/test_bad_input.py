"""What bad input gets: `error:` with what is wrong and what to do next, exit code 2, no traceback,
nothing overwritten.

Each case is a directory with a run.yaml that would train but for one mistake. The cases run beside
each other, two at a time; those whose mistake shows before ranks start must show it before ranks
start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.tiny_run import STEPS, drillyard, write_config, write_rows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

HUGE = {
    "architecture": "llama",
    "hidden_size": 32768,
    "intermediate_size": 131072,
    "num_hidden_layers": 100,
}


@dataclass(frozen=True)
class Case:
    """A mistake: settings that hold it, what is done to the case's directory, and the facts that
    the error names."""

    name: str
    words: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    spoil: Callable[[Path], None] = lambda directory: None
    before_ranks: bool = True
    """Whether the mistake shows before any rank starts."""
    on_existing_run: bool = False
    """Whether the directory holds the reference's run, stopped before its end."""


def write_row_7(directory: Path, line: bytes) -> None:
    lines = (directory / "rows.jsonl").read_bytes().splitlines()
    lines[6] = line
    (directory / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def row_7(line: bytes) -> Callable[[Path], None]:
    return lambda directory: write_row_7(directory, line)


def remove_rows(directory: Path) -> None:
    (directory / "rows.jsonl").rename(directory / "row.jsonl")


def empty_rows(directory: Path) -> None:
    (directory / "rows.jsonl").write_bytes(b"")


def one_more_row(directory: Path) -> None:
    with (directory / "rows.jsonl").open("a") as file:
        file.write(
            '{"schema": "CREATE TABLE t (a INT);", "question": "a?", "sql": "SELECT a FROM t"}\n'
        )


def remove_config(directory: Path) -> None:
    (directory / "bad.yaml").unlink()


CASES = [
    Case("missing run.yaml", ["bad.yaml", "drillyard init"], spoil=remove_config),
    Case(
        "mistyped key",
        ["bad.yaml:", "training.optimzer ... 'optimizer'"],
        {"training__optimzer": {"learning_rate": 1.0}},
    ),
    Case(
        "batch that does not divide",
        ["training.global_batch_size: 6 ... micro_batch_size 2 x 2 ... 4 or 8"],
        {"training__global_batch_size": 6},
        ["--nproc-per-node", "2"],
    ),
    Case("lora on random weights", ["model.lora", "remove lora"], {"model__lora": {}}),
    Case(
        "flex attention on a cpu",
        ["model.attention ... flex ... auto, sdpa, eager"],
        {"model__attention": "flex"},
    ),
    Case(
        "metric that does not fit the data",
        ["evaluation.metrics ... sql-execution ... data.format: text-to-sql ... text"],
        {"data__format": "text", "evaluation__metrics": ["sql-execution"]},
    ),
    Case(
        "several at once",
        ["model.lora", "model.attention", "training.schedule.warmup_steps"],
        {
            "model__lora": {},
            "model__attention": "flex",
            "training__schedule": {"warmup_steps": 1000},
        },
    ),
    Case(
        "resume from nowhere",
        ["checkpoint.resume ... runs/gone/step-00000003 ... auto or never"],
        {"checkpoint__resume": "runs/gone/step-00000003"},
    ),
    Case(
        "a different run",
        ["runs/reference", "training.seed: 0 -> 1", "`name`"],
        {"training__seed": 1},
        on_existing_run=True,
    ),
    Case(
        "another rate without a step left",
        ["runs/reference", "training.optimizer.learning_rate: 0.004 -> 0.001 ... training.steps"],
        {"training__optimizer": {"learning_rate": 1.0e-3}},
        ["--nproc-per-node", "2"],
        on_existing_run=True,
    ),
    Case(
        "checkpoints passed over",
        ["runs/reference", "checkpoint.resume ... never ... resume: auto"],
        {"checkpoint__resume": "never"},
        on_existing_run=True,
    ),
    Case(
        "another global batch",
        [f"step-{STEPS:08d}", "4 sequences ... 8 ... training.global_batch_size: 4"],
        {"training__micro_batch_size": 4},
        ["--nproc-per-node", "2"],
        on_existing_run=True,
    ),
    Case(
        "another number of ranks without a global batch",
        ["4 sequences ... 2 ... 2 ranks ... 1"],
        arguments=["--nproc-per-node", "1"],
        on_existing_run=True,
    ),
    Case(
        "data changed since the checkpoint",
        ["data.source rows ... rows.jsonl ... changed ... `name`"],
        # The reference's own, so that its saved run.yaml stays as it is to the byte.
        {"logging": {"tensorboard": True}},
        spoil=one_more_row,
        arguments=["--nproc-per-node", "2"],
        on_existing_run=True,
        before_ranks=False,
    ),
    Case(
        "missing data",
        ["rows.jsonl ... row.jsonl"],
        spoil=remove_rows,
        before_ranks=False,
    ),
    Case(
        "broken line of JSON",
        ["rows.jsonl", "line 7", "column 13"],
        {"data__on_error": "refuse"},
        spoil=row_7(b'{"schema": 1oops}'),
        before_ranks=False,
    ),
    Case(
        "missing column",
        ["rows.jsonl", "line 1", "completion", "schema, question, sql, text"],
        {"data__format": "prompt-completion", "data__columns": {"prompt": "question"}},
        before_ranks=False,
    ),
    Case(
        "not UTF-8",
        ["rows.jsonl", "line 7", "UTF-8"],
        {"data__on_error": "refuse"},
        spoil=row_7(b'{"text": "caf\xe9"}'),
        before_ranks=False,
    ),
    Case("empty data", ["rows", "empty"], spoil=empty_rows, before_ranks=False),
    Case(
        "too long",
        ["rows.jsonl", "line", "sequence_length", "too_long"],
        {"data__sequence_length": 16, "data__too_long": "error"},
        before_ranks=False,
    ),
    Case(
        "no chat template",
        ["chat template", "data.tokenizer"],
        {
            "data__format": "chat",
            "data__columns": {"messages": "messages"},
            "data__tokenizer": "words",
        },
        spoil=lambda directory: chat_rows(directory),
        before_ranks=False,
    ),
    Case(
        "unknown architecture",
        ["'mamba' ... llama"],
        {"model__config": {"architecture": "mamba", "hidden_size": 32}},
        before_ranks=False,
    ),
    Case(
        "model that does not fit",
        ["GiB per rank ... more ranks"],
        {"model__config": HUGE},
        before_ranks=False,
    ),
]


def chat_rows(directory: Path) -> None:
    """Chats, and a tokenizer without a chat template; one that is trained for chats has one."""
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(directory / "words")
    row = (
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello'
        ' there"}]}\n'
    )
    (directory / "rows.jsonl").write_text(row * 40)


@dataclass(frozen=True)
class Ended:
    """A command that has ended, the files before it and its directory."""

    process: subprocess.CompletedProcess[str]
    before: dict[Path, bytes]
    directory: Path


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def run_case(case: Case, directory: Path, reference: Path | None) -> Ended:
    write_rows(directory / "rows.jsonl", 40)
    config = write_config(directory, "bad", **case.settings)
    if reference is not None:
        take_over(reference, config)
    case.spoil(directory)
    before = files(directory)
    # Relative paths, as a user gives them.
    process = drillyard("train", config.name, *case.arguments, cwd=directory)
    return Ended(process, before, directory)


def take_over(reference: Path, config: Path) -> None:
    """Put a copy of the reference's run, not quite finished, where `config` would run, and give
    `config` its name."""
    directory = config.parent
    copy = directory / "runs" / "reference"
    shutil.copytree(reference, copy)
    shutil.rmtree(copy / "final")
    shutil.copy(reference.parent.parent / "rows.jsonl", directory)
    for path in (config, copy / "run.yaml"):
        text = path.read_text().replace(str(reference.parent.parent), str(directory))
        path.write_text(text.replace("name: bad\n", "name: reference\n"))


@pytest.fixture(scope="module")
def endings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Ended]]]:
    """The selected cases, running beside each other."""
    selected = [item.callspec.params["case"] for item in request.session.items if is_case(item)]
    existing = any(case.on_existing_run for case in selected)
    reference: Reference | None = request.getfixturevalue("reference") if existing else None
    with ThreadPoolExecutor(2) as pool:
        yield {
            case.name: pool.submit(
                run_case,
                case,
                tmp_path_factory.mktemp("bad"),
                reference.run.directory if reference and case.on_existing_run else None,
            )
            for case in selected
        }


def is_case(item: pytest.Item) -> bool:
    return "case" in getattr(getattr(item, "callspec", None), "params", {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_reported_and_nothing_is_lost(
    case: Case, endings: dict[str, Future[Ended]]
) -> None:
    ended = endings[case.name].result()
    assert_reported(ended.process, case.words)
    after = files(ended.directory)
    for path, content in ended.before.items():
        # Logs and events grow; everything else stays as it was.
        grows = path.suffix in (".jsonl", ".log") and path.name != "rows.jsonl"
        assert after[path].startswith(content) if grows else after[path] == content, path
    started_ranks = {path for path in after if path.parent.name == "logs"} - set(ended.before)
    assert not (case.before_ranks and started_ranks)


def assert_reported(process: subprocess.CompletedProcess[str], words: list[str]) -> None:
    """Exit code 2, and an error of one or two lines (one more per further mistake) with these
    facts."""
    errors = process.stderr
    assert process.returncode == 2, errors
    first, *more = errors.rstrip("\n").split("\n")
    assert (
        first.startswith("error: ")
        and len(more) <= 3
        and all(line.startswith("  ") for line in more)
    ), errors
    assert "Traceback" not in errors + process.stdout
    assert not [facts for facts in words if not says(errors, facts)], errors


def test_a_read_only_run_directory(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 40)
    runs = tmp_path / "runs"
    runs.mkdir()
    config = write_config(tmp_path, "bad")
    # root passes every permission check, but not a read-only mount.
    is_root = os.geteuid() == 0
    if is_root:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(runs)], check=True)
    else:
        runs.chmod(0o555)
    try:
        assert_reported(
            drillyard("train", config),
            [str(runs / "bad"), "Read-only" if is_root else "denied", "`output`"],
        )
    finally:
        if is_root:
            subprocess.run(["umount", str(runs)], check=True)
        else:
            runs.chmod(0o755)


def test_a_corrected_config_replaces_the_wrong_one(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 40)
    config = write_config(
        tmp_path, "corrected", model__config={"architecture": "mamba"}, training__steps=1
    )
    assert_reported(drillyard("train", config), ["'mamba'"])
    write_config(tmp_path, "corrected", training__steps=1)
    corrected = drillyard("train", config)
    assert corrected.returncode == 0, corrected.stderr
    assert (tmp_path / "runs" / "corrected" / "final" / "model.safetensors").exists()
