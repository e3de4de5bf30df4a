"""A campaign around its runs: what it refuses, the settings of each run, what is kept, and what the
end shows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.errors import UserError
from drillyard.faults import campaign as module
from drillyard.faults.campaign import Campaign, UndisturbedRun, run_campaign, run_settings
from drillyard.faults.disturbed_run import ProcessRun, RunHistory
from drillyard.faults.fault_verdicts import Evidence, FaultVerdict
from drillyard.faults.plan import Fault, PlannedRun

KILL = Fault(1, "kill", "step", 1, 1, 13, 0.5)
FULL = Fault(2, "disk-full", "shards", 0, 0, 20, 0.5)
STOP = Fault(3, "stop", "step", 0, 0, 20, 0.5)
CACHE = Fault(4, "kill", "cache", 0, 0, 0, 0.5)
RUN: Any = SimpleNamespace(
    checkpoint=SimpleNamespace(every_steps=4), training=SimpleNamespace(steps=60)
)  # what a campaign reads of a run's config


def campaign(directory: Path, **changes: Any) -> Campaign:
    settings: dict[str, Any] = {
        "config": Path("run.yaml"),
        "directory": directory / "work",
        "kinds": ["kill"],
        "count": 1,
        "seed": 5,
        "num_ranks": 2,
    }
    return Campaign(**{**settings, **changes})


def reference(directory: Path, **changes: Any) -> UndisturbedRun:
    values: dict[str, Any] = {
        "directory": directory / "reference",
        "losses_and_norms": {step: (1.0, 2.0) for step in range(1, 61)},
        "seconds": 10.0,
        "start_seconds": 8.0,
        "step_seconds": 0.25,
        "checkpoint_bytes": 1000,
        "shard_bytes": 400,
    }
    return UndisturbedRun(**{**values, **changes})


def verdict(fault: Fault = KILL, *problems: str) -> FaultVerdict:
    return FaultVerdict(fault, "", "", True, problems=list(problems))


class Runs:
    """In place of runs of the trainer: what a campaign asked for, and the verdicts it gets."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, directory: Path, *problems: str, mounts: bool = True
    ) -> None:
        self.asked: list[tuple[PlannedRun, int | None]] = []
        self.sizes: list[int] = []
        self.shapes: list[Any] = []

        def disturbed(
            _: Campaign, planned: PlannedRun, __: UndisturbedRun, disk_bytes: int | None
        ) -> Any:
            self.asked.append((planned, disk_bytes))
            return [verdict(fault, *problems) for fault in planned.faults]

        def can_mount(size: int) -> bool:
            self.sizes.append(size)
            return mounts

        def draw(kinds: Any, count: int, seed: int, shape: Any) -> list[PlannedRun]:
            self.shapes.append(shape)
            return [PlannedRun("chaos-01", (KILL,)), PlannedRun("chaos-02", (FULL,))]

        monkeypatch.setattr(module, "_undisturbed", lambda _: reference(directory))
        monkeypatch.setattr(module, "_disturbed", disturbed)
        monkeypatch.setattr(module, "can_mount", can_mount)
        monkeypatch.setattr(module, "draw_faults", draw)


@pytest.mark.parametrize(
    ("every", "steps", "count", "named"),
    [
        (None, 60, 1, "checkpoint.every_steps"),
        (11, 60, 1, "at least 6"),
        (4, 60, 0, "--count 0"),
        (10, 60, 1, None),
        (10, None, 1, None),
    ],
)
def test_a_run_that_saves_too_rarely_and_too_few_faults_are_refused_before_anything_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int | None,
    steps: int | None,
    count: int,
    named: str | None,
) -> None:
    runs = Runs(monkeypatch, tmp_path)
    run: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(every_steps=every), training=SimpleNamespace(steps=steps)
    )
    if named is None:
        assert run_campaign(campaign(tmp_path, count=count), run, lambda _: None).passed
    else:
        with pytest.raises(UserError, match=named):
            run_campaign(campaign(tmp_path, count=count), run, lambda _: None)
        assert runs.asked == [] and not (tmp_path / "work").exists()


def test_a_directory_with_something_in_it_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runs(monkeypatch, tmp_path)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine").touch()
    with pytest.raises(UserError, match="not empty"):
        run_campaign(campaign(tmp_path), RUN, lambda _: None)
    assert (tmp_path / "work" / "mine").exists()


@pytest.mark.parametrize(
    ("kinds", "mounts", "limit", "size"),
    # Four checkpoints of 1,000 bytes and a MiB.
    [
        (["kill", "disk-full"], True, "tmpfs", 1_052_576),
        (["kill", "disk-full"], False, "file-size", None),
        (["kill"], True, "file-size", None),
    ],
)
def test_a_full_disk_is_a_small_file_system_where_one_can_be_mounted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: Any,
    mounts: bool,
    limit: str,
    size: int | None,
) -> None:
    runs = Runs(monkeypatch, tmp_path, mounts=mounts)
    run_campaign(campaign(tmp_path, kinds=kinds, count=2), RUN, lambda _: None)
    assert runs.sizes == ([1_052_576] if "disk-full" in kinds else [])
    assert [(planned.name, bytes_) for planned, bytes_ in runs.asked] == [
        ("chaos-01", None),
        ("chaos-02", size),
    ]
    (shape,) = runs.shapes
    assert (shape.steps, shape.save_every, shape.num_ranks, shape.disk_limit) == (60, 4, 2, limit)


