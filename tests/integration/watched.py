"""A run in the background whose console is read as it comes, to do something at a chosen moment of
it."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.facts import says
from tests.integration.held import Holds
from tests.integration.tiny_run import DRILLYARD, TIMEOUT_SECONDS, Run

Event = dict[str, Any]


class WatchedRun:
    """`drillyard train` on two ranks; `console` has rank 0's lines so far, `errors` the
    supervisor's words."""

    def __init__(self, config: Path, holds: Holds | None = None) -> None:
        self.run = Run(config)
        self.console: list[Event] = []
        self.errors: list[str] = []
        program = holds.program if holds else DRILLYARD
        command = [*program, "train", str(config), "--nproc-per-node", "2", "--console", "json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._readers = [
            threading.Thread(target=self._read),
            threading.Thread(target=self._read_errors),
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, condition: Callable[[Event], bool]) -> Event:
        """The first line of the console, come or to come, for which `condition` holds."""
        seen = 0
        while True:
            ended = self.process.poll() is not None and not self._readers[0].is_alive()
            while seen < len(self.console):
                if condition(self.console[seen]):
                    return self.console[seen]
                seen += 1
            assert not ended, f"it has ended before: {self.errors[-5:]}, {self.console[-3:]}"
            time.sleep(0.02)

    def wait_for_event(self, name: str, step: int = 0) -> Event:
        """The first event of that name at this step or later."""
        return self.wait_for(lambda line: line["event"] == name and (line.get("step") or 0) >= step)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds, while the run lives."""
        while not condition():
            assert self.process.poll() is None, (
                f"it has ended before: {self.errors[-5:]}, {self.console[-3:]}"
            )
            time.sleep(0.02)

    def lines_with(self, facts: str) -> list[str]:
        """The warnings that have these facts."""
        texts = [line.get("text", "") for line in self.console if line["event"] == "warning"]
        return [line for line in texts if says(line, facts)]

    def end(self) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(timeout=TIMEOUT_SECONDS)
        for reader in self._readers:
            reader.join()
        return code

    def kill(self) -> None:
        """SIGKILL to the supervisor; the kernel kills its ranks."""
        self.process.kill()
        self.end()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.console.append(json.loads(line))
            else:
                self.errors.append(line)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)
