"""The public API: lazy, typed, and each function on the smallest real input."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reporting.conftest import run_directory

import drillyard
from drillyard.cli.options import RUN_FACTS
from drillyard.errors import ConfigError, MissingExtraError, NotFoundError, UnreachableError
from drillyard.measurement.user_facts import UserFacts
from drillyard.programs import Programs, Result

__all__ = ["run_directory"]
RUN = """
name: small
model: {config: {model_type: llama, vocab_size: 32000, hidden_size: 1024, intermediate_size: 2816,
  num_hidden_layers: 8, num_attention_heads: 16, num_key_value_heads: 8, max_position_embeddings: 4096}}
data: {source: builtin:text-to-sql, sequence_length: 1024}
training: {steps: 100, optimizer: {learning_rate: 1.0e-4}}
"""  # noqa: E501
VERTEX = """
name: v
platform: vertex
location: {project: p, region: us-central1}
machine: a3-megagpu-8g
consumption: on-demand
storage: {bucket: b}
image: registry.test/i:1
"""


def test_the_package_imports_its_version_alone_until_a_name_is_used() -> None:
    code = (
        "import json, sys\nbefore = set(sys.modules)\nimport drillyard\nadded ="
        " len(set(sys.modules) - before)\nloaded = {name for name in sys.modules if"
        " name.startswith(('drillyard.', 'torch', 'pydantic', 'numpy'))}\nmissing ="
        " set(drillyard.__all__) - set(dir(drillyard))\nprint(json.dumps([sorted(loaded),"
        " sorted(missing), added]))"
    )
    source = str(Path(drillyard.__file__).parents[1])
    # Without site, whose .pth files import modules of their own.
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({source!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded, missing, added = json.loads(done.stdout)
    assert (loaded, missing) == (["drillyard.version"], [])
    assert added <= 3, (
        "an interrupt shows a traceback until main() handles it: no typing, no importlib before"
    )


def test_every_public_name_is_there_after_everything_is_imported() -> None:
    import drillyard.estimation.run_estimate
    import drillyard.measurement.run_result
    import drillyard.reporting.page

    assert all(
        callable(getattr(drillyard, name)) for name in drillyard.__all__ if name != "hardware"
    )
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = drillyard.no_such_name


def test_an_estimate_has_a_verdict_and_quantities(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(RUN)
    found = drillyard.estimate(config, accelerator="h100", num_gpus=8)
    assert found.verdict == "fits" and found.memory is not None
    with pytest.raises(drillyard.UserError):
        drillyard.estimate(config, accelerator="h100000", num_gpus=8)


def test_errors_of_a_caller_can_be_distinguished(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        drillyard.load_run_config(str(tmp_path / "absent.yaml"))
    (tmp_path / "run.yaml").write_text("name: 1x\nmodle: {}\n")
    with pytest.raises(ConfigError):
        drillyard.train(tmp_path / "run.yaml")
    assert issubclass(ConfigError, drillyard.UserError)


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of configs, with nothing registered, on a network in which ssh resolves no
    name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    Path("run.yaml").write_text(RUN)
    Path("workload.yaml").write_text("name: w\nworkload: {command: [python3, train.py]}\n")
    Path("local.yaml").write_text("name: here\nplatform: local\nprocesses_per_node: 1\n")
    Path("ssh.yaml").write_text(
        "name: h\nplatform: ssh\nprocesses_per_node: 1\nssh: {hosts: [nosuch.invalid]}\n"
    )
    Path("slurm.yaml").write_text(
        "name: s\nplatform: slurm\nprocesses_per_node: 1\nslurm: {login_host: nosuch.invalid,"
        " time_limit: 1:00:00}\nstorage: {directory: /home/me}\n"
    )
    Path("vertex.yaml").write_text(VERTEX)
    Path("train.log").write_text(
        "Step: 1 | Time: 0.5s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss: 0.6620\n"
    )

    def unresolved(_: object, argv: Sequence[str], **__: object) -> Result:
        said = "ssh: Could not resolve hostname nosuch.invalid: Name or service not known\n"
        return Result(tuple(argv), 255, "", said)

    monkeypatch.setattr(Programs, "run", unresolved)


Call = Callable[[], object]


def estimate(**given: Any) -> Call:
    return lambda: drillyard.estimate("run.yaml", **given)


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (UnreachableError, lambda: drillyard.status("x", cluster="slurm.yaml")),
        (UnreachableError, lambda: drillyard.status("x", cluster="ssh.yaml")),
        (UnreachableError, lambda: list(drillyard.logs("x", cluster="slurm.yaml"))),
        (UnreachableError, lambda: drillyard.submit("workload.yaml", "slurm.yaml")),
        (UnreachableError, lambda: drillyard.submit("workload.yaml", "slurm.yaml", sync=True)),
        (UnreachableError, lambda: drillyard.submit("workload.yaml", "ssh.yaml")),
        (UnreachableError, lambda: drillyard.submit("workload.yaml", "ssh.yaml", replace=True)),
        (NotFoundError, lambda: drillyard.measure("nope.log")),
        (NotFoundError, lambda: drillyard.measure("train.log", hardware="nope.yaml")),
        (NotFoundError, lambda: drillyard.report("nope")),
        (NotFoundError, estimate(accelerator="h100000", num_gpus=8)),
        (NotFoundError, estimate(machine="zzz")),
        (NotFoundError, estimate(accelerator="h100", num_gpus=8, hardware="nope.yaml")),
        (NotFoundError, lambda: drillyard.hardware.catalog().accelerator("zz")),
        (NotFoundError, lambda: drillyard.hardware.catalog().machine("zz")),
        (NotFoundError, lambda: drillyard.status("slurm://unknown/x", cluster="slurm.yaml")),
        (NotFoundError, lambda: drillyard.status("x")),
        (NotFoundError, lambda: drillyard.plan("run.yaml", "nope.yaml")),
        (ConfigError, estimate(accelerator="h100", num_gpus=0)),
        (ConfigError, estimate(machine="a3-megagpu-8g", nodes=0)),
        (ConfigError, estimate()),
        (ConfigError, lambda: drillyard.plan("workload.yaml", "vertex.yaml", sync=True)),
        (ConfigError, lambda: drillyard.measure("train.log", framework="zz")),
        (ConfigError, lambda: drillyard.measure("train.log", timezone="Mars/Base")),
        (ConfigError, lambda: drillyard.measure("train.log", num_gpus=0)),
        (ConfigError, lambda: drillyard.measure("train.log", params="many")),
        (ConfigError, lambda: drillyard.report("train.log", sequence_length=0)),
        (ConfigError, lambda: drillyard.logs("x", cluster="local.yaml", since="zz")),
        (ConfigError, lambda: drillyard.status("no handle://", cluster="slurm.yaml")),
        (ConfigError, lambda: drillyard.plan("run.yaml", "slurm.yaml", after="zz")),
        (
            ConfigError,
            lambda: drillyard.plan("run.yaml", "local.yaml", overrides=["parallel.tensor=2"]),
        ),
    ],
)
def test_a_mistake_is_of_the_documented_kind(kind: type[drillyard.UserError], call: Call) -> None:
    with pytest.raises(kind):
        call()


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(
    ("package", "importer", "call"),
    [
        ("google.api_core", "", lambda: drillyard.measure("gs://b/run.log")),
        (
            "google.auth.exceptions",
            "",
            lambda: imported("drillyard.loglines.sources").storage_client(),
        ),
        (
            "google.api_core",
            "launch.vertex.service",
            lambda: drillyard.status("x", cluster="vertex.yaml"),
        ),
        (
            "google.api_core",
            "launch.vertex.bucket_files",
            lambda: imported("drillyard.launch.vertex.bucket_files"),
        ),
        ("wandb", "", lambda: tracker("WeightsAndBiases")),
        ("mlflow", "", lambda: tracker("MLflow")),
        ("tensorboard.compat.proto", "", lambda: tracker("TensorBoard")),
        ("torch", "models.meta_model", lambda: imported("drillyard.cli.estimate")._builder()),
    ],
)
def test_a_package_of_an_extra_that_is_missing_is_of_a_kind_of_its_own(
    package: str, importer: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`importer`: the module that imports the package when it is imported itself."""
    for name in (package, *(each for each in sys.modules if each.startswith(f"{package}."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"drillyard.{importer}", raising=False)
    with pytest.raises(MissingExtraError):
        call()


def imported(name: str) -> Any:
    return importlib.import_module(name)


def tracker(name: str) -> object:
    return getattr(imported("drillyard.telemetry.trackers"), name)(
        Path(), drillyard.load_run_config("run.yaml")
    )


def test_a_run_directory_gives_a_report(run_directory: Path, tmp_path: Path) -> None:
    page = drillyard.report(run_directory, tmp_path / "page.html")
    assert page.read_text().startswith("<!doctype html>")
    with pytest.raises(drillyard.UserError, match="--accelerator"):
        drillyard.report(run_directory, tmp_path / "page.html", accelerator="h100")


def test_a_log_is_measured(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    step = "Step: {} | Time: 0.5s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss: 0.6620"
    log.write_text("".join(f"{step.format(number)}\n" for number in range(1, 41)))
    result = drillyard.measure(
        log, num_gpus=8, accelerator="h100", params="7B", sequence_length=1024
    )
    assert result.timing.times.typical == 0.5
    assert result.as_json()["name"] == result.name
    for function in (drillyard.measure, drillyard.report):
        with pytest.raises(TypeError, match="no_such_fact"):
            function(log, no_such_fact=1)


def test_measure_and_report_take_what_the_flags_and_facts_are_named() -> None:
    facts = {field.name.removesuffix("_us") for field in dataclasses.fields(UserFacts)}
    for function, own in (
        (drillyard.measure, {"paths"}),
        (drillyard.report, {"paths", "output", "overwrite"}),
    ):
        parameters = inspect.signature(function).parameters.values()
        assert {each.name for each in parameters} == own | facts | RUN_FACTS.keys()
        assert all(each.kind is not each.VAR_KEYWORD for each in parameters)


def test_hardware_is_looked_up() -> None:
    assert drillyard.hardware.catalog().accelerator("h100").name == "h100"


def test_submit_issues_the_warnings_of_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drillyard.launch import submission

    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("name: w\nworkload: {command: [python3, train.py]}\n")
    Path("cluster.yaml").write_text(
        'name: c\nplatform: slurm\nprocesses_per_node: 1\nslurm: {time_limit: "6"}\nstorage:'
        " {directory: /home/me}\n"
    )
    planned = drillyard.plan("run.yaml")
    assert any("slurm.time_limit" in warning for warning in planned.warnings)
    monkeypatch.setattr(
        submission,
        "submit_plans",
        lambda cluster, plans, *, replace: [plan.handle for plan in plans],
    )
    with pytest.warns(UserWarning, match="slurm.time_limit"):
        assert drillyard.submit("run.yaml") == str(planned.handle)


def test_times_of_a_job_are_in_the_given_time_zone() -> None:
    from drillyard.api import user_facts

    given = {"job_start": "2026-01-31T12:00:00", "job_end": "2026-01-31T12:00:00Z"}
    facts = user_facts({**given, "timezone": "Europe/Berlin"})
    assert facts.job_start_us is not None and facts.job_end_us is not None
    assert facts.job_end_us - facts.job_start_us == 3600 * 1_000_000
    assert user_facts(dict(given)).job_start_us == facts.job_end_us


def test_measure_reads_the_times_of_a_job_in_the_given_time_zone(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    line = (
        "2026-01-31T{}Z Step: {} | Time: 1.0s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss:"
        " 0.6620\n"
    )
    log.write_text("".join(line.format(f"11:00:{step:02}", step) for step in range(1, 9)))
    seconds = [
        drillyard.measure(log, job_start=start, timezone=zone).as_json()["wall_seconds"]
        for start, zone in (
            ("2026-01-31T11:59:00", "Europe/Berlin"),
            ("2026-01-31T10:59:00Z", None),
        )
    ]
    assert seconds[0] == seconds[1] > 60
