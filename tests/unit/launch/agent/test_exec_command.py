"""What agents start hears Ctrl-C, though the launch that started them did not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from drillyard.launch.agent import exec_command
from drillyard.programs import defer_interrupt

SHOWN = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]
KEPT = (
    "import sys; from drillyard.launch.agent.respawn import respawn;"
    " sys.exit(respawn(sys.argv[1:]))"
)


@pytest.fixture
def ctrl_c_held_back() -> Iterator[None]:
    """As a launch does it, from a shell's background job, which ignores SIGINT."""
    ignored = signal.getsignal(signal.SIGINT)
    with defer_interrupt("local://c/r"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield
    signal.signal(signal.SIGINT, ignored)


def heeds_ctrl_c(*argv: str) -> dict[str, bool]:
    """Whether SIGINT is neither blocked nor ignored in what `argv` becomes or starts."""
    output = subprocess.run(
        [sys.executable, *argv, *SHOWN], capture_output=True, text=True, check=True
    ).stdout
    masks = dict(line.split(":") for line in output.splitlines())
    return {name: not int(mask, 16) & 1 << (signal.SIGINT - 1) for name, mask in masks.items()}


@pytest.mark.usefixtures("ctrl_c_held_back")
def test_a_command_and_a_kept_agent_hear_ctrl_c_again() -> None:
    command = [exec_command.__file__, str(os.getpid()), "", ""]
    for words in (command, ["-c", KEPT]):
        assert heeds_ctrl_c(*words) == {"SigBlk": True, "SigIgn": True}


@pytest.mark.usefixtures("ctrl_c_held_back")
def test_otherwise_it_would_be_inherited() -> None:
    assert heeds_ctrl_c("-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])") == {
        "SigBlk": False,
        "SigIgn": False,
    }
