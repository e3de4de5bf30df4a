"""A whole campaign: the undisturbed run, then run after run under faults, each compared with the first to the bit.

It works in a directory of its own (`DIRECTORY/reference`, `DIRECTORY/chaos-01`, ... and their logs): the run directory
of the config is never touched. The config is changed where the comparison needs it, and only there: every step is
logged, two checkpoints are kept, trackers are off, and on GPUs `training.deterministic` is switched on, since an
atomic addition in another order would look like a fault. Data is tokenised once, in the config's own cache; runs that
are struck in the cache build get an empty cache each.

Cost: a start of the ranks per fault, about 5 to 10 s of imports on a small host, besides the steps themselves.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drillyard.errors import UserError
from drillyard.faults.disturbed_run import (
    RunHistory,
    disturbed_command,
    new_mark,
    plain_command,
    run_once,
    run_until_done,
    train_command,
)
from drillyard.faults.fault_verdicts import Evidence, FaultVerdict, LossAndNorm, judge_faults, losses_and_norms
from drillyard.faults.mark_files import FaultSettings, MarkFiles
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
from drillyard.faults.small_disk import can_mount, mounted_tmpfs
from drillyard.supervise.cause import last_words
from drillyard.telemetry.events import event_microseconds, read_events, utc_now
from drillyard.telemetry.jsonlines import read_records
from drillyard.telemetry.metrics import METRICS_FILE
from drillyard.training.checkpoint import list_checkpoints, verify

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig

OnProgress = Callable[[str], None]

_REFERENCE = "reference"
_ROUNDING_BYTES = 1 << 20


@dataclass(frozen=True)
class Campaign:
    """What is asked for: the config with its overrides, the faults, and where to work.

    `watchdog_seconds`: timeouts.watchdog_seconds of the runs in which ranks are stopped; None: four times what a start
    took undisturbed, and at least 30 s, so that a start is never taken for a hang. `on_gpus`: the ranks compute there,
    and only deterministic kernels can give the same bits twice.
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
    """What came of a campaign. `runs` is the number of disturbed runs, `reference_seconds` the undisturbed one's."""

    findings: list[FaultVerdict] = field(default_factory=list)
    runs: int = 0
    steps: int = 0
    reference_seconds: float = 0.0
    seconds: float = 0.0
    on_gpus: bool = False

    @property
    def passed(self) -> bool:
        """Whether every fault passed."""
        return all(finding.passed for finding in self.findings)


@dataclass(frozen=True)
class UndisturbedRun:
    """The undisturbed run, as far as others are measured by it."""

    directory: Path
    figures: dict[int, LossAndNorm]
    seconds: float
    start_seconds: float
    step_seconds: float
    checkpoint_bytes: int
    shard_bytes: int


def run_campaign(campaign: Campaign, run: RunConfig, on_progress: OnProgress) -> CampaignResult:
    """Run `campaign`, of which `run` is the loaded config with the overrides; tells `on_progress` what it is at.

    Its directory must be empty or not there; afterwards it is removed unless `campaign.keep`, or a fault failed.
    Raises UserError when the run takes too few checkpoints, or fails undisturbed.
    """
    begun = time.monotonic()
    require_count(campaign.kinds, campaign.count)
    _require_checkpoints(run)
    directory = campaign.directory
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory}: is not empty; chaos works in a directory of its own, name another --directory")
    directory.mkdir(parents=True, exist_ok=True)
    outcome = CampaignResult(on_gpus=campaign.on_gpus)
    try:
        on_progress("the undisturbed run")
        reference = _undisturbed(campaign)
        outcome.steps, outcome.reference_seconds = len(reference.figures), reference.seconds
        disk_bytes = (KEPT_CHECKPOINTS + 2) * reference.checkpoint_bytes + _ROUNDING_BYTES
        limit: DiskLimit = "tmpfs" if "disk-full" in campaign.kinds and can_mount(disk_bytes) else "file-size"
        shape = RunShape(max(reference.figures), run.checkpoint.every_steps or 0, campaign.num_ranks, limit)
        cases = draw_faults(campaign.kinds, campaign.count, campaign.seed, shape)
        outcome.runs = len(cases)
        for number, case in enumerate(cases, start=1):
            failed = sum(not finding.passed for finding in outcome.findings)
            done = f"{len(outcome.findings)} of {campaign.count} faults done"
            on_progress(f"run {number} of {len(cases)}: {done}, {failed} failed")
            on_disk = disk_bytes if case.has("disk-full") and limit == "tmpfs" else None
            outcome.findings += _disturbed(campaign, case, reference, on_disk)
    finally:
        outcome.seconds = time.monotonic() - begun
        if not campaign.keep and (outcome.passed or not outcome.findings):
            shutil.rmtree(directory, ignore_errors=True)
    return outcome


def _require_checkpoints(run: RunConfig) -> None:
    every, steps = run.checkpoint.every_steps, run.training.steps
    if every is None:
        raise UserError(
            "checkpoint.every_steps is not set: a run without checkpoints loses everything with every fault; "
            f"set it (--set checkpoint.every_steps=N), for at least {MIN_SAVES} saves"
        )
    if steps is not None:
        require_saves(steps, every)


def run_settings(campaign: Campaign, name: str) -> list[str]:
    """What this campaign's run `name` sets besides the user's own overrides."""
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
    if campaign.on_gpus:
        settings.append("training.deterministic=true")
    return settings


