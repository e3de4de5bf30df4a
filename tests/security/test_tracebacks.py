"""No traceback on the screen: packages that are missing, output that cannot be written, values that
no run writes.

Every command in an environment without torch is in tests/integration/test_metrics_command.py's
`torch_free`.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.unit.reporting.runs import write_run

from drillyard.cli import main as cli
from drillyard.config.data_checks import normalized_sources
from drillyard.config.environment import EnvironmentText
from drillyard.config.load import load_run_config, save_resolved
from drillyard.data.chat_template import ChatRenderer
from drillyard.errors import UserError

ROOT = Path(__file__).parents[2]
RUN = """
name: trial
model: {config: {architecture: gpt2, n_embd: 32, n_layer: 2, n_head: 4}, init: random}
data: {source: "${env:ROWS}", format: text, sequence_length: 64, cache_directory: "${env:ROWS}-cache",
       tokenizer: {train: bpe, vocab_size: 320}}
training: {steps: 4, device: cpu, precision: fp32, micro_batch_size: 2, optimizer: {learning_rate: 0.001}}
"""  # noqa: E501


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and stderr of a command in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return int(ended.value.code or 0), error


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the command `raise` print and raise this."""

    def raising(error: BaseException | None, prints: str = "") -> None:
        class Module:
            @staticmethod
            def register(app: typer.Typer) -> None:
                @app.command("raise")
                def raise_it() -> None:
                    print(prints)
                    if error is not None:
                        raise error

        monkeypatch.setitem(sys.modules, "drillyard.cli.raising", Module)  # type: ignore[arg-type]
        monkeypatch.setitem(cli.COMMANDS, "raise", cli.Command("drillyard.cli.raising", "Raise."))

    return raising


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by\nzero"), RecursionError(), MemoryError(), AssertionError()]
)
def test_a_bug_is_two_lines_and_a_private_file_with_its_traceback(
    command: Callable[..., None],
    error: Exception,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command(error)
    code, output = run(capsys, "raise")
    assert code == 70
    assert output.startswith(f"error: unexpected {type(error).__name__}")
    assert output.count("\n") == 2
    (file,) = tmp_path.iterdir()
    assert str(file) in output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "in raise_it" in file.read_text()


def test_a_traceback_that_cannot_be_saved_is_printed(
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    command(ZeroDivisionError())
    with pytest.raises(SystemExit) as ended:
        cli.main(["raise"])
    assert ended.value.code == 70
    assert "in raise_it" in capsys.readouterr().err


def test_a_traceback_that_a_full_disk_cuts_leaves_no_file(
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    full = tmp_path / "drillyard-error-x.txt"

    def on_a_full_disk(**unused: object) -> tuple[int, str]:
        full.touch()
        return os.open("/dev/full", os.O_WRONLY), str(full)

    monkeypatch.setattr(tempfile, "mkstemp", on_a_full_disk)
    command(ZeroDivisionError())
    with pytest.raises(SystemExit) as ended:
        cli.main(["raise"])
    assert ended.value.code == 70
    assert "in raise_it" in capsys.readouterr().err
    assert not full.exists()


def test_a_secret_in_an_exception_is_neither_printed_nor_saved(
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HUB_TOKEN", "hf_0123456789abcdef")
    token = EnvironmentText("${env:HUB_TOKEN}")
    command(RuntimeError(f"{'x' * 280}https://user:{token}@host refused"))
    assert "hf_012" not in run(capsys, "raise")[1]
    (file,) = tmp_path.iterdir()
    assert "${env:HUB_TOKEN}" in file.read_text()
    assert "hf_012" not in file.read_text()


def test_a_rank_leaves_its_traceback_in_its_log(
    command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    command(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["raise"])


def test_every_package_of_an_extra_is_known_by_its_module() -> None:
    from drillyard.cli.process_exit import MODULES_OF_EXTRAS

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    del extras["dev"]
    wanted = {
        extra: {
            re.split(r"[>=<\[]", each)[0].partition("google-")[0].replace("-", "_") or "google"
            for each in packages
        }
        for extra, packages in extras.items()
    }
    assert {extra: set(modules) for extra, modules in MODULES_OF_EXTRAS.items()} == wanted


def test_every_module_of_an_extra_is_imported_by_the_package() -> None:
    from drillyard.cli.process_exit import MODULES_OF_EXTRAS

    source = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    imported = {
        name
        for modules in MODULES_OF_EXTRAS.values()
        for name in modules
        if re.search(IMPORTS.format(name), source)
    }
    assert imported == {name for modules in MODULES_OF_EXTRAS.values() for name in modules}


IMPORTS = r'(?m)^ *(import|from) {0}\b|_installed\(\s*"{0}"|^_PACKAGES = [^}}]*: "{0}"'


WITHOUT_EXTRAS = """
import importlib.util, json, sys

MISSING = ("torch", "transformers", "tokenizers", "pyarrow", "safetensors", "datasets")

class NotInstalled:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in MISSING else found(name)
sys.meta_path.insert(0, NotInstalled)
from drillyard.cli.main import main

for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        print("code", ended.code, file=sys.stderr)
"""


def test_a_command_that_needs_an_extra_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    write_run(tmp_path / "trial", steps=2)
    (tmp_path / "trial/final").mkdir()
    model = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (tmp_path / "trial/final/config.json").write_text(json.dumps(model))
    commands = [
        "data preview run.yaml",
        "data show trial --step 1",
        "eval trial --data rows.jsonl",
        "train run.yaml",
    ]
    commands.append("chaos run.yaml")
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            WITHOUT_EXTRAS,
            json.dumps([command.split() for command in commands]),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ROWS": "rows.jsonl"},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("pip install 'drillyard[train]'") == len(commands)
    assert ended.stderr.count("code 2\n") == len(commands)


def test_a_full_disk_behind_the_output_is_an_error_of_one_line() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "drillyard", "schema", "run"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment,
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"error: cannot write the output: ")
    assert ended.stderr.count(b"\n") == 1


def test_names_that_the_output_cannot_encode_are_printed_escaped(
    command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding="ascii") as ascii_only:
        monkeypatch.setattr(sys, "stdout", ascii_only)
        command(None, prints="pr\u00fcfung-\udce9.log")
        with pytest.raises(SystemExit) as ended:
            cli.main(["raise"])
        assert ended.value.code == 0
        assert written.getvalue() == b"pr\\xfcfung-\\udce9.log\n"


def test_a_closed_output_is_no_error() -> None:
    words = f"exec {sys.executable} -m drillyard --version >&-"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(["sh", "-c", words], env=environment, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("field", ["memory_gib", "step_seconds", "missing", "verdict"])
@pytest.mark.parametrize("value", ["x", [1], {"low": "x", "high": None}, {"high": 1}], ids=repr)
def test_an_odd_estimate_does_not_end_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    directory = write_run(tmp_path / "trial", steps=2)
    estimate = {
        "time": "2026-01-31T12:00:00.000000Z",
        "event": "estimate",
        "verdict": "fits",
        field: value,
    }
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps(estimate) + "\n")
    assert run(capsys, "report", str(directory))[0] == 0


@pytest.mark.parametrize("command", ["metrics", "report", "watch", "diff"])
@pytest.mark.parametrize(
    "value",
    ["x", [1], {"a": 1}, 10**400, 10**30, 1e308, -1e308, -1],
    ids=lambda value: f"{value!r:.9}",
)
def test_an_odd_value_of_a_step_is_named_with_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, value: object
) -> None:
    directory = write_run(tmp_path / "trial", steps=4)
    for name in ("metrics.jsonl", "events.jsonl"):
        records = [json.loads(line) for line in (directory / name).read_text().splitlines()]
        for record in records:
            if record.get("step") == 3:
                record.update(dict.fromkeys(["step_seconds", "loss", "mfu", "memory_gib"], value))
            if record.get("step") == 2 and "event" in record:
                record["step"] = value
        (directory / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    code, output = run(
        capsys, command, str(directory), *([str(directory)] if command == "diff" else [])
    )
    assert code in (0, 1, 2)
    assert code != 2 or str(directory) in output


@pytest.mark.parametrize(
    "template", ["{% for i in range(10 ** 9) %}x{% endfor %}", "{{ range(10 ** 30) }}"]
)
def test_a_range_in_a_chat_template_that_is_too_long_is_refused(template: str) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    renderer = ChatRenderer(template, {}, "all")
    # Earlier versions had this method.
    render: Any = getattr(renderer, "render", None) or renderer.segments  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"rows\.jsonl:3"):
        render(row, "rows.jsonl:3")


def test_a_saved_config_is_compared_without_the_variables_it_refers_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drillyard.config.run_identity import differences

    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.setenv("ROWS", "secret-place/rows.jsonl")
    config = load_run_config(tmp_path / "run.yaml")
    save_resolved(config, tmp_path / "saved.yaml")
    with monkeypatch.context() as unset:
        unset.delenv("ROWS")
        saved = load_run_config(tmp_path / "saved.yaml", resolve_environment=False)
        assert [source.path for source in normalized_sources(saved.data.source)] == ["${env:ROWS}"]
        assert differences(saved, saved) == []
    assert differences(saved, config) == []
    assert [source.path for source in normalized_sources(config.data.source)] == [
        "secret-place/rows.jsonl"
    ]
    assert "secret-place" not in repr(normalized_sources(config.data.source))


def test_data_of_a_finished_run_need_the_variables_they_refer_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drillyard.config.load import resolve_section_secrets

    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.delenv("ROWS", raising=False)
    config = load_run_config(tmp_path / "run.yaml", resolve_environment=False)
    with pytest.raises(UserError, match=r"run\.yaml:4: data\.source:.*ROWS"):
        resolve_section_secrets(config, "data")
    monkeypatch.setenv("ROWS", "here")
    assert resolve_section_secrets(config, "data").data.cache_directory == "here-cache"


@pytest.mark.parametrize("sign", [1, -1])
def test_losses_at_the_ends_of_the_range_are_measured_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sign: int
) -> None:
    directory = write_run(tmp_path / "trial", steps=8)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        record["loss"] = sign * (1e308 if number % 2 else -1e308)
    (directory / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(record)}\n" for record in records)
    )
    code, output = run(capsys, "metrics", str(directory))
    assert code == 0 or (code == 2 and str(directory) in output)
