"""The memory of a host is what the control groups around a process allow, wherever these are
mounted."""

from __future__ import annotations

from pathlib import Path

import pytest

from drillyard.training.model_setup import host_memory_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {"memory.max": 512 * MIB}, 512),
        # A job of Slurm: its step is not limited, the job is.
        (
            "0::/system.slice/slurmd/job_7/step_0/task_0",
            {
                "system.slice/slurmd/job_7/memory.max": 300 * MIB,
                "system.slice/slurmd/job_7/step_0/memory.max": "max",
            },
            300,
        ),
        # The lowest one counts.
        ("0::/a/b", {"a/memory.max": 200 * MIB, "a/b/memory.max": 400 * MIB}, 200),
        # A container with its own group mounted, which has the host's path.
        ("0::/kubepods/pod1/c", {"memory.max": 100 * MIB}, 100),
        (
            "4:cpu,cpuacct:/\n3:memory:/slurm/job_7\n0::/",
            {
                "memory/memory.limit_in_bytes": 2**63 - 4096,
                "memory/slurm/job_7/memory.limit_in_bytes": 250 * MIB,
            },
            250,
        ),
        ("4:cpu:/small\n", {"cpu/small/memory.limit_in_bytes": MIB}, None),
        ("0::/", {}, None),
    ],
)
def test_the_lowest_limit_counts(
    tmp_path: Path, groups: str, limits: dict[str, int | str], expected: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for path, limit in limits.items():
        file = tmp_path / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    without = host_memory_bytes(tmp_path / "nothing")
    assert host_memory_bytes(tmp_path) == (without if expected is None else expected * MIB)