@pytest.mark.parametrize(
    ("problems", "keep", "kept"), [([], False, False), ([], True, True), (["step 3"], False, True)]
)
def test_the_directory_stays_where_a_fault_failed_or_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[str], keep: bool, kept: bool
) -> None:
    Runs(monkeypatch, tmp_path, *problems)
    notes: list[str] = []
    result = run_campaign(campaign(tmp_path, count=2, keep=keep), RUN, notes.append)
    assert (tmp_path / "work").exists() == kept
    assert (result.passed, result.runs, result.steps, result.reference_seconds) == (
        not problems,
        2,
        60,
        10.0,
    )
    failed = len(problems)
    assert notes[1:] == [
        "run 1 of 2: 0 of 2 faults done, 0 failed",
        f"run 2 of 2: 1 of 2 faults done, {failed} failed",
    ]
    assert 0 <= result.seconds < 60


def test_a_campaign_that_ends_before_a_verdict_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runs(monkeypatch, tmp_path)

    def fails(_: Campaign) -> None:
        raise UserError("no")

    monkeypatch.setattr(module, "_undisturbed", fails)
    with pytest.raises(UserError):
        run_campaign(campaign(tmp_path), RUN, lambda _: None)
    assert not (tmp_path / "work").exists()


def test_settings_of_a_run_follow_the_users_own_and_name_the_run(tmp_path: Path) -> None:
    settings = run_settings(campaign(tmp_path, overrides=["training.steps=60"]), "chaos-01")
    assert settings[:3] == ["training.steps=60", "name=chaos-01", f'output="{tmp_path / "work"}"']
    assert {
        "checkpoint.keep=2",
        "checkpoint.resume=auto",
        "logging.every_steps=1",
        "logging.wandb=null",
    } <= set(settings)
    assert "training.deterministic=true" not in settings
    assert run_settings(campaign(tmp_path, on_gpus=True), "a")[-1] == "training.deterministic=true"


def test_an_undisturbed_run_that_fails_is_refused_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_once(command: list[str], mark: str, log: Any) -> ProcessRun:
        log.write(b"ValueError: of the trainer\n")
        return ProcessRun(3, [])

    monkeypatch.setattr(module, "run_once", run_once)
    (tmp_path / "work").mkdir()
    with pytest.raises(UserError, match=r"(?s)exit code 3.*of the trainer"):
        module._undisturbed(campaign(tmp_path))


def test_what_is_measured_of_the_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    (work / "reference").mkdir(parents=True)
    steps = [
        {"step": n, "loss": n / 2, "grad_norm": 1.0, "step_seconds": float(n)} for n in (1, 2, 9)
    ]
    (work / "reference" / "metrics.jsonl").write_text(
        "".join(json.dumps(step) + "\n" for step in steps)
    )
    events = [("run_start", 1), ("step", 5), ("step", 7), ("run_start", 30)]
    times = [
        {"event": name, "time": f"2026-01-01T00:00:{second:02}.000000Z"} for name, second in events
    ]
    files = {"__0_0.distcp": 70, "__1_0.distcp": 60, "trainer.json": 5}
    manifest = SimpleNamespace(
        files={name: SimpleNamespace(bytes=size) for name, size in files.items()}
    )
    checkpoints = [
        SimpleNamespace(complete=complete, manifest=manifest, bytes=size)
        for complete, size in ((True, 1), (True, 135), (False, 9))
    ]
    commands: list[list[str]] = []
    monkeypatch.setattr(
        module, "run_once", lambda command, *_: commands.append(command) or ProcessRun(0, [])
    )
    monkeypatch.setattr(module, "read_events", lambda _: times)
    monkeypatch.setattr(module, "list_checkpoints", lambda _: checkpoints)
    found = module._undisturbed(campaign(tmp_path))
    assert found.losses_and_norms == {1: (0.5, 1.0), 2: (1.0, 1.0), 9: (4.5, 1.0)}
    assert (found.start_seconds, found.step_seconds, found.checkpoint_bytes, found.shard_bytes) == (
        4.0,
        2.0,
        135,
        60,
    )
    (command,) = commands
    assert command[command.index("--max-restarts") + 1] == "0" and "name=reference" in command


