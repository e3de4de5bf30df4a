"""What a silent rank is doing, in words: its process's state, its last sign of life, the line where its code stands."""

from __future__ import annotations

import re
from pathlib import Path

from drillyard.supervise.heartbeat import Heartbeat

_STATES = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait for a device or a file system",
}
_STACK = re.compile(r'hread 0x\w+[^\n]*\(most recent call first\):\n((?:  File "[^\n]*\n)+)')
_FRAME = re.compile(r'  File "([^"]*)", line (\d+) in (\S+)')


def process_state(pid: int) -> str:
    """The state letter of a process (proc(5): R, S, D, T, ...); empty when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name before it is in parentheses and may hold any character.
    return stat.rpartition(")")[2].split()[0]


def silence(rank: int, pid: int, sign: Heartbeat, now: float) -> str:
    """A line about a rank that has made no progress: `now` is time.monotonic."""
    state = _STATES.get(process_state(pid))
    words = [f"rank {rank}: {state}"] if state else [f"rank {rank}"]
    if sign.at:
        where = sign.phase if sign.step is None else f"{sign.phase} after step {sign.step}"
        words.append(f"{where}, last sign of life {now - sign.at:.1f} s ago")
    return "; ".join(words) if state else ": ".join(words)


def unkillable(rank: int, pid: int) -> str:
    """A line about a rank that SIGKILL has not ended: its process, its state, and where it is in the kernel."""
    letter = process_state(pid)
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        place = ""
    where = f", in {place} of the kernel" if place.strip("0") else ""
    state = f"it is {_STATES.get(letter, f'in state {letter}')}{where}" if letter else "it is gone now"
    return f"rank {rank}: process {pid} did not end after SIGKILL and is left behind; {state}"


def innermost_frame(log: str) -> str | None:
    """`mapped_sequences.py:88 in read`, from the last of the stacks in a rank's log, its main thread's; None without
    any."""
    stacks = _STACK.findall(log)
    frame = _FRAME.search(stacks[-1]) if stacks else None
    return f"{Path(frame[1]).name}:{frame[2]} in {frame[3]}" if frame else None
