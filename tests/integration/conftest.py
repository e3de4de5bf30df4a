"""What the integration tests of the main job share: one directory of data and one run that nothing
disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.forked_start import COMPUTING, PLAIN, STARTED_FOR_REAL, ForkedStarts
from tests.integration.held import Holds
from tests.integration.supervised import start as start
from tests.integration.tiny_run import STARTED, Run, train, write_config, write_rows
from tests.integration.watched import WatchedRun

_STARTS = ForkedStarts(COMPUTING, PLAIN)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork what the test starts, and the fixtures made for it, unless it is about real starts."""
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    names = (item.name, item.name.partition("[")[0])
    _STARTS.wanted = STARTED_FOR_REAL.isdisjoint((file, *(f"{file}::{name}" for name in names)))


def pytest_runtest_teardown() -> None:
    """Tests of other groups may come next."""
    _STARTS.wanted = False


@dataclass(frozen=True)
class Reference:
    """A run that went from its first step to its last, and what it printed."""

    run: Run
    output: str


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with rows.jsonl, for configs, runs and caches."""
    directory = tmp_path_factory.mktemp("drillyard")
    write_rows(directory / "rows.jsonl")
    return directory


@pytest.fixture(scope="session")
def reference(workplace: Path) -> Reference:
    """Two ranks, every step logged, no evaluation and no checkpoint before the end."""
    config = write_config(workplace, "reference", logging={"every_steps": 1, "tensorboard": True})
    ended = train(config, "--console", "text")
    assert ended.returncode == 0, ended.stderr
    return Reference(Run(config), ended.stdout)


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """What a failed test has left in the background would take the cores from the next, or wait for
    ever."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def watch() -> Iterator[Callable[..., WatchedRun]]:
    """Start a run whose console is read as it comes; it is killed at the test's end if it still
    runs."""
    started: list[WatchedRun] = []

    def start(config: Path, holds: Holds | None = None) -> WatchedRun:
        started.append(WatchedRun(config, holds))
        return started[-1]

    yield start
    for watched in started:
        watched.kill()
