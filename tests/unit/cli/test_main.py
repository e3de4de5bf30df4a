"""How `drillyard` starts, finds its commands, and ends."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.facts import says

from drillyard.cli import main as cli
from drillyard.errors import UserError
from drillyard.version import __version__


def drillyard(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "drillyard", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        **options,  # type: ignore[call-overload]
    )


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A command `raise` that raises what is put in this list."""
    raised: list[BaseException] = []

    class Module:
        @staticmethod
        def register(app: typer.Typer) -> None:
            @app.command("raise")
            def raise_it() -> None:
                raise raised[0]

    monkeypatch.setitem(sys.modules, "drillyard.cli.raising", Module)  # type: ignore[arg-type]
    monkeypatch.setitem(cli.COMMANDS, "raise", cli.Command("drillyard.cli.raising", "Raise."))
    return raised


def test_help_lists_every_command_with_its_line_and_imports_none() -> None:
    code = (
        "import sys; sys.argv = ['drillyard', '--help']\n"
        "import atexit; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr))\n"
        "from drillyard.cli.main import main; main()"
    )
    environment = {**os.environ, "COLUMNS": "120", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0
    for name, row in cli.COMMANDS.items():
        assert f" {name} " in ended.stdout
        assert row.help in ended.stdout
    imported = set(ended.stderr.split())
    assert (
        imported & {"torch", "transformers", "pydantic", "yaml", "numpy", "drillyard.config"}
        == set()
    )
    assert imported & {row.module for row in cli.COMMANDS.values()} == set()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_of_the_table_is_registered_under_its_name(name: str) -> None:
    assert cli.load_command(name).name == name


def test_help_flows_and_keeps_its_paragraphs() -> None:
    for command in (cli.load_command("metrics"), cli.load_command("runs").commands["cancel"]):
        paragraphs = command.help.split("\n\n")
        assert len(paragraphs) >= 3
        assert not any("\n" in paragraph or "  " in paragraph for paragraph in paragraphs)


def test_the_version_is_the_packages() -> None:
    ended = drillyard("--version")
    assert (ended.returncode, ended.stdout) == (0, f"drillyard {__version__}\n")
    assert importlib.metadata.version("drillyard") == __version__


def test_a_mistyped_command_is_reported_with_the_one_that_was_meant() -> None:
    ended = drillyard("trian", "run.yaml")
    assert ended.returncode == 2
    assert says(ended.stderr, "'trian' ... 'train'")
    assert ended.stdout == ""


def test_no_command_shows_the_help() -> None:
    ended = drillyard()
    assert ended.returncode == 2
    assert "schema" in ended.stdout + ended.stderr


def test_a_users_error_is_reported_without_a_traceback_and_exits_with_2(
    command: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    command.append(UserError("run.yaml:7: first\nrun.yaml:9: second"))
    assert run("raise") == 2
    assert capsys.readouterr().err == "error: run.yaml:7: first\n       run.yaml:9: second\n"


def test_an_interrupt_exits_with_130(command: list[BaseException]) -> None:
    command.append(KeyboardInterrupt())
    assert run("raise") == 130


def test_a_commands_own_exit_code_is_kept(command: list[BaseException]) -> None:
    command.append(typer.Exit(85))
    assert run("raise") == 85


def test_the_word_error_is_red_on_a_terminal_unless_colours_are_unwanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for unwanted, message in ((False, b"\x1b[1;31merror:\x1b[0m no"), (True, b"error: no")):
        monkeypatch.setenv("NO_COLOR", "1") if unwanted else monkeypatch.delenv(
            "NO_COLOR", raising=False
        )
        master, slave = pty.openpty()
        with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", terminal)
            cli.print_error("no")
            terminal.flush()
            assert os.read(master, 100).strip() == message
        os.close(master)


@pytest.mark.parametrize("arguments", [["schema", "run"], ["--version"]])
def test_a_reader_that_goes_away_is_not_an_error(arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "drillyard", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment,
    )
    os.close(write)
    assert ended.stderr == b""
    assert ended.returncode == 1


def test_schema_prints_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    for which in ("run", "cluster"):
        assert run("schema", which) == 0
        assert json.loads(capsys.readouterr().out)["type"] == "object"


def test_init_writes_two_files_and_refuses_to_write_them_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("init", str(tmp_path / "new")) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert set(written) == {"run.yaml", "cluster.yaml"}
    assert f"drillyard train {tmp_path / 'new' / 'run.yaml'}" in capsys.readouterr().out
    assert run("init", str(tmp_path / "new")) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate", "run.yaml", "--nodes", "x"], "'x' ... whole number"),
        (["metrics", "train.log", "--num-gpus", "1.5"], "'1.5' ... whole number"),
        (["estimate", "run.yaml", "--price-per-gpu-hour", "x"], "'x' ... a number"),
        (["train", "run.yaml", "--watchdog", "-5"], "found '-5'; allowed: >= 0"),
        (["export", "a", "b", "--dtype", "int8"], "'int8' ... 'float32', 'bfloat16', 'float16'"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused_in_our_words(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(*arguments) == 2
    shown = capsys.readouterr().err
    assert says(shown, words) and "Value error" not in shown and "Input should" not in shown
