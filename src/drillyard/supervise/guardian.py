"""Ends what a supervisor leaves behind: a tiny process that waits for its supervisor to end, then kills the marked.

Every process of a run inherits the environment variable `DRILLYARD_SUPERVISOR=<token>`, so a process that left its
session, lost its parent or was forked by a data loader is still found in /proc. The kernel kills the ranks themselves
when their supervisor dies (PR_SET_PDEATHSIG); the guardian reaches the processes that ranks have started, and keeps
the lock of the run directory, which it inherits, until none is left.

It is run as a script, `python -I -S guardian.py TOKEN`, with the read end of a pipe as its input; the supervisor holds
the write end and never writes, so end of file means that the supervisor is gone, however it went. Only the standard
library is imported: starting it costs about 15 ms, once per run. A process that clears its environment is not found.

The agents of a launched run (launch/agent) use it as well, with two more arguments: the name of their own variable, so
that a supervisor inside of their command keeps its mark, and a number of seconds. They write a byte whenever they have
renewed their lease; when none comes for so long after the last one, the marked are killed although the agent may live.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Collection

MARK = "DRILLYARD_SUPERVISOR"
PATIENCE_SECONDS = 10.0


def marked_processes(token: str, mark: str = MARK) -> list[int]:
    """Ids of the live processes of this user, except the caller, whose environment carries `token`."""
    needle = f"{mark}={token}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environment:
                if needle in environment.read():
                    found.append(int(name))
        except OSError:
            # It ended meanwhile, or belongs to another user.
            continue
    return found


def end_marked_processes(token: str, spare: Collection[int] = (), mark: str = MARK) -> bool:
    """SIGKILL all processes marked with `token`, but those in `spare`, until none is left; False if some outlive 10 s
    (in a device call)."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while found := [pid for pid in marked_processes(token, mark) if pid not in spare]:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def main() -> None:
    """Wait for the end of standard input, then end the processes marked with the first argument.

    Second argument: the name of the mark. Third: seconds of silence after which they are ended as well, and waited on.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    token = sys.argv[1]
    mark = sys.argv[2] if len(sys.argv) > 2 else MARK
    longest_silence = float(sys.argv[3]) if len(sys.argv) > 3 else None
    silence = None
    while True:
        readable, _, _ = select.select([0], [], [], silence)
        if not readable:
            end_marked_processes(token, mark=mark)
            silence = None
        elif os.read(0, 4096):
            silence = longest_silence
        else:
            break
    end_marked_processes(token, mark=mark)


if __name__ == "__main__":
    main()
