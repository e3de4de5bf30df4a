"""Verbs that write launch directories on the head host, and keep other launches away: `submit`;
`place`, `unlock`.

`submit`, on Slurm, writes launch directories, submits, and records the runs in the index: all of it
under one kernel lock, and only if the index still has for each run the job that the launch has seen
there. So of several launches of a name at the same moment only one submits.

Where agents start on several hosts, no kernel lock can be held that long. The submit lock is the
file `claim` of the launch directory, in which `place` records the submission before it writes: a
launch that finds another one there submits nothing. The lock ends with `unlock`, when the launching
process of the same host dies, else after `SUBMIT_LOCK_SECONDS`. A plan that is applied by hand has
no such process. `place` and `unlock` hold a kernel lock to their ends, so a launch whose connection
was lost cannot write after the next one.

`--sent` is the unpacked archive of the launch: the files of the launch directory; for `place`,
`client`, the launching process; for `submit`, `points/RUN/` with those of a sweep's other runs, and
`index/RUN.json`, the entries. Launch directories are siblings: OUTPUT/RUN/launch.
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
from collections.abc import Iterator, Mapping
from pathlib import Path

from drillyard.supervise.process_identity import Process, process_of

from .host_check import running_agents
from .index import index_directory, lock_of, noted_directory, write_entry
from .job import LAUNCHED_FROM, UsageError
from .ownership import make_launch_directory, problem_of
from .state_file import forget_secrets, read_file, read_json_object, replace_file

TAKEN = 3
"""Exit code: another launch of this name has submitted meanwhile, or is about to."""
SUBMIT_LOCK_SECONDS = 900
"""Age at which a submit lock has expired."""
_MEMORY = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
SITE_DEFAULTS = {
    "SBATCH_ACCOUNT": ("--account", "-A"),
    "SBATCH_CONSTRAINT": ("--constraint", "-C"),
    "SBATCH_MEM_PER_CPU": _MEMORY,
    "SBATCH_MEM_PER_GPU": _MEMORY,
    "SBATCH_MEM_PER_NODE": _MEMORY,
    "SBATCH_PARTITION": ("--partition", "-p"),
    "SBATCH_QOS": ("--qos", "-q"),
    "SBATCH_RESERVATION": ("--reservation",),
    "SBATCH_TIMELIMIT": ("--time", "-t"),
    "SBATCH_WCKEY": ("--wckey",),
}
"""Input variables of sbatch that choose where a job runs, with how much memory, and who pays, by
the options of a script that decide it. Not SBATCH_CLUSTERS: squeue and scancel read another one."""
CONTROLLER_VARIABLES = {
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_CLUSTERS",
    "SLURM_JWT",
    "SLURM_CLUSTER_NAME",
}
"""Variables by which Slurm's commands find their controller."""
SAYS = "drillyard: "
"""Prefix of a line of standard error that is for the user, although the verb succeeded."""
ENTRIES, POINTS = "index", "points"
_LAST_END = ("state.json", "ended.json")
_PLACE_WAIT_SECONDS, _SUBMIT_WAIT_SECONDS = 30.0, 120.0
"""Longest waits for another launch's kernel lock: writing takes seconds, sbatch may try for a
while."""
_SBATCH_NOT_FOUND = 127


def has_expired(client: Process | None, age: float, seconds: float) -> bool:
    """Whether a submit lock that was taken `age` seconds ago, by the process `client` where that is
    known, keeps nobody out any more. The rule of every platform's lock."""
    return age >= seconds or (client is not None and client.here and not client.alive)