class Disturbed:
    """One disturbed run without processes: the command and time limit it was started with, and the
    evidence."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *problems: str, stopped: str = "", log: str = ""
    ) -> None:
        self.evidence: list[Evidence] = []

        def run_until_done(
            command: list[str], planned: Any, phases: Any, output: Path, timeout: float
        ) -> RunHistory:
            self.command, self.timeout = command, timeout
            self.settings = [
                after for word, after in itertools.pairwise(command) if word == "--set"
            ]
            output.write_text(log)
            metrics = output.parent / planned.name / "metrics.jsonl"
            metrics.parent.mkdir(exist_ok=True)
            metrics.write_text('{"step": 1, "loss": 1.0}\n{"held_out_loss": 2.0}\n')
            return RunHistory([], stopped)

        def judge(planned: PlannedRun, losses: Any, evidence: Evidence) -> list[FaultVerdict]:
            self.evidence.append(evidence)
            return [verdict(fault, *problems) for fault in planned.faults]

        monkeypatch.setattr(module, "run_until_done", run_until_done)
        monkeypatch.setattr(module, "judge_faults", judge)


@pytest.mark.parametrize(
    ("fault", "changes", "start_seconds", "watchdog"),
    [
        (KILL, {}, 8.0, None),
        (STOP, {}, 8.0, "32"),
        (STOP, {}, 2.0, "30"),
        (STOP, {"watchdog_seconds": 7.5}, 8.0, "7.5"),
    ],
)
def test_a_run_with_a_stopped_rank_has_a_watchdog(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    changes: Any,
    start_seconds: float,
    watchdog: str | None,
) -> None:
    runs = Disturbed(monkeypatch)
    (tmp_path / "work").mkdir()
    one = campaign(tmp_path, **changes)
    undisturbed = reference(tmp_path, start_seconds=start_seconds)
    module._disturbed(one, PlannedRun("chaos-01", (fault,)), undisturbed, None)
    found = [
        setting.partition("=")[2] for setting in runs.settings if setting.startswith("timeouts.")
    ]
    assert found == ([] if watchdog is None else [watchdog])
    restarts = runs.command[runs.command.index("--max-restarts") + 1]
    assert (restarts, runs.timeout) == ("4", 600 + 20 * 2 * 10.0)
    assert [record["step"] for record in runs.evidence[0].metrics] == [1]


@pytest.mark.parametrize(
    ("problems", "keep", "kept"), [([], False, False), ([], True, True), (["x"], False, True)]
)
def test_what_a_run_leaves_is_removed_where_its_faults_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: list[str], keep: bool, kept: bool
) -> None:
    runs = Disturbed(monkeypatch, *problems)
    (tmp_path / "work").mkdir()
    module._disturbed(
        campaign(tmp_path, keep=keep), PlannedRun("chaos-01", (CACHE,)), reference(tmp_path), None
    )
    assert (
        (tmp_path / "work" / "chaos-01").exists()
        == (tmp_path / "work" / "chaos-01-marks").exists()
        == kept
    )
    assert f'data.cache_directory="{tmp_path / "work" / "chaos-01-cache"}"' in runs.settings


@pytest.mark.parametrize(
    ("stopped", "log", "end"), [("", "words\n", ""), ("gave up", "ValueError: words\n", "words")]
)
def test_a_run_that_was_given_up_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str, log: str, end: str
) -> None:
    runs = Disturbed(monkeypatch, stopped=stopped, log=log)
    (tmp_path / "work" / "reference" / "final").mkdir(parents=True)
    module._disturbed(
        campaign(tmp_path), PlannedRun("chaos-01", (KILL,)), reference(tmp_path / "work"), None
    )
    assert runs.evidence[0].stopped.startswith(stopped)
    assert bool(runs.evidence[0].stopped) == bool(stopped) and end in runs.evidence[0].stopped


def test_the_end_of_a_run_shows_processes_weights_checkpoints_and_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, cache = tmp_path / "ours", tmp_path / "reference", tmp_path / "cache"
    for top, content in ((ours, b"a"), (theirs, b"b")):
        (top / "final").mkdir(parents=True)
        (top / "final" / "model").write_bytes(content)
        (top / "final" / "same").write_bytes(b"same")
    (theirs / "final" / "lacking").touch()
    (cache / "x.building-1").mkdir(parents=True)
    problems = {1: ["bad"], 2: [], 3: ["bad"], 4: ["harmless"]}
    infos = [SimpleNamespace(step=step, complete=step != 3) for step in problems]
    found = {
        step: [SimpleNamespace(name=n, harmless=n == "harmless") for n in names]
        for step, names in problems.items()
    }
    monkeypatch.setattr(module, "list_checkpoints", lambda _: infos)
    monkeypatch.setattr(module, "verify", lambda info: found[info.step])

    def problems_of(history: RunHistory, cache: Path | None) -> list[str]:
        return list(module._problems_at_end(history, ours, reference(tmp_path), cache))

    left, different, damaged, incomplete = problems_of(RunHistory(["python x"]), cache)
    assert left.endswith("python x") and different.endswith(": lacking, model")
    assert damaged.startswith("checkpoint 1 ") and incomplete.endswith("x.building-1")
    assert len(problems_of(RunHistory(), None)) == 2
    assert problems_of(RunHistory(["python x"], "gave up"), cache) == [left]
