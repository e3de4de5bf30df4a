"""How fast the logs of a run are merged and shown: 64 files, on one core (goal: 50 MB/s or more),
in how much memory.

    python benchmarks/launch_logs.py [--files 64] [--megabytes 512]

The times of the lines are random, so neighbours in the output are hardly ever from one file: the
most work for merging. Measured is the whole path of `drillyard runs logs`: reading, merging,
removing the stamps, cleaning, writing to /dev/null. `agents`: logs of nodes as agents stamp them.
`ranks`: lines whose stamps have another form (a comma before the milliseconds), as frameworks write
them. `remote`: agents' logs read over a pipe from the program that ssh starts on a login node
(without ssh). Memory is the process's peak less that at its start.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drillyard.control_characters import clean_lines
from drillyard.launch.logs.merge import key_of
from drillyard.launch.logs.reader import plain, run_logs
from drillyard.launch.remote_files import Files, LocalFiles, RemoteFiles
from drillyard.launch.request import LogSelection
from drillyard.programs import Host, Programs

TEXT = (
    b"Step: %d | Time: 14.54s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss: 0.6620 | GradNorm:"
    b" 0.1\n"
)
MEAN_MICROSECONDS = 1000


class Pipe(Programs):
    """Starts the words after `ssh HOST` on this machine."""

    def stream(self, argv: Sequence[str]) -> Any:
        """As `Programs.stream`."""
        return super().stream(["sh", "-c", f"exec {argv[-1]}"])


def write_logs(directory: Path, files: int, total_bytes: int, form: str) -> int:
    """node-0.log ... with `job.json`; returns the bytes written."""
    launch = directory / "launch"
    launch.mkdir(parents=True)
    job = f'{{"nodes": {files}, "processes_per_node": 1, "run_directory": "{directory}"}}'
    (launch / "job.json").write_text(job)
    chance = random.Random(0)
    written = 0
    for number in range(files):
        moment, step, lines, size = 1.76e15, 0, [], 0
        while size < total_bytes / files:
            moment += chance.expovariate(1 / MEAN_MICROSECONDS)
            stamp = key_of(int(moment))
            if form == "ranks":
                stamp = stamp[:10] + b" " + stamp[11:19] + b"," + stamp[20:23] + b" INFO "
            lines.append(stamp + TEXT % step)
            step += 1
            size += len(lines[-1])
        (launch / f"node-{number}.log").write_bytes(b"".join(lines))
        written += size
    return written


def show(directory: Path, files: Files, size: int, name: str) -> None:
    """Merge once; print speed and memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    written = 0
    with open(os.devnull, "wb") as out:
        for piece in run_logs(str(directory / "launch"), files, LogSelection(), over=lambda: True):
            written += out.write(clean_lines(plain(piece, stamps=False, prefixes=True)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{name:8} {size / 1e6:6.0f} MB  {size / 1e6 / wall:6.1f} MB/s  ({size / 1e6 / cpu:.1f} MB"
        f" per second of CPU)  {memory:5.0f} MiB of memory"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=512)
    arguments = parser.parse_args()
    # One core for this process and what it starts.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as temporary:
        for form, size in (("agents", arguments.megabytes), ("ranks", arguments.megabytes // 4)):
            directory = Path(temporary, form)
            written = write_logs(directory, arguments.files, size * 1_000_000, form)
            show(directory, LocalFiles(), written, form)
            if form == "agents":
                remote = RemoteFiles(Host("login"), Pipe(), python=sys.executable)
                show(directory, remote, written, "remote")
                remote.close()


if __name__ == "__main__":
    main()
