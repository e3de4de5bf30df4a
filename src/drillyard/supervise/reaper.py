"""Reaper: a small process that waits for its parent, a supervisor or agent, to end, and kills what
that has started.

Every process of a run inherits an environment variable, a mark, so one that left its session or
lost its parent is still found in /proc; one that clears its environment is not. The kernel kills
the ranks themselves when their supervisor dies (PR_SET_PDEATHSIG). The reaper keeps the run
directory's lock, which it inherits, until it is done.

It runs as a script, `python -I -S reaper.py TOKEN MARK [SECONDS]`, with a pipe as its input, whose
end means that the parent is gone. With SECONDS, the parent must also write a byte whenever it has
renewed its lease: after that much silence the marked processes are killed although the parent may
live. Under an agent (launch/agent) the agent's reaper also reaches what the supervisor started.
Shipped with the agents: standard library only, Python 3.9.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence

SUPERVISOR_MARK = "DRILLYARD_SUPERVISOR"
"""In the environment of everything that a supervisor starts: a token of its own."""
AGENT_MARK = "DRILLYARD_AGENT"
"""In the environment of everything that one agent starts."""
RUN_MARK = "DRILLYARD_RUN"
"""In the environment of everything that a launched run starts on a host: `run_token` of its launch
directory."""
SECONDS_TO_END = 10.0


def marked_processes(token: str, mark: str) -> list[int]:
    """Ids of this user's live processes, except the caller, whose environment has `mark` with the
    value `token`."""
    needle = f"{mark}={token}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        # It may have ended meanwhile, or belong to another user.
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
            if needle in environment.read():
                found.append(int(name))
    return found


def kill_marked_processes(token: str, mark: str, spare: Collection[int] = ()) -> list[int]:
    """Send SIGKILL to the marked processes but those in `spare`; returns the ids of those that were
    found."""
    found = [pid for pid in marked_processes(token, mark) if pid not in spare]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def end_marked_processes(token: str, mark: str, spare: Collection[int] = ()) -> bool:
    """Kill the marked processes but those in `spare` until none is left; False if some outlive 10 s
    (in a device call)."""
    deadline = time.monotonic() + SECONDS_TO_END
    while kill_marked_processes(token, mark, spare):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class ParentWatcher:
    """Script that watches this process, the reaper: its input is a pipe from this process.

    It has a session of its own. Descriptors in `keep_open` are inherited: a lock on them is held
    until the script has ended.
    """

    def __init__(
        self,
        script: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        keep_open: Sequence[int] = (),
    ) -> None:
        # Imported here: the script itself does not need it, nor the 10 ms that it takes.
        import subprocess

        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(script), *map(str, arguments)],
            env=environment,
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=keep_open,
        )
        os.close(reader)

    def notify(self) -> None:
        """Send the script a byte: this process is alive, or has renewed its lease."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._writer, b".")

    def close(self) -> None:
        """Close the pipe, and wait until the script has done its work."""
        os.close(self._writer)
        self._process.wait()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    token, mark = sys.argv[1:3]
    longest_silence = float(sys.argv[3]) if len(sys.argv) > 3 else None
    silence = None
    while True:
        readable, _, _ = select.select([0], [], [], silence)
        if not readable:
            end_marked_processes(token, mark)
            silence = None
        elif os.read(0, 4096):
            silence = longest_silence
        else:
            break
    end_marked_processes(token, mark)


if __name__ == "__main__":
    main()
