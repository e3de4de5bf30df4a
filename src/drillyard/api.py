"""The public functions: what the commands of the same names do, as values instead of text.

Every mistake in a value is a `UserError` (`drillyard.errors` has its kinds). Paths may be given as
text. Each function imports what it needs when it is called.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drillyard.errors import ConfigError, UserError

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig
    from drillyard.estimation.run_estimate import RunEstimate
    from drillyard.launch.plan import Plan
    from drillyard.launch.run_status import RunStatus
    from drillyard.measurement.run_result import RunResult
    from drillyard.measurement.user_facts import UserFacts

PathLike = str | os.PathLike[str]


def estimate(
    run: PathLike,
    *,
    cluster: PathLike | None = None,
    pool: str | None = None,
    machine: str | None = None,
    nodes: int | None = None,
    accelerator: str | None = None,
    num_gpus: int | None = None,
    overrides: Sequence[str] = (),
    hardware: PathLike | None = None,
    price_per_gpu_hour: float | None = None,
) -> RunEstimate:
    """Estimate memory, speed, time, cost and failures of a run before it starts. Needs no GPU,
    torch or weights.

    Where it runs: `cluster` (a cluster.yaml, and a further `pool` of it), or `machine` and `nodes`,
    or `accelerator` and `num_gpus`. `overrides` are KEY=VALUE settings of the run config,
    `hardware` a file of your own hardware. The result's `verdict` is `fits`, `may not fit`, `does
    not fit` or `unknown`; each figure is a quantity with its unit, range, formula and source.
    """
    from drillyard.estimation.request import EstimateOptions, build_request
    from drillyard.estimation.run_estimate import estimate_run

    options = EstimateOptions(
        run=Path(run),
        cluster=_path(cluster),
        pool=pool,
        machine=machine,
        nodes=nodes,
        accelerator=accelerator,
        num_gpus=num_gpus,
        overrides=list(overrides),
        hardware=_path(hardware),
        price_per_gpu_hour=price_per_gpu_hour,
    )
    return estimate_run(build_request(options))


def train(
    config: PathLike | RunConfig,
    *,
    overrides: Sequence[str] = (),
    nproc_per_node: int | None = None,
    max_restarts: int | None = None,
) -> int:
    """Train on this host until the run is over, in processes of their own; return the exit code of
    `drillyard train`.

    0: done; 1: failed; 2: the config or the data must be fixed; 85: stopped on request with
    everything saved; -N: the command was killed by signal N. A run that was stopped or has crashed
    resumes from its newest checkpoint. Raises ConfigError for an invalid config.
    """
    from drillyard.config.load import load_run_config, save_resolved

    with tempfile.TemporaryDirectory(prefix="drillyard-") as directory:
        if isinstance(config, str | os.PathLike):
            path = os.fspath(config)
            load_run_config(path, list(overrides))
        else:
            path = os.path.join(directory, "run.yaml")
            save_resolved(config, path)
        command = [sys.executable, "-m", "drillyard", "train", path]
        options = {
            "--set": overrides,
            "--nproc-per-node": [nproc_per_node],
            "--max-restarts": [max_restarts],
        }
        for flag, values in options.items():
            command += [
                word for value in values if value is not None for word in (flag, str(value))
            ]
        return subprocess.run(command, check=False).returncode


def plan(
    run: PathLike,
    cluster: PathLike = "cluster.yaml",
    *,
    overrides: Sequence[str] = (),
    pool: str | None = None,
    sync: bool = False,
    max_failures: int = 3,
    after: str | None = None,
) -> Plan:
    """Plan a launch: every file that `submit` would write and every command that it would run, in
    order.

    Asks and changes nothing. `overrides` are KEY=VALUE settings of the run config. `pool` is a
    further pool of the cluster. `sync` copies the working directory to the nodes; `after` is the
    handle of a run that must succeed first. Raises UserError for every mistake that can be found
    without asking the cluster.
    """
    from drillyard.launch.submission import plan_launch

    _, plans = plan_launch(
        Path(run),
        Path(cluster),
        overrides=overrides,
        pool=pool,
        sync=sync,
        max_failures=max_failures,
        after=after,
    )
    return plans[0]


def submit(
    run: PathLike,
    cluster: PathLike = "cluster.yaml",
    *,
    overrides: Sequence[str] = (),
    pool: str | None = None,
    sync: bool = False,
    max_failures: int = 3,
    after: str | None = None,
    replace: bool = False,
    force: bool = False,
) -> str:
    """Submit a run to the cluster's scheduler; return its handle, `platform://cluster/run`.

    Executes the plan of `plan` with the same arguments; its warnings are issued as Python's. Raises
    DoesNotFitError, unless `force`, where the estimate says so, and UserError where a run of that
    name is not over, unless `replace`, which cancels it first if it was launched from the working
    directory or one above it.
    """
    import warnings

    from drillyard.launch.submission import check_memory, plan_launch, submit_plans

    requests, plans = plan_launch(
        Path(run),
        Path(cluster),
        overrides=overrides,
        pool=pool,
        sync=sync,
        max_failures=max_failures,
        after=after,
    )
    for _ in check_memory(requests, force=force):
        pass
    for warning in plans[0].warnings:
        warnings.warn(warning, stacklevel=2)
    (handle,) = submit_plans(requests[0].cluster, plans, replace=replace)
    return str(handle)


def status(run: str, *, cluster: PathLike | None = None) -> RunStatus:
    """The status of a launched run: state, reason, nodes, restarts, failure. Times are Unix
    seconds.

    `run` is a handle or a name. `cluster`: its cluster.yaml; by default the clusters launched on
    from this machine are searched. Raises NotFoundError where there is no such run,
    UnreachableError where the cluster does not answer.
    """
    from drillyard.launch.cluster_registry import find_launched_run

    return find_launched_run(run, _path(cluster)).status()


def logs(
    run: str,
    *,
    cluster: PathLike | None = None,
    follow: bool = False,
    rank: int | None = None,
    node: int | None = None,
    tail: int | None = None,
    since: str | None = None,
) -> Iterator[str]:
    """The lines that a run's nodes printed, in order of time: `NODE: TIME TEXT`, or `[rankR]: TIME
    TEXT` of one rank.

    `run`, `cluster`: as for `status`. `follow` begins with the newest submission and continues
    until the run is over. `tail`: the last so many lines. `since`: an age (`90s`, `10m`, `2h`,
    `3d`) or a time (`2026-01-31T12:00:00Z`).
    """
    import time

    from drillyard.launch.cluster_registry import find_launched_run
    from drillyard.launch.request import LogSelection, parse_since

    begin = None if since is None else parse_since(since, time.time())
    pieces = find_launched_run(run, _path(cluster)).logs(
        LogSelection(follow, rank, node, tail, begin)
    )
    return (
        line
        for piece in pieces
        for line in piece.decode(errors="replace").removesuffix("\n").split("\n")
    )


def measure(
    paths: PathLike | Sequence[PathLike],
    *,
    accelerator: str | None = None,
    num_gpus: int | None = None,
    params: int | str | None = None,
    active_params: int | str | None = None,
    config: PathLike | None = None,
    batch_size_per_gpu: int | None = None,
    global_batch_size: int | None = None,
    sequence_length: int | None = None,
    logging_steps: int | None = None,
    precision: str | None = None,
    formula: str | None = None,
    hardware: PathLike | None = None,
    gpus_per_node: int | None = None,
    price_per_gpu_hour: float | None = None,
    price_per_node_hour: float | None = None,
    framework: str | None = None,
    start_step: int | None = None,
    end_step: int | None = None,
    timezone: str | None = None,
    job_start: str | None = None,
    job_end: str | None = None,
) -> RunResult:
    """Measure one run of any framework from its logs: step times, MFU, goodput, cost, waits.

    The keywords are what the logs do not say, named as the flags of `drillyard metrics`; counts of
    parameters may be text such as 70.6B, prices are US dollars, a job's start and end times such as
    2026-01-31T12:00:00Z. What is neither in the log nor given is None in the result, whose
    `as_json()` is the document of `drillyard metrics --json`.
    """
    facts = {
        name: value
        for name, value in locals().items()
        if name not in ("paths", "hardware", "framework")
    }
    from drillyard.hardware import load_catalog
    from drillyard.measurement import run_result
    from drillyard.measurement.read_logs import read_logs

    log = read_logs(_texts(paths), timezone=timezone, framework=framework)
    return run_result.measure(log, user_facts(facts), load_catalog(_path(hardware)))


def report(
    paths: PathLike | Sequence[PathLike],
    output: PathLike | None = None,
    *,
    overwrite: bool = False,
    accelerator: str | None = None,
    num_gpus: int | None = None,
    params: int | str | None = None,
    active_params: int | str | None = None,
    config: PathLike | None = None,
    batch_size_per_gpu: int | None = None,
    global_batch_size: int | None = None,
    sequence_length: int | None = None,
    logging_steps: int | None = None,
    precision: str | None = None,
    formula: str | None = None,
    hardware: PathLike | None = None,
    gpus_per_node: int | None = None,
    price_per_gpu_hour: float | None = None,
    price_per_node_hour: float | None = None,
    framework: str | None = None,
    start_step: int | None = None,
    end_step: int | None = None,
    timezone: str | None = None,
    job_start: str | None = None,
    job_end: str | None = None,
) -> Path:
    """Write the HTML report of a run directory, or of the logs of any framework; return its path.

    Default `output`: report.html in the run directory, or in the working directory. A file that is
    no report, or an edited one, is replaced with `overwrite` only. The other keywords are those of
    `measure` and for logs alone, but for `price_per_gpu_hour`.
    """
    given = {
        name: value
        for name, value in locals().items()
        if value is not None and name not in ("paths", "output", "overwrite", "price_per_gpu_hour")
    }
    from drillyard.reporting.log_content import measured_content
    from drillyard.reporting.page import REPORT_FILE, render, write_report
    from drillyard.reporting.run_content import is_run_directory, read_run_directory
    from drillyard.telemetry.events import refusing_odd_values

    names = _texts(paths)
    directory = next((Path(name) for name in names if is_run_directory(Path(name))), None)
    if directory is None:
        with refusing_odd_values(*names):
            page = render(
                measured_content(measure(names, price_per_gpu_hour=price_per_gpu_hour, **given))
            )
    elif len(names) > 1:
        raise ConfigError(
            "a report is of one run: give one run directory (drillyard metrics --compare shows"
            " several)"
        )
    elif given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{names[0]} is a run directory and has what {flags} would give: leave it out"
        )
    else:
        with refusing_odd_values(directory):
            page = render(read_run_directory(directory, price_per_gpu_hour))
    target = Path(output) if output is not None else (directory or Path()) / REPORT_FILE
    if output is None and target.is_symlink():
        # In a run directory from elsewhere it could lead to any file of the user's.
        raise UserError(
            f"{target}: is a link, and is not followed; name the file to write: --output FILE"
        )
    write_report(target, page, overwrite=overwrite)
    return target


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


def _texts(paths: PathLike | Sequence[PathLike]) -> list[str]:
    return [
        os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)
    ]


def user_facts(given: dict[str, Any]) -> UserFacts:
    """The facts that a user gave by the names of the flags of `drillyard metrics`; counts may be
    text such as 70.6B.

    Times of a job without an offset are in `timezone` (default: UTC).
    """
    from drillyard.loglines.stamps import time_zone
    from drillyard.measurement.user_facts import UserFacts, moment_us, to_formula

    facts = {
        **given,
        "config": _path(given.get("config")),
        "formula": to_formula(given.get("formula")),
    }
    for name in ("params", "active_params"):
        if isinstance(facts.get(name), str):
            from drillyard.estimation.request import parse_count

            facts[name] = parse_count(f"--{name.replace('_', '-')}", facts[name])
    zone = None if (name := facts.pop("timezone", None)) is None else time_zone(name)
    for name in ("job_start", "job_end"):
        if name in facts:
            facts[f"{name}_us"] = moment_us(f"--{name.replace('_', '-')}", facts.pop(name), zone)
    return UserFacts(**facts)