def place(options: Namespace) -> int:
    """Lock a launch directory, write what was sent, and record the run in the index. Raises
    UsageError, OSError."""
    sent, launch = Path(options.sent), Path(options.launch_directory)
    if problem := make_launch_directory(launch):
        raise UsageError(problem)
    with (
        _locked(lock_of(options.entry), _PLACE_WAIT_SECONDS),
        _locked(launch / "claim", _PLACE_WAIT_SECONDS),
    ):
        # On one machine two projects have launch directories of their own, and one entry.
        for directory in (launch, noted_directory(options.entry)):
            if directory is not None and (other := _other_launch(directory, options.submission)):
                print(f"submission {other}, in {directory}", file=sys.stderr, flush=True)
                return TAKEN
        mine = {
            "submission": options.submission,
            "at": time.time(),
            "client": read_json_object(sent / "client"),
        }
        (launch / "claim").write_text(json.dumps(mine) + "\n", encoding="utf-8")
        # A run that is submitted again has its other files.
        again = None if (sent / "job.json").exists() else ("secret", "secrets.json")
        _place(
            launch,
            *(
                path
                for path in sent.iterdir()
                if (path.name in again if again else path.name != "client")
            ),
        )
        write_entry(options.entry, options.submission)
    return 0


def _other_launch(launch: Path, submission: str) -> str | None:
    """The other submission that is being launched in a launch directory, or whose agents run there
    on this host; None where there is none."""
    other = read_json_object(launch / "claim")
    at = other.get("at")
    # A damaged lock has expired.
    age = time.time() - (at if isinstance(at, (int, float)) else 0)
    expired = has_expired(process_of(other.get("client")), age, SUBMIT_LOCK_SECONDS)
    if other.get("submission", submission) != submission and not expired:
        return f"{other['submission']}, {age:.0f} s ago; a lock ends after {SUBMIT_LOCK_SECONDS} s"
    # Another launch may have had the lock, and released it, since the hosts were checked.
    agents = running_agents(launch)
    return f"{agents[0]['submission']}, running there" if agents else None


def unlock(options: Namespace) -> int:
    """Release the submit lock, where it is still this submission's. Raises UsageError, OSError."""
    noted = Path(options.launch_directory, "claim")
    with _locked(noted, _PLACE_WAIT_SECONDS):
        if read_json_object(noted).get("submission") == options.submission:
            noted.write_text("", encoding="utf-8")
    return 0


def submit(options: Namespace) -> int:
    """Submit; prints the job's id. Raises UsageError, OSError."""
    # Only the user may write to launch directories; the job gets the user's own umask.
    umask = os.umask(0o077)
    os.umask(umask | 0o022)
    sent, launch = Path(options.sent), Path(options.launch_directory)
    index = index_directory() / options.cluster
    index.mkdir(parents=True, exist_ok=True)
    entries = {
        path: json.loads(read_file(path)) for path in sorted((sent / ENTRIES).glob("*.json"))
    }
    with _locked(index / ".lock", _SUBMIT_WAIT_SECONDS):
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
            shared = [
                sent / name
                for name in ("agent", "secret", "secrets.json", LAUNCHED_FROM)
                if (sent / name).exists()
            ]
            for point in (sent / POINTS).glob("*"):
                _place(launch.parent.parent / point.name / "launch", *point.iterdir(), *shared)
        elif (sent / "secrets.json").exists():
            _copy(sent / "secrets.json", launch / "secrets.json")
        environment = sbatch_environment(os.environ, Path(launch, options.script))
        left_out = sorted(
            {name for name in os.environ if name.startswith("SBATCH_")} - {*environment}
        )
        argv = ["sbatch", "--parsable", *_dependency(options.after), str(launch / options.script)]
        try:
            done = subprocess.run(
                argv,
                stdout=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
                check=False,
                umask=umask,
                env=environment,
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
                print(
                    f"{SAYS}job {job_id} is submitted, but could not be noted: {error}",
                    file=sys.stderr,
                )
    if left_out:
        words = f"{', '.join(left_out)}: not for this job, the cluster config decides"
        print(f"{SAYS}{words} (slurm.arguments adds options)", file=sys.stderr)
    print(job_id, flush=True)
    return 0


def sbatch_environment(environment: Mapping[str, str], script: Path) -> dict[str, str]:
    """`environment` without the variables that would change the job behind its script.

    sbatch prefers its input variables (SBATCH_EXPORT, SBATCH_TIMELIMIT) to the `#SBATCH` lines, and
    gives the job the SLURM_ and SRUN_ variables of an allocation in which this runs, which srun
    prefers to the job's. A site's or user's default for a setting that the script leaves open
    stays.
    """
    # sbatch itself reports a script that is not there.
    lines = script.read_text(encoding="utf-8").splitlines() if script.exists() else []
    words = [word for line in lines if line.startswith("#SBATCH ") for word in line.split()[1:]]
    kept = {
        name
        for name, options in SITE_DEFAULTS.items()
        if not any(
            word.partition("=")[0] == option
            if option.startswith("--")
            else word.startswith(option) and not word.startswith("--")
            for option in options
            for word in words
        )
    }
    ours = ("SBATCH_", "SLURM_", "SRUN_")
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ours) or name in kept or name in CONTROLLER_VARIABLES
    }


