"""Watchdog process: ends a rank whose interpreter is held by code that never releases it, if it has
no supervisor.

No thread of the rank can check it then, and a timer of the kernel or of faulthandler would end a
healthy rank that was suspended (SIGSTOP, a frozen container, a moved virtual machine). So the rank
sends a byte at every check of itself, and the silence is measured in short slices. A slice in which
this process was held up itself, or found the rank stopped, restarts the count.

It runs as a script, `python -I -S held_interpreter.py PID LIMIT TICK`, with a pipe as its input.
Too long a silence: SIGQUIT, at which faulthandler writes the rank's stacks without its interpreter,
then SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

SECONDS_FOR_STACKS = 2.0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger (proc(5): T, t)."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat,
    ):
        return stat.read().rpartition(")")[2].split()[0] in "Tt"
    return False


def await_silence(pid: int, limit: float, tick: float) -> bool:
    """Wait until `pid` was silent for `limit` seconds in which it could run; False when it ends
    before."""
    silent = 0.0
    while os.getppid() == pid:
        began = time.monotonic()
        if select.select([0], [], [], tick)[0]:
            if not os.read(0, 4096):
                return False
            silent = 0.0
            continue
        slice_seconds = time.monotonic() - began
        silent += slice_seconds
        if slice_seconds > 3 * tick + 1 or is_stopped(pid):
            silent = 0.0
        elif silent > limit:
            return True
    return False


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    pid, limit, tick = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    if not await_silence(pid, limit, tick):
        return
    text = (
        f"watchdog: process {pid} has not run Python for {limit:.0f} s (its interpreter is held):"
        " killing it\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    for number in (signal.SIGQUIT, signal.SIGKILL):
        if os.getppid() == pid:
            os.kill(pid, number)
        time.sleep(SECONDS_FOR_STACKS)


if __name__ == "__main__":
    main()