def _undisturbed(campaign: Campaign) -> UndisturbedRun:
    """Run the config once, through the command as it is."""
    directory = campaign.directory / _REFERENCE
    train = train_command(campaign.config, run_settings(campaign, _REFERENCE), campaign.num_ranks, 0)
    output = campaign.directory / f"{_REFERENCE}.log"
    begun = time.monotonic()
    with output.open("ab") as log:
        start = run_once(plain_command(train), new_mark(), log)
    seconds = time.monotonic() - begun
    if start.exit_code != 0:
        said = "\n".join(last_words(output.read_text(errors="replace")))
        raise UserError(
            f"the undisturbed run failed with exit code {start.exit_code}; chaos needs one that ends well\n{said}"
        )
    metrics = list(read_records(directory / METRICS_FILE))
    events = read_events(directory)
    first = {name: event_microseconds(e) for e in reversed(events) if (name := e["event"]) in ("run_start", "step")}
    newest = [info for info in list_checkpoints(directory) if info.complete][-1]
    assert newest.manifest is not None
    shards = [record.bytes for name, record in newest.manifest.files.items() if name.endswith(".distcp")]
    return UndisturbedRun(
        directory,
        losses_and_norms(metrics),
        seconds,
        (first["step"] - first["run_start"]) / 1e6,
        statistics.median(record["step_seconds"] for record in metrics),
        newest.bytes,
        min(shards),
    )


def _disturbed(
    campaign: Campaign, case: PlannedRun, reference: UndisturbedRun, disk_bytes: int | None
) -> list[FaultVerdict]:
    """One run under the faults of `case`, judged; its directory is removed unless it is wanted or of use."""
    directory = campaign.directory / case.name
    cache = campaign.directory / f"{case.name}-cache" if case.has_place("cache") else None
    marks = MarkFiles(campaign.directory / f"{case.name}-marks")
    checkpoints = directory / "checkpoints"
    marks.write_orders(
        FaultSettings(
            case=case,
            checkpoints=checkpoints,
            step_seconds=reference.step_seconds,
            shard_bytes=reference.shard_bytes,
            ballast=None if disk_bytes is None else checkpoints / "ballast",
        )
    )
    # More than the faults ask for: a restart that they did not ask for is found by counting, not by running out.
    max_restarts = case.restarts + 3
    settings = run_settings(campaign, case.name)
    if cache is not None:
        settings.append(f"data.cache_directory={json.dumps(str(cache))}")
    if case.has("stop"):
        settings.append(f"timeouts.watchdog_seconds={_watchdog(campaign, reference):g}")
    train = train_command(campaign.config, settings, campaign.num_ranks, max_restarts)
    output = campaign.directory / f"{case.name}.log"
    patience = 600 + 20 * (case.restarts + 1) * reference.seconds
    with contextlib.nullcontext() if disk_bytes is None else mounted_tmpfs(checkpoints, disk_bytes):
        course = run_until_done(disturbed_command(train, marks), case, marks, output, patience)
        findings = judge_faults(
            case, reference.figures, _evidence(case, course, directory, reference, marks, cache, output)
        )
    if not campaign.keep and all(finding.passed for finding in findings):
        for path in (directory, marks.directory, cache):
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
    return findings


def _watchdog(campaign: Campaign, reference: UndisturbedRun) -> float:
    return campaign.watchdog_seconds or max(30.0, 4 * reference.start_seconds)


def _evidence(
    case: PlannedRun,
    course: RunHistory,
    directory: Path,
    reference: UndisturbedRun,
    marks: MarkFiles,
    cache: Path | None,
    output: Path,
) -> Evidence:
    stopped = course.stopped
    if stopped and (said := last_words(output.read_text(errors="replace"))):
        stopped += f": {said[-1].strip()} (see {output})"
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for fault in case.faults:
        for phase in (*fault.phases, "after"):
            if (mark := marks.get(fault, phase)) is not None:
                found[fault.number, phase] = mark
    return Evidence(
        events=read_events(directory),
        metrics=[record for record in read_records(directory / METRICS_FILE) if "step" in record],
        marks=found,
        stopped=stopped,
        problems=list(_problems_at_the_end(course, directory, reference, cache)),
        end=event_microseconds({"time": utc_now()}),
    )


def _problems_at_the_end(
    course: RunHistory, directory: Path, reference: UndisturbedRun, cache: Path | None
) -> list[str]:
    """What is wrong with what the run left on disk and in memory."""
    problems = [f"left running: {command}" for start in course.starts for command in start.left_running]
    if course.stopped:
        return problems
    if different := _different_files(reference.directory / "final", directory / "final"):
        problems.append(f"final/ is not the undisturbed run's to the bit: {', '.join(different)}")
    for info in list_checkpoints(directory):
        bad = [found.name for found in verify(info) if not found.harmless]
        if info.complete and bad:
            problems.append(f"checkpoint {info.step} is damaged at the end: {', '.join(bad)}")
    if cache is not None and (half_made := list(cache.rglob("*.building-*"))):
        problems.append(f"a half-made cache was left: {half_made[0].name}")
    return problems


def _different_files(left: Path, right: Path) -> list[str]:
    """Names of files that are not in both directories with the same bytes."""
    names = {path.relative_to(top) for top in (left, right) for path in top.rglob("*") if path.is_file()}
    return sorted(str(name) for name in names if not _same_bytes(left / name, right / name))


def _same_bytes(left: Path, right: Path) -> bool:
    import filecmp

    return left.is_file() and right.is_file() and filecmp.cmp(left, right, shallow=False)
