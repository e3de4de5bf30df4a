"""The verb `submit`, on the head host of a Slurm cluster: write launch directories, submit, note the runs in the index.

All of it is done under one lock of the kernel, and only where the index has of each run the job that the launch has
seen there. So of several launches of a name at the same moment one submits.

`--sent` is the unpacked archive of the launch: the files of the launch directory, `points/RUN/` with those of a sweep's
other runs, and `index/RUN.json`, the entries. Launch directories are siblings: OUTPUT/RUN/launch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from .index import index_directory
from .ownership import make_launch_directory, problem_of
from .startup import UsageError
from .state_file import forget_secrets, read_json_object, replace_file

TAKEN = 3
"""Exit code: another launch has submitted a run of this name meanwhile."""
SAYS = "drillyard: "
"""Begins a line of standard error that is for the user, although all went well."""
ENTRIES, POINTS = "index", "points"
_LAST_END = ("state.json", "ended.json")
_LOCK_SECONDS = 120.0
_SBATCH_NOT_FOUND = 127


def prepare(options: Namespace) -> int:
    """The verb `prepare`: make a launch directory that only its owner may write to. Raises UsageError, OSError."""
    if problem := make_launch_directory(Path(options.launch_directory)):
        raise UsageError(problem)
    return 0


def submit(options: Namespace) -> int:
    """Submit; prints the job's id. Raises UsageError, OSError."""
    # What is in launch directories is the user's own; the job gets the user's own umask.
    umask = os.umask(0o077)
    os.umask(umask | 0o022)
    sent, launch = Path(options.sent), Path(options.launch_directory)
    index = index_directory() / options.cluster
    index.mkdir(parents=True, exist_ok=True)
    entries = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted((sent / ENTRIES).glob("*.json"))}
    with _locked(index / ".lock"):
        for path, entry in entries.items():
            there = read_json_object(index / path.name).get("job_id")
            if there != entry.pop("replaces"):
                print(f"job {there}", file=sys.stderr, flush=True)
                return TAKEN
        launches = {launch, *(Path(entry["launch_directory"]) for entry in entries.values())}
        for directory in launches:
            if problem := problem_of(directory):
                raise UsageError(problem)
        if (sent / "job.json").exists():
            _place(launch, *(path for path in sent.iterdir() if path.name not in (ENTRIES, POINTS)))
            shared = [sent / name for name in ("agent", "secret", "secrets.json")]
            for point in (sent / POINTS).glob("*"):
                _place(launch.parent.parent / point.name / "launch", *point.iterdir(), *shared)
        elif (sent / "secrets.json").exists():
            _copy(str(sent / "secrets.json"), str(launch / "secrets.json"))
        argv = ["sbatch", "--parsable", *_dependency(options.after), str(launch / options.script)]
        try:
            done = subprocess.run(
                argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False, umask=umask
            )
        except FileNotFoundError:
            print("sbatch: not found", file=sys.stderr, flush=True)
            return _SBATCH_NOT_FOUND
        if done.returncode != 0:
            for directory in launches:
                forget_secrets(directory)
            return done.returncode
        # A federation's cluster follows the id: `12;cluster`.
        job_id = done.stdout.split()[-1].partition(";")[0]
        for path, entry in entries.items():
            task = entry.pop("task", None)
            entry["job_id"] = job_id if task is None else f"{job_id}_{task}"
            try:
                replace_file(index / path.name, json.dumps(entry, indent=2) + "\n")
            except OSError as error:
                print(f"{SAYS}job {job_id} is submitted, but could not be noted: {error}", file=sys.stderr)
    print(job_id, flush=True)
    return 0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock out other launches of the cluster; warn where the file system has no locks (Lustre without -o flock)."""
    with open(path, "a", encoding="utf-8") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(f"{path}: another launch has had the lock for {_LOCK_SECONDS:.0f} s") from None
                time.sleep(0.1)
            except OSError as error:
                words = f"no lock on {path} ({error.strerror}): launches at the very same moment are not kept apart"
                print(f"{SAYS}{words}", file=sys.stderr)
                break
        yield


def _place(launch: Path, *sources: Path) -> None:
    """Put files and directories into a launch directory, each file in one step: an older start may be reading it."""
    if problem := make_launch_directory(launch):
        raise UsageError(problem)
    for name in _LAST_END:
        with contextlib.suppress(FileNotFoundError):
            (launch / name).unlink()
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, launch / source.name, dirs_exist_ok=True, copy_function=_copy)
        else:
            _copy(str(source), str(launch / source.name))


def _copy(source: str, target: str) -> None:
    shutil.copy2(source, f"{target}.new")
    os.replace(f"{target}.new", target)


def _dependency(handle: str | None) -> list[str]:
    """Options that have the job wait for the newest one of a run, by its handle. Raises UsageError."""
    if not handle:
        return []
    asked = ["squeue", "--noheader", "--all", "--array", "--states=all", "--me", "--format=%i %k"]
    listed = subprocess.run(asked, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False).stdout
    # The comment is the handle, and after it why the job was queued again.
    rows = [line.split() for line in listed.splitlines()]
    # All tasks of an array have the comment of the first run.
    jobs = [row[0] for row in rows if len(row) > 1 and row[1] == handle and row[0].partition("_")[2] in ("", "0")]
    if not jobs:
        raise UsageError(f"Slurm knows no job of {handle}; if it has succeeded, launch without --after")
    return [f"--dependency=afterok:{max(jobs, key=lambda job: int(job.partition('_')[0]))}", "--kill-on-invalid-dep=no"]
