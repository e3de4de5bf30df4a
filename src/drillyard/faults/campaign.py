"""A campaign: the undisturbed run, then one run after another under faults, each compared with the
first to the bit.

It works in a directory of its own (`DIRECTORY/reference`, `DIRECTORY/chaos-01`, ... and their logs)
and changes settings only where the comparison needs it (`run_settings`). Data is tokenised once, in
the config's cache; runs with a fault in the cache build get an empty cache each. Cost: a start of
the ranks per fault, besides the steps themselves.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drillyard.errors import UserError
from drillyard.faults.disturbed_run import (
    FaultSettings,
    PhaseFiles,
    RunHistory,
    can_mount,
    disturbed_command,
    mounted_tmpfs,
    new_mark,
    run_once,
    run_until_done,
    train_command,
)
from drillyard.faults.fault_verdicts import (
    Evidence,
    FaultVerdict,
    LossAndNorm,
    judge_faults,
    losses_and_norms,
)
from drillyard.faults.plan import (
    KEPT_CHECKPOINTS,
    MIN_SAVES,
    DiskLimit,
    FaultKind,
    PlannedRun,
    RunShape,
    draw_faults,
    require_count,
    require_saves,
)
from drillyard.supervise.cause import last_words
from drillyard.telemetry.events import event_microseconds, read_events, utc_now
from drillyard.telemetry.jsonlines import read_records
from drillyard.telemetry.metrics import METRICS_FILE
from drillyard.training.checkpoint.inventory import list_checkpoints
from drillyard.training.checkpoint.verification import verify

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig

_REFERENCE = "reference"
_ROUNDING_BYTES = 1 << 20


@dataclass(frozen=True)
class Campaign:
    """The config with its overrides, the faults, and where to work.

    `watchdog_seconds`: timeouts.watchdog_seconds of the runs with `stop` faults; None: four times
    what an undisturbed start took, and at least 30 s, so that a start is never mistaken for a hang.
    """

    config: Path
    directory: Path
    kinds: Sequence[FaultKind]
    count: int
    seed: int
    num_ranks: int
    overrides: Sequence[str] = ()
    watchdog_seconds: float | None = None
    on_gpus: bool = False
    keep: bool = False


@dataclass
class CampaignResult:
    """The verdict on every fault. `runs`: disturbed runs; `reference_seconds`: duration of the
    undisturbed run."""

    verdicts: list[FaultVerdict] = field(default_factory=list)
    runs: int = 0
    steps: int = 0
    reference_seconds: float = 0.0
    seconds: float = 0.0
    on_gpus: bool = False

    @property
    def passed(self) -> bool:
        """Whether every fault passed."""
        return all(verdict.passed for verdict in self.verdicts)


@dataclass(frozen=True)
class UndisturbedRun:
    """Undisturbed run that disturbed runs are compared with, and the figures that their settings
    depend on."""

    directory: Path
    losses_and_norms: dict[int, LossAndNorm]
    seconds: float
    start_seconds: float
    step_seconds: float
    checkpoint_bytes: int
    shard_bytes: int


def run_campaign(
    campaign: Campaign, run: RunConfig, on_progress: Callable[[str], None]
) -> CampaignResult:
    """Run `campaign`; `run` is its config, loaded with the overrides.

    Its directory must be empty or missing, and is removed at the end unless `campaign.keep` or a
    fault failed. Raises UserError if the run takes too few checkpoints, or fails undisturbed.
    """
    begun = time.monotonic()
    require_count(campaign.kinds, campaign.count)
    _require_checkpoints(run)
    directory = campaign.directory
    if directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"{directory}: is not empty; chaos works in a directory of its own, name another"
            " --directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    result = CampaignResult(on_gpus=campaign.on_gpus)
    try:
        on_progress("the undisturbed run")
        reference = _undisturbed(campaign)
        result.steps, result.reference_seconds = len(reference.losses_and_norms), reference.seconds
        disk_bytes = (KEPT_CHECKPOINTS + 2) * reference.checkpoint_bytes + _ROUNDING_BYTES
        limit: DiskLimit = (
            "tmpfs" if "disk-full" in campaign.kinds and can_mount(disk_bytes) else "file-size"
        )
        shape = RunShape(
            max(reference.losses_and_norms),
            run.checkpoint.every_steps or 0,
            campaign.num_ranks,
            limit,
        )
        planned_runs = draw_faults(campaign.kinds, campaign.count, campaign.seed, shape)
        result.runs = len(planned_runs)
        for number, planned in enumerate(planned_runs, start=1):
            failed = sum(not verdict.passed for verdict in result.verdicts)
            done = f"{len(result.verdicts)} of {campaign.count} faults done"
            on_progress(f"run {number} of {len(planned_runs)}: {done}, {failed} failed")
            on_tmpfs = disk_bytes if planned.has("disk-full") and limit == "tmpfs" else None
            result.verdicts += _disturbed(campaign, planned, reference, on_tmpfs)
    finally:
        result.seconds = time.monotonic() - begun
        if not campaign.keep and (result.passed or not result.verdicts):
            shutil.rmtree(directory, ignore_errors=True)
    return result


def _require_checkpoints(run: RunConfig) -> None:
    every, steps = run.checkpoint.every_steps, run.training.steps
    if every is None:
        raise UserError(
            "checkpoint.every_steps is not set: without checkpoints a run loses everything with"
            f" every fault; set it (--set checkpoint.every_steps=N), for at least {MIN_SAVES} saves"
        )
    if steps is not None:
        require_saves(steps, every)


def run_settings(campaign: Campaign, name: str) -> list[str]:
    """The user's overrides and the settings of the campaign for its run `name`.

    `deterministic`: on GPUs an atomic addition in another order would look like a fault.
    """
    settings = [
        *campaign.overrides,
        f"name={name}",
        f"output={json.dumps(str(campaign.directory))}",
        f"checkpoint.keep={KEPT_CHECKPOINTS}",
        "checkpoint.resume=auto",
        "logging.every_steps=1",
        "logging.tensorboard=false",
        "logging.wandb=null",
        "logging.mlflow=null",
    ]
    return [*settings, "training.deterministic=true"] if campaign.on_gpus else settings


def _undisturbed(campaign: Campaign) -> UndisturbedRun:
    """Run the config once with the plain command."""
    directory = campaign.directory / _REFERENCE
    train = train_command(
        campaign.config, run_settings(campaign, _REFERENCE), campaign.num_ranks, 0
    )
    output = campaign.directory / f"{_REFERENCE}.log"
    begun = time.monotonic()
    with output.open("ab") as log:
        start = run_once([sys.executable, "-m", "drillyard", *train], new_mark(), log)
    seconds = time.monotonic() - begun
    if start.exit_code != 0:
        words = "\n".join(last_words(output.read_text(errors="replace")))
        raise UserError(
            f"the undisturbed run failed with exit code {start.exit_code}; chaos needs one that"
            f" ends well\n{words}"
        )
    metrics = list(read_records(directory / METRICS_FILE))
    events = read_events(directory)
    first = {
        name: event_microseconds(e)
        for e in reversed(events)
        if (name := e["event"]) in ("run_start", "step")
    }
    newest = [info for info in list_checkpoints(directory) if info.complete][-1]
    assert newest.manifest is not None
    return UndisturbedRun(
        directory,
        losses_and_norms(metrics),
        seconds,
        (first["step"] - first["run_start"]) / 1e6,
        statistics.median(record["step_seconds"] for record in metrics),
        newest.bytes,
        min(
            record.bytes
            for name, record in newest.manifest.files.items()
            if name.endswith(".distcp")
        ),
    )


def _disturbed(
    campaign: Campaign, planned: PlannedRun, reference: UndisturbedRun, disk_bytes: int | None
) -> list[FaultVerdict]:
    """One run under the faults of `planned`, judged. Its directory is removed if all passed, unless
    `keep`."""
    directory = campaign.directory / planned.name
    cache = campaign.directory / f"{planned.name}-cache" if planned.has("cache") else None
    phases = PhaseFiles(campaign.directory / f"{planned.name}-marks")
    checkpoints = directory / "checkpoints"
    ballast = None if disk_bytes is None else checkpoints / "ballast"
    phases.write_settings(
        FaultSettings(planned, checkpoints, reference.step_seconds, reference.shard_bytes, ballast)
    )
    settings = run_settings(campaign, planned.name)
    if cache is not None:
        settings.append(f"data.cache_directory={json.dumps(str(cache))}")
    if planned.has("stop"):
        watchdog_seconds = campaign.watchdog_seconds or max(30.0, 4 * reference.start_seconds)
        settings.append(f"timeouts.watchdog_seconds={watchdog_seconds:g}")
    # More restarts than the faults need: an extra restart must be counted, not end the run.
    train = train_command(campaign.config, settings, campaign.num_ranks, planned.restarts + 3)
    output = campaign.directory / f"{planned.name}.log"
    timeout = 600 + 20 * (planned.restarts + 1) * reference.seconds
    with contextlib.nullcontext() if disk_bytes is None else mounted_tmpfs(checkpoints, disk_bytes):
        history = run_until_done(disturbed_command(train, phases), planned, phases, output, timeout)
        stopped = history.stopped
        if stopped and (words := last_words(output.read_text(errors="replace"))):
            stopped += f": {words[-1].strip()} (see {output})"
        evidence = Evidence(
            events=read_events(directory),
            metrics=[
                record for record in read_records(directory / METRICS_FILE) if "step" in record
            ],
            phases=phases.reached(planned),
            stopped=stopped,
            problems=list(_problems_at_end(history, directory, reference, cache)),
            end=event_microseconds({"time": utc_now()}),
        )
        verdicts = judge_faults(planned, reference.losses_and_norms, evidence)
    if not campaign.keep and all(verdict.passed for verdict in verdicts):
        for path in (directory, phases.directory, cache):
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
    return verdicts


def _problems_at_end(
    history: RunHistory, directory: Path, reference: UndisturbedRun, cache: Path | None
) -> Iterator[str]:
    """Processes left running, and differences in the files that the run left."""
    yield from (f"left running: {command}" for command in history.left_running)
    if history.stopped:
        return
    if different := _different_files(reference.directory / "final", directory / "final"):
        yield f"final/ differs from the undisturbed run's: {', '.join(different)}"
    for info in list_checkpoints(directory):
        damaged = [problem.name for problem in verify(info) if not problem.harmless]
        if info.complete and damaged:
            yield f"checkpoint {info.step} is damaged at the end: {', '.join(damaged)}"
    if cache is not None and (incomplete := list(cache.rglob("*.building-*"))):
        yield f"an incomplete cache is left: {incomplete[0].name}"


def _different_files(left: Path, right: Path) -> list[str]:
    """Names of files that are not in both directories with the same bytes."""
    names = {
        path.relative_to(top) for top in (left, right) for path in top.rglob("*") if path.is_file()
    }
    both = {name for name in names if (left / name).is_file() and (right / name).is_file()}
    return sorted(
        str(n)
        for n in names
        if n not in both or not filecmp.cmp(left / n, right / n, shallow=False)
    )
