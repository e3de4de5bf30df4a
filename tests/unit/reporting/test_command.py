"""`drillyard report` as it is called: what it takes, what it writes where, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import typer
from tests.facts import says
from tests.unit.reporting import runs
from tests.unit.reporting.test_log_content import write_log
from typer.main import get_group

from drillyard.cli.main import main
from drillyard.cli.report import register
from drillyard.safe_files import write_output


def call(*arguments):
    """The exit code of `drillyard report`."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    return ended.value.code or 0


def test_a_run_directory_gets_its_report(tmp_path, capsys):
    directory = runs.write_run(tmp_path / "trial", steps=10)
    assert call(directory) == 0
    assert capsys.readouterr().out.startswith(f"{directory}/report.html (")
    assert "<h1>trial" in (directory / "report.html").read_text()


def test_a_report_goes_where_it_is_asked_for(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=10)
    assert call(directory, "--output", tmp_path / "own.html") == 0
    assert (tmp_path / "own.html").is_file() and not (directory / "report.html").exists()


def test_a_file_that_is_no_report_is_replaced_only_on_request(tmp_path, capsys):
    directory = runs.write_run(tmp_path / "trial", steps=10)
    config, link = directory / "run.yaml", tmp_path / "link.html"
    before = config.read_bytes()
    link.symlink_to(config)
    for path in (config, link):
        assert call(directory, "--output", path) == 2
        assert "--overwrite" in capsys.readouterr().err and config.read_bytes() == before
    neighbour = tmp_path / "own.html.tmp"
    neighbour.write_text("mine")
    for _ in range(2):
        assert call(directory, "--output", tmp_path / "own.html") == 0
    assert neighbour.read_text() == "mine"
    assert call(directory, "--output", link, "--overwrite") == 0
    assert link.is_symlink() and config.read_text().startswith("<!doctype html>")


def edited_in_the_middle(page: bytes) -> bytes:
    return page.replace(b"<h1>", b"<h1>My ")


def edited_at_the_end(page: bytes) -> bytes:
    return page + b"<!-- Discussed on Monday -->\n"


@pytest.mark.parametrize("edited", [edited_in_the_middle, edited_at_the_end])
def test_a_report_that_somebody_edited_is_replaced_only_on_request(tmp_path, capsys, edited):
    directory = runs.write_run(tmp_path / "trial", steps=10)
    assert call(directory) == 0
    page = directory / "report.html"
    page.write_bytes(edited(page.read_bytes()))
    before = page.read_bytes()
    assert call(directory) == 2
    assert "--overwrite" in capsys.readouterr().err and page.read_bytes() == before
    assert call(directory, "--overwrite") == 0 and page.read_bytes() != before
    assert call(directory) == 0


def test_a_report_goes_into_a_pipe(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=10)
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE)
    try:
        assert call(directory, "--output", tmp_path / "pipe") == 0
        assert (tmp_path / "pipe").is_fifo()
        assert reader.communicate()[0].startswith(b"<!doctype html>")
    finally:
        reader.kill()
        reader.wait()


def test_a_log_of_any_framework_gets_one_in_the_working_directory(tmp_path, monkeypatch):
    log = write_log(tmp_path / "run.log")
    monkeypatch.chdir(tmp_path)
    facts = (
        "--accelerator",
        "b200",
        "--num-gpus",
        16,
        "--params",
        "70.55B",
        "--batch-size-per-gpu",
        8,
    )
    assert call(log, *facts, "--sequence-length", 4096, "--price-per-gpu-hour", 8.05) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<h1>run.log" in page and "6N" in page and "$8.05 per GPU-hour" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}", "--accelerator", "b200", "--timezone", "UTC"], "--accelerator, --timezone"),
        (["{run}", "{run}"], "one run"),
        (["{tmp}/nothing"], "nothing"),
        (["{run}", "--output", "{tmp}/missing/own.html"], "--output FILE writes elsewhere"),
        (["{run}", "--price-per-gpu-hour", "-1"], "--price-per-gpu-hour -1"),
    ],
)
def test_what_cannot_be_is_the_users_to_change(tmp_path, capsys, arguments, words):
    directory = runs.write_run(tmp_path / "trial", steps=4)
    assert call(*(argument.format(run=directory, tmp=tmp_path) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says(error, words)


def test_every_flag_that_a_report_asks_for_is_one_it_has(tmp_path, monkeypatch):
    log = write_log(tmp_path / "run.log")
    monkeypatch.chdir(tmp_path)
    assert call(log) == 0
    asked = set(
        re.findall(
            r"--[a-z][a-z-]+",
            "".join(re.findall(r"Missing: [^<]*", (tmp_path / "report.html").read_text())),
        )
    )
    assert "--price-per-node-hour" in asked
    alone = typer.Typer()
    register(alone)
    command = get_group(alone).commands["report"]
    assert asked <= {flag for option in command.params for flag in option.opts}
    facts = (
        "--num-gpus",
        16,
        "--accelerator",
        "b200",
        "--params",
        "70.55B",
        "--active-params",
        "10B",
    )
    range_of_steps = ("--start-step", 4, "--end-step", 9)
    assert (
        call(log, *facts, *range_of_steps, "--price-per-node-hour", 64.4, "--gpus-per-node", 8) == 0
    )
    page = (tmp_path / "report.html").read_text()
    assert "$8.05 per GPU-hour" in page


def test_an_interrupted_report_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    write_output(page, b"old", overwrite=False)
    old = page.read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_output(page, b"new", overwrite=False)
    assert list(tmp_path.iterdir()) == [page] and page.read_bytes() == old
