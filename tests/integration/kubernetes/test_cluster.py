"""The fixture itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.integration.kubernetes.cluster import BRIDGE, Cluster, cgroup
from tests.integration.kubernetes.team import until


def test_a_killed_cluster_leaves_no_process_mount_or_bridge(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    place = tmp_path_factory.mktemp("killed")
    cluster = Cluster(place)
    cluster.start()
    assert len(_processes(place)) > 10
    os.kill(cluster.pid, signal.SIGKILL)
    until(lambda: not _processes(place), seconds=30)
    assert str(place) not in Path("/proc/mounts").read_text()
    assert not Path("/sys/class/net", BRIDGE).exists()
    cluster.stop()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{cgroup(cluster.directory, '*')}"))


def _processes(directory: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                str(directory).encode() in (path / "cmdline").read_bytes()
                and int(path.name) != os.getpid()
            ):
                found.append(int(path.name))
        except OSError:
            continue
    return found
