"""Explanation of why a rank ended: exit codes and signals, the kernel's report on memory, the last
lines of its log.

When one rank dies its peers fail too, a moment later, with errors about lost connections. Such an
error is an effect: the cause is the first rank in time whose last lines do not report a lost peer.

Shipped with the agents of launched runs (launch/agent): standard library only, nothing newer than
Python 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from drillyard.supervise.process_identity import read_kernel_file
from drillyard.supervise.stop_requests import RANK_STOP_SIGNALS

_PEER_LOST = re.compile(
    r"\b(DistNetworkError|DistStoreError): |connectFullMesh|monitoredBarrier"
    r"|unhandled system error|remote process exited|nccl(Remote|System)Error"
    r"|caught collective operation timeout|detected by watchdog at work|NCCL operations have failed"
    r" or timed out"
    r"|Heartbeat monitor timed out|watchdog (got stuck|hang)|(flight recorder )?dump signal"
    r" (from|due to)"
    r"|\bJoin(?:Failed|Error): "
)
"""Messages that only a lost or late rank causes: of torch's c10d store and monitored barrier, gloo,
NCCL's network layer, ProcessGroupNCCL's watchdog and heartbeat monitor, and rendezvous.py."""
_CONNECTION_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|timed? ?out\b|no route"
    r" to host",
    re.IGNORECASE,
)
_BETWEEN_RANKS = re.compile(
    r"\bgloo\b|\bNCCL\b|ProcessGroup|\bprocess group\b|c10d|TCPStore|torch/distributed/rendezvous"
)
"""Names of the store or a collective library, in a message or in the frame that raised it.
Downloads, metadata servers and data loaders lose connections too."""
_ANOTHER_SERVICE = re.compile(r"https?://|HTTPS?ConnectionPool")
_OWN_FAULT = re.compile(
    r"failed to listen|EADDRINUSE|cannot be retrieved \(gai error|CUDA error: "
    r"|shared memory segment|No space left on device"
)
"""Faults of this host that torch and NCCL report in the same classes of exceptions as a lost
peer."""
_GAVE_UP_WAITING = re.compile(
    r"timed? ?out\b|detected by watchdog at work|watchdog (got stuck|hang)", re.IGNORECASE
)
_NO_MEMORY = re.compile(
    r"^(\S*\.)?MemoryError\b|^(\S*\.)?OutOfMemoryError\b|CUDA out of memory|can't allocate"
    r" memory|std::bad_alloc"
    r"|Cannot allocate memory"
)
_EXCEPTION = re.compile(
    r"^([\w.]*(Error|Exception|Interrupt|Exit|Failed|Timeout)\b|Fatal Python error: )"
)
_MESSAGE = re.compile(r"error: ")
_TERMINATED = re.compile(r"^terminate called after throwing an instance of '(?:\w+::)*(\w+)'")
_FATAL_LOG = re.compile(r"^\[F\S* .*?\] ")
"""Last line before C++'s LOG(FATAL) aborts, by which ProcessGroupNCCL's heartbeat monitor ends a
rank."""
_NOT_A_CAUSE = re.compile(
    r'^\s*(Step: \d+|\{".*\}|Evaluation after step|Checkpoint: |\[rank\d+\]:\[W|Extension'
    r" modules: )"
)
_STACK = re.compile(r'hread 0x\w+[^\n]*\(most recent call first\):\n((?:  File "[^\n]*\n)+)')
_FRAME = re.compile(r'  File "([^"]*)", line (\d+) in (\S+)')
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_TAIL_BYTES = 64 * 1024


def describe_exit(returncode: int) -> str:
    """`exit code 1`, `killed by SIGKILL (exit code 137)` for a code; negative ones are signals, as
    in subprocess."""
    if returncode < 0:
        return f"killed by {_signal_name(-returncode)} (exit code {128 - returncode})"
    if 128 < returncode <= 128 + 64:
        return f"exit code {returncode}, the code of {_signal_name(returncode - 128)}"
    return f"exit code {returncode}"


def exit_status(returncode: int) -> int:
    """The code a shell would show: 128 + N for a process ended by signal N."""
    return 128 - returncode if returncode < 0 else returncode


def stop_signal(returncode: int) -> signal.Signals | None:
    """The SIGTERM or SIGUSR1 by which a rank ended, before it could handle it or at the second
    request; else None."""
    return {128 + number: number for number in RANK_STOP_SIGNALS}.get(exit_status(returncode))


def was_killed(returncode: int) -> bool:
    """Whether a rank ended by SIGKILL, which is also how the kernel ends a process when memory runs
    out."""
    return exit_status(returncode) == 128 + signal.SIGKILL


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def oom_kills() -> int:
    """Number of this control group's processes that the kernel has killed for lack of memory; 0
    where that is unknown.

    cgroup v2: `oom_kill` of memory.events; v1: of memory.oom_control. Where neither exists, as in
    the root group, that of the whole host in /proc/vmstat (Linux 4.13).
    """
    texts = []
    for line in read_kernel_file("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            texts += [
                read_kernel_file(f"/sys/fs/cgroup{place}/memory.events") for place in (path, "")
            ]
        elif "memory" in controllers.split(","):
            texts.append(read_kernel_file(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    texts.append(read_kernel_file("/proc/vmstat"))
    counts = (re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for text in texts)
    return next((int(found[1]) for found in counts if found), 0)


def memory_verdict(oom_kills_before: int) -> str:
    """Describe what is known about why a rank was killed by SIGKILL."""
    if oom_kills() > oom_kills_before:
        return (
            "the kernel ended it because memory ran out; lower micro_batch_size or the ranks per"
            " host"
        )
    return (
        "possibly out of memory, or killed from outside; the kernel reports no out-of-memory kill"
    )


def read_from(path: Path, offset: int) -> str:
    """Read a log from byte `offset` on, at most its last 64 KiB; empty when it cannot be read
    now."""
    with contextlib.suppress(OSError), open(path, "rb", opener=_open_at_once) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(offset, size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode(errors="replace")
    return ""


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting: in the place of a log there may be a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def last_words(text: str, limit: int = 6) -> list[str]:
    """Select the lines of a rank's log that best explain its end, at most `limit`.

    A message for the user (`error: ...`) to its end, where no exception follows; else an uncaught
    C++ exception or fatal log line, after which only stacks follow; else the last exception and the
    line of code that raised it; else the last lines that are neither steps nor warnings of a
    collective library.
    """
    lines = [line.rstrip() for line in text.splitlines()]
    bare = [_RANK_PREFIX.sub("", line) for line in lines]
    patterns = (_MESSAGE, _TERMINATED, _FATAL_LOG, _EXCEPTION)
    message, terminated, fatal, raised = (_last_match(pattern, bare) for pattern in patterns)
    if message > max(terminated, fatal, raised):
        return _until_blank(lines[message:], limit)
    if found := _TERMINATED.match(bare[terminated]) if terminated >= 0 else None:
        what = lines[terminated + 1].strip() if terminated + 1 < len(lines) else ""
        return [f"{found[1]}: {what.removeprefix('what():').strip()}"]
    if fatal >= 0:
        return [lines[fatal]]
    if raised >= 0:
        # Without the line of ^ and ~ that Python puts below the code.
        frame = [
            line
            for line in lines[max(raised - 3, 0) : raised]
            if line.lstrip("[]rank0123456789: ").strip("^~ ")
        ]
        return [*frame[-2:], *_until_blank(lines[raised:], limit - 2)]
    shown = [
        line
        for line in lines
        if line and not _NOT_A_CAUSE.match(line) and not line.startswith("=== ")
    ]
    return shown[-limit:]


def _last_match(pattern: re.Pattern[str], lines: list[str]) -> int:
    """Number of the last line that begins with the pattern; -1 without any."""
    return max((number for number, line in enumerate(lines) if pattern.match(line)), default=-1)


def _until_blank(lines: list[str], limit: int) -> list[str]:
    blank = lines.index("") if "" in lines else len(lines)
    return lines[: min(blank, limit)]


def user_message(text: str) -> str | None:
    """Last message about a user's mistake in a rank's log (`error: ...`, its whole text), or None.

    Only for a rank whose exit code announces one: other programs begin lines like that as well.
    """
    lines = [line.rstrip() for line in text.splitlines()]
    message = _last_match(_MESSAGE, lines)
    return "\n".join(_until_blank(lines[message:], 40)) if message >= 0 else None


def error_line(words: Sequence[str]) -> str:
    """The line of `last_words` that names the error: the first exception or message, else the last
    line, or nothing."""
    for line in words:
        bare = _RANK_PREFIX.sub("", line)
        if _EXCEPTION.match(bare) or bare.startswith("error: "):
            return bare
    return words[-1].strip() if words else ""


def exit_reason(rank: int | None, returncode: int, words: Sequence[str]) -> str:
    """`rank 3: exit code 1; ValueError: ...`. What a killed process printed before was about its
    work: left out."""
    error = "" if was_killed(returncode) else error_line(words)
    return (
        ("" if rank is None else f"rank {rank}: ")
        + describe_exit(returncode)
        + (f"; {error}" if error else "")
    )


def memory_advice(words: list[str]) -> str | None:
    """Advise if a rank's last lines report that memory could not be allocated, in host or GPU; else
    None."""
    failed = any(_NO_MEMORY.search(_RANK_PREFIX.sub("", line)) for line in words)
    return (
        "memory could not be allocated; lower micro_batch_size or the ranks per host"
        if failed
        else None
    )


def speaks_of_lost_peer(words: list[str]) -> bool:
    """Whether a rank's last words report another rank's end or delay rather than an error of its
    own.

    A lost connection counts only where the words name what connects ranks: store, gloo, NCCL or a
    process group.
    """
    if any(_OWN_FAULT.search(line) for line in words):
        return False
    ours = [line for line in words if not _ANOTHER_SERVICE.search(line)]
    if any(_PEER_LOST.search(line) for line in ours):
        return True
    return any(_BETWEEN_RANKS.search(line) for line in ours) and any(
        _CONNECTION_LOST.search(line) for line in ours
    )


def speaks_of_timeout(words: list[str]) -> bool:
    """Whether a rank's last words report that it gave up waiting for another rank."""
    return speaks_of_lost_peer(words) and any(_GAVE_UP_WAITING.search(line) for line in words)


def innermost_frame(log: str) -> str | None:
    """`mapped_sequences.py:88 in read`, from the last of the stacks in a rank's log, its main
    thread's; None without any."""
    stacks = _STACK.findall(log)
    frame = _FRAME.search(stacks[-1]) if stacks else None
    return f"{Path(frame[1]).name}:{frame[2]} in {frame[3]}" if frame else None
