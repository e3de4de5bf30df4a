"""Many things at the same time, which an interrupt leaves at once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from drillyard.launch.programs import parallel_map

INTERRUPTED = """
import os, signal, threading
from drillyard.launch.programs import parallel_map

def never(_):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

parallel_map(lambda item: parallel_map(never, [item], 1), [1, 2], 2)
"""


def test_answers_come_in_order_and_the_first_failure_is_raised_when_all_have_ended() -> None:
    assert parallel_map(lambda number: number * number, range(100), 7) == [
        number * number for number in range(100)
    ]
    assert parallel_map(str, [], 4) == []
    ended = []

    def fail(number: int) -> None:
        ended.append(number)
        if number in (2, 5):
            raise ValueError(number)

    with pytest.raises(ValueError, match="2"):
        parallel_map(fail, range(9), 3)
    assert sorted(ended) == list(range(9))


def test_an_exit_in_a_thread_is_raised_where_it_is_waited_for() -> None:
    code = (
        "import sys; from drillyard.launch.programs import parallel_map as m; m(lambda _:"
        " sys.exit(3), [1, 2], 2)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3


def test_an_interrupt_ends_the_process_though_nothing_has_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGINT and b"KeyboardInterrupt" in done.stderr
