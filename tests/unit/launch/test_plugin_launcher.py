"""Another distribution (plugin_launcher/) adds a launcher without a change of `src/`; a broken one
costs a line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import drillyard
from drillyard.cli import main as cli
from drillyard.config.cluster import cluster_model
from drillyard.config.platforms import platforms
from drillyard.plugins import load_plugins

DISTRIBUTION = Path(__file__).with_name("plugin_launcher")
MODULE = (DISTRIBUTION / "acme_queue.py").read_text()
QUEUE = """\
#!/bin/sh
# A scheduler that starts every job at once and lets it run until it is deleted: $ACME_SPOOL/NAME is a job.
set -eu
case "$1" in
put)
    echo "$2 running $3" >"$ACME_SPOOL/$2"
    echo "2026-01-31T12:00:00.000000Z step 1 of 10" >"$(dirname "$3")/node-0.log" ;;
list) cat "$ACME_SPOOL"/* 2>/dev/null || : ;;
delete) sed -i 's/ running / cancelled /' "$ACME_SPOOL/$2" ;;
esac
"""  # noqa: E501
RUN = "name: {name}\nworkload: {{command: [echo, hello], per: node}}\n"
CLUSTER = """\
name: lab
platform: acme
processes_per_node: 1
acme: {{priority: {priority}}}
storage: {{directory: {storage}}}
"""
Install = Callable[..., None]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, built from its pyproject.toml."""
    source = tmp_path_factory.mktemp("acme")
    shutil.copytree(DISTRIBUTION, source, dirs_exist_ok=True)
    build = "import sys, hatchling.build as build; print(build.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(source)],
        cwd=source,
        capture_output=True,
        text=True,
        check=True,
    )
    return source / done.stdout.split()[-1]


@pytest.fixture
def install(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install the distribution into a directory of sys.path, with another module or entry point
    name where given."""
    before = set(sys.modules)

    def install(source: str = MODULE, name: str = "acme") -> None:
        site = tmp_path / "site"
        zipfile.ZipFile(wheel).extractall(site)
        (site / "acme_queue.py").write_text(source)
        entries = next(site.glob("*.dist-info")) / "entry_points.txt"
        entries.write_text(entries.read_text().replace("acme = ", f"{name} = "))
        monkeypatch.syspath_prepend(str(site))
        forget()

    def forget() -> None:
        for cached in (load_plugins, platforms, cluster_model):
            cached.cache_clear()

    yield install
    for loaded in set(sys.modules) - before:
        if loaded == "acme_queue":
            del sys.modules[loaded]
    forget()


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scheduler on PATH, and a working directory with both configs. Returns its spool
    directory."""
    for name in ("bin", "spool", "here"):
        (tmp_path / name).mkdir()
    program = tmp_path / "bin" / "acme"
    program.write_text(QUEUE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("ACME_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "here")
    Path("run.yaml").write_text(RUN.format(name="first"))
    Path("cluster.yaml").write_text(CLUSTER.format(priority=7, storage=tmp_path / "storage"))
    return tmp_path / "spool"


class Command:
    """A command's exit code and output."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        capsys.readouterr()
        self.code: int | str = 0
        try:
            cli.main(list(arguments))
        except SystemExit as ended:
            self.code = ended.code or 0
        self.out, self.err = capsys.readouterr()


Capture = pytest.CaptureFixture[str]


def with_facts(fact: str) -> str:
    """The module with one of its facts replaced, or added."""
    name = fact.partition("=")[0]
    source = re.sub(rf"(?m)^        {name}=.*\n", "", MODULE)
    return source.replace("PlatformFacts(\n", f"PlatformFacts(\n        {fact},\n")


def test_plan_checks_submit_status_logs_and_cancel_work_through_the_commands(
    install: Install, queue: Path, capsys: Capture
) -> None:
    install()
    plan = json.loads(Command(capsys, "launch", "run.yaml", "--dry-run", "--json").out)
    assert (plan["handle"], plan["script"]) == ("acme://lab/first", "job.sh")
    assert "priority=7" in plan["files"][0]["content"]
    assert not list(queue.iterdir())

    refused = Command(capsys, "launch", "run.yaml", "--sync")
    assert refused.code == 2 and "--sync" in refused.err and "acme" in refused.err

    submitted = Command(capsys, "launch", "run.yaml")
    assert (submitted.code, submitted.out) == (0, "acme://lab/first\n")
    job = (queue.parent / "storage/runs/first/launch/job.json").read_text()
    assert json.loads(job)["command"] == ["echo", "hello"]
    assert Command(capsys, "launch", "run.yaml").code == 2

    status = json.loads(Command(capsys, "runs", "status", "first", "--json").out)
    assert (status["state"], status["over"]) == ("running", False)
    assert Command(capsys, "runs", "logs", "first").out == "0: step 1 of 10\n"
    assert "acme://lab/first" in Command(capsys, "runs", "list").out

    assert Command(capsys, "runs", "cancel", "first").code == 0
    assert "cancelled" in Command(capsys, "runs", "status", "first").out
    assert Command(capsys, "runs", "resume", "first").out == "acme://lab/first\n"
    assert "first running" in (queue / "first").read_text()


def test_the_public_functions_do_what_the_commands_do(
    install: Install, queue: Path, tmp_path: Path
) -> None:
    install()
    plan = drillyard.plan("run.yaml", "cluster.yaml")
    assert str(plan.handle) == "acme://lab/first" and plan.file("job.sh").mode == 0o755
    handle = drillyard.submit("run.yaml", "cluster.yaml", overrides=["name=second"])
    assert handle == "acme://lab/second"
    assert drillyard.status(handle).state == "running"
    assert list(drillyard.logs("second", tail=1)) == ["0: 2026-01-31T12:00:00.000000Z step 1 of 10"]
    assert (
        list(drillyard.logs("second", since="2026-02-01T00:00:00Z", cluster="cluster.yaml")) == []
    )
    for wanted in ({"sync": True}, {"after": handle}):
        with pytest.raises(drillyard.UserError, match=r"platform acme.*slurm"):
            drillyard.plan("run.yaml", **wanted)  # type: ignore[arg-type]
    with pytest.raises(drillyard.UserError, match="second"):
        drillyard.submit("run.yaml", overrides=["name=second"])
    drillyard.submit("run.yaml", overrides=["name=second"], replace=True)
    Path("cluster.yaml").write_text(CLUSTER.format(priority=12, storage=tmp_path))
    with pytest.raises(drillyard.UserError, match=r"cluster.yaml:4: acme.priority: 12"):
        drillyard.plan("run.yaml")


@pytest.mark.parametrize(
    ("source", "name", "missing"),
    [
        ("import no_such_module_anywhere\n", "acme", "no_such_module_anywhere"),
        ("raise RuntimeError('broken\\nfile')\n", "acme", "broken file"),
        (MODULE.replace("def plan(", "def other("), "acme", "plan"),
        (MODULE.replace("    facts = ", "    other = "), "acme", "facts"),
        ("class AcmeLauncher: pass\n", "acme", "Launcher"),
        (
            MODULE.replace("    facts = PlatformFacts(", "    facts = dict("),
            "acme",
            "PlatformFacts",
        ),
        ("import sys\nsys.exit(3)\n", "acme", "3"),
        (MODULE, "_acme", "_acme"),
        (MODULE, "slurm", "slurm"),
        (MODULE, "gke", "gke"),
        *(
            (MODULE, name, "key of cluster.yaml")
            for name in ("storage", "name", "hardware", "nodes", "cloud", "json")
        ),
        (with_facts("section=None"), "acme", "facts.section is None"),
        (with_facts("section=dict"), "acme", "facts.section is <class 'dict'>"),
        (with_facts("capabilities=None"), "acme", "facts.capabilities is None"),
        (with_facts("consumption=5"), "acme", "facts.consumption is 5"),
        (with_facts("required='acme'"), "acme", "facts.required is 'acme'"),
        (with_facts("required=('zzz.q',)"), "acme", "zzz.q"),
        (with_facts("required=('storage.q',)"), "acme", "storage.q"),
        (with_facts("optional=('acme.q',)"), "acme", "acme.q"),
        (
            MODULE.replace("priority: int = Field(default=5,", "priority: int = Field("),
            "acme",
            "acme.priority",
        ),
        (MODULE.replace("priority: int", 'priority: "Unknown"'), "acme", "Unknown"),
        (MODULE.replace("priority: int", "priority: Machine"), "acme", "Machine"),
    ],
)
def test_a_launcher_that_cannot_be_used_is_one_line(
    source: str, name: str, missing: str, install: Install, queue: Path, capsys: Capture
) -> None:
    install(source, name)
    Path("cluster.yaml").write_text("name: here\nplatform: local\nprocesses_per_node: 1\n")
    planned = Command(capsys, "launch", "run.yaml", "--dry-run", "--json")
    assert planned.code == 0 and json.loads(planned.out)["handle"] == "local://here/first"
    (line,) = planned.err.splitlines()
    assert "drillyard.launchers" in line and "acme-queue 1.2" in line and missing in line
    assert Command(capsys, "schema", "cluster").code == 0


def test_a_missing_setting_of_the_platforms_own_section_is_named(
    install: Install, queue: Path, capsys: Capture
) -> None:
    install(with_facts("required=('acme.priority',)"))
    Path("cluster.yaml").write_text("name: lab\nplatform: acme\nprocesses_per_node: 1\n")
    refused = Command(capsys, "launch", "run.yaml", "--dry-run")
    assert refused.code == 2 and "acme.priority: missing" in refused.err and "1 to 9" in refused.err
