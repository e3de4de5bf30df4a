"""Ranks that run out of memory: killed by the kernel in a control group, or refused by a limit;
both reported as such.

Needs root, for a control group of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.supervised import Start, until

GREEDY = """
    if attempt == 0:
        step(1)
        if rank == 1:
            taken = []
            while True:
                taken.append(bytearray(1 << 22))
        time.sleep(forever)
    """


GROUP_BYTES = 400 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 400 MiB of memory, under either version of control groups."""
    unified = Path("/sys/fs/cgroup/cgroup.subtree_control")
    if unified.exists():
        unified.write_text("+memory")
        parent, memory, swap = unified.parent, "memory.max", {"memory.swap.max": 0}
    else:
        parent, memory = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        swap = {"memory.memsw.limit_in_bytes": GROUP_BYTES}
    group = parent / f"drillyard-test-{os.getpid()}"
    group.mkdir()
    (group / memory).write_text(str(GROUP_BYTES))
    for name, limit in swap.items():
        # Only kernels that count swap have it: what is too much must not go there.
        if (group / name).exists():
            (group / name).write_text(str(limit))
    yield group
    until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_rank_that_the_kernel_kills_for_its_memory_is_reported_as_that(
    start: Start, small_group: Path
) -> None:
    run = start(GREEDY, prelude=f"open({str(small_group / 'cgroup.procs')!r}, 'w').write('0')\n")
    code, _, err = run.end()
    assert code == 0
    assert says(err, "rank 1: ... SIGKILL (exit code 137) ... memory ran out ... micro_batch_size")
    failure = next(event for event in run.events() if event["event"] == "failure")
    assert (failure["failed_rank"], failure["exit_code"], failure["step"]) == (1, 137, 1)


def test_a_rank_that_gets_no_more_memory_is_reported_as_that(start: Start) -> None:
    run = start(
        "\n    import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))" + GREEDY
    )
    code, _, err = run.end()
    assert code == 0
    assert says(err, "rank 1: exit code 1; MemoryError; ... lower micro_batch_size")
