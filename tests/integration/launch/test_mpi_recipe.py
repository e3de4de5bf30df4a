"""recipes/nccl-test-a4/mpi.sh with real ssh servers: two nodes of a run on this machine, and an
mpirun that shows how it reaches them. Open MPI itself is not here; its options are those of
Google's own NCCL test.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "recipes/nccl-test-a4/mpi.sh"
MPIRUN = """\
#!/bin/bash
# Runs the program once on every host, over the ssh that Open MPI would use.
while [ $# -gt 0 ]; do
    case $1 in
        --hostfile) hosts=$2; shift 2 ;;
        -np) processes=$2; shift 2 ;;
        --mca) [ "$2" != plm_rsh_agent ] || agent=$3; shift 3 ;;
        -x) passed="$passed $2=${!2}"; shift 2 ;;
        --bind-to) shift 2 ;;
        --*) shift ;;
        *) break ;;
    esac
done
echo "processes $processes, passed$passed"
while read -r host slots; do
    $agent "$host" "echo $host: $slots: $*" </dev/null || exit 9
done <"$hosts"
"""


@pytest.fixture
def nodes(tmp_path: Path):
    """Start the script as both nodes of a run, which know each other as 127.0.0.1 and 127.0.0.2."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("mpirun", MPIRUN),
        ("hostname", '#!/bin/sh\necho "127.0.0.$((NODE_RANK + 1))"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str) -> list[subprocess.Popen[str]]:
        for rank in range(2):
            environment = {
                **{
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith("NCCL_")
                },
                "PATH": f"{programs}:{os.environ['PATH']}:/usr/sbin",
                "MPI_DIRECTORY": str(tmp_path / "meeting"),
                "MASTER_PORT": str(20000 + os.getpid() % 9000),
                "NODE_RANK": str(rank),
                "NNODES": "2",
                "NPROC_PER_NODE": "8",
                "NCCL_NET": "gIB",
            }
            command = ["bash", str(SCRIPT), *argv]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(
                subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
            )
        return started

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def servers_left(directory: Path) -> list[str]:
    """Command lines of processes that name the directory."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                message = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if str(directory) in message and "pytest" not in message:
                left.append(message)
    return left


def test_mpirun_on_node_0_reaches_every_node_by_its_own_ssh_server(nodes, tmp_path):
    leader, other = nodes("all_reduce_perf", "-b", "8M")
    said, _ = leader.communicate(timeout=120)
    assert leader.returncode == 0, said
    assert "processes 16, passed" in said
    assert "NCCL_NET=gIB" in said
    for node in (1, 2):
        assert f"127.0.0.{node}: slots=8: all_reduce_perf -b 8M\n" in said
    assert other.wait(timeout=60) == 0
    # The private key stays on node 0: shared storage may not keep it private.
    assert [each.name for each in (tmp_path / "meeting").glob("*/key*")] == ["key.pub"]
    assert servers_left(tmp_path) == []


def test_all_nodes_end_with_the_code_of_the_program(nodes, tmp_path):
    leader, other = nodes("all_reduce_perf", ";", "exit", "3")
    leader.communicate(timeout=120)
    assert leader.returncode == 9
    assert other.wait(timeout=60) == 9
    assert servers_left(tmp_path) == []