@contextlib.contextmanager
def _locked(path: Path, seconds: float) -> Iterator[None]:
    """Lock out other launches; warn where the file system has no locks (Lustre without -o
    flock)."""
    with open(path, "a", encoding="utf-8") as file:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"{path}: another launch has had the lock for {seconds:.0f} s"
                    ) from None
                time.sleep(0.1)
            except OSError as error:
                words = (
                    f"no lock on {path} ({error.strerror}): launches at the very same moment are"
                    " not kept apart"
                )
                print(f"{SAYS}{words}", file=sys.stderr)
                break
        yield


def _place(launch: Path, *sources: Path) -> None:
    """Put files and directories into a launch directory, each file in one step: an older start may
    be reading it."""
    if problem := make_launch_directory(launch):
        raise UsageError(problem)
    # A plan that is applied by hand has no record of its directory, and the last one is not its.
    old = (*_LAST_END, *([LAUNCHED_FROM] if "job.json" in {path.name for path in sources} else []))
    for name in old:
        (launch / name).unlink(missing_ok=True)
    for source in sources:
        files = (
            [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
        )
        for file in files:
            # The agent that was sent may have written bytecode.
            if file.parent.name != "__pycache__":
                target = launch / file.relative_to(source.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                _copy(file, target)


def _copy(source: Path, target: Path) -> None:
    """Copy a file in one step. The new one has its mode before its content, which may be a
    secret."""
    draft = target.with_name(f"{target.name}.new")
    draft.unlink(missing_ok=True)
    with open(source, "rb") as content:
        mode = os.fstat(content.fileno()).st_mode & 0o777
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(descriptor, "wb") as out:
                shutil.copyfileobj(content, out)
            draft.replace(target)
        except BaseException as error:
            draft.unlink()
            if isinstance(error, OSError):
                error.filename = error.filename or str(target)
            raise


def _dependency(handle: str | None) -> list[str]:
    """Build the options that make the job wait for the newest one of a run, by its handle. Raises
    UsageError."""
    if not handle:
        return []
    asked = ["squeue", "--noheader", "--all", "--array", "--states=all", "--me", "--format=%i %k"]
    listed = subprocess.run(
        asked, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False
    ).stdout
    # The comment is the handle, followed by the reason of a requeue.
    rows = [line.split() for line in listed.splitlines()]
    # All tasks of an array have the comment of the first run.
    jobs = [
        row[0]
        for row in rows
        if len(row) > 1 and row[1] == handle and row[0].partition("_")[2] in ("", "0")
    ]
    if not jobs:
        raise UsageError(
            f"Slurm knows no job of {handle}; if it has succeeded, launch without --after"
        )
    return [
        f"--dependency=afterok:{max(jobs, key=lambda job: int(job.partition('_')[0]))}",
        "--kill-on-invalid-dep=no",
    ]
