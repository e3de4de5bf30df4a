"""Command line of the agent; its output for launchers is one line of JSON on standard output.

Exit codes of `run` and `keep`: 0 done; 85 stopped from outside with everything saved: start it
again, not counted; 2 refused; 75 a node was lost: start it again elsewhere, not counted; 1 failed;
130 cancelled. The other verbs: 0, 1 where it could not be done, 2 for a mistake in the call;
`place` and `submit`: 3 where another launch of this name has submitted meanwhile, or is about to.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from drillyard.supervise.launch_contract import EXIT_FAILED, EXIT_USER_ERROR

from .job import UsageError


def main() -> int:
    options = _parser().parse_args()
    # A host is sent the source at every call, and compiles what the verb needs alone.
    module, function = options.verb.split(".")
    verb = getattr(importlib.import_module(f".{module}", __package__), function)
    try:
        return int(verb(options))
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR if isinstance(error, UsageError) else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agent", description="Runs one node's part of a launched run."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(name: str, verb: str, text: str, *required: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(verb=verb)
        for option in required:
            added.add_argument(f"--{option}", required=True)
        return added

    for name, verb, text in (
        ("run", "startup.run", "run this node's part in the foreground"),
        ("start", "respawn.start", "run it detached, and start it again when it is killed"),
        (
            "keep",
            "respawn.keep",
            "run an agent and start it again when it is killed, in the foreground",
        ),
    ):
        run = add(name, verb, text)
        run.add_argument("--job", required=True, help="job.json")
        run.add_argument(
            "--node-rank", type=int, help="rank of this node; else as Slurm or Vertex AI says"
        )
        run.add_argument(
            "--leader",
            help="host of node 0, as the other nodes reach it; else as the scheduler says",
        )
        run.add_argument(
            "--submission",
            help="name of this submission: counts are kept for as long as it is the same",
        )
        run.add_argument("--attempt", default="0", help="which start of this submission")
        run.add_argument(
            "--hosts",
            help="names of all nodes' hosts in the order of their ranks, with commas between",
        )
        run.add_argument(
            "--srun-log",
            nargs=2,
            metavar=("FILE", "BYTES"),
            help="where srun writes, from which byte on",
        )
        run.add_argument("--quiet", action="store_true", help="do not pass the command's output on")
        run.add_argument("--kept", action="store_true", help=argparse.SUPPRESS)
    what = "run one start of a Slurm job, on its first node: srun, and what follows its end"
    words = ("launch-directory", "handle", "submission", "attempt")
    start = add("slurm-job", "slurm_job.run", what, *words)
    for limit in ("--max-requeues", "--max-failures"):
        start.add_argument(limit, type=int, required=True)
    start.add_argument(
        "--heard",
        action="append",
        default=[],
        choices=("USR1", "TERM"),
        help="a signal that the job script has had",
    )
    start.add_argument(
        "--failed",
        nargs=2,
        metavar=("CODE", "REASON"),
        help="start nothing: record that the job failed before",
    )
    start.add_argument("srun", nargs="*", help="srun, its options and the agents' Python")
    stop = add("stop", "host_cleanup.stop", "cancel a run: end everything of it on this host")
    stop.add_argument("--launch-directory", required=True, help="also one that is gone")
    stop.add_argument(
        "--patience", dest="grace_seconds", type=float, default=30.0, help="grace period in seconds"
    )
    stop.add_argument("--submission", help="end agents of this submission alone")
    stop.add_argument("--mark-only", action="store_true", help="only mark the run as cancelled")
    stop.add_argument(
        "--keep-state", action="store_true", help="do not mark the run as cancelled: it has failed"
    )
    check = add("check", "host_check.check", "facts of this host")
    check.add_argument(
        "--directory", help="whether it can be written, and shows a nonce of another host"
    )
    check.add_argument(
        "--base", help="create nothing: where --directory is missing, look at this one"
    )
    check.add_argument("--project", help="a directory: whether it is there and can be written")
    check.add_argument(
        "--meet",
        nargs=5,
        metavar=("NAMES", "PORT", "SECRET", "OTHERS", "SECONDS"),
        help="join the leader of these names, on one of 16 ports",
    )
    check.add_argument("--as-leader", action="store_true", help="let OTHERS join, for SECONDS")
    check.add_argument("--write-nonce", help="write a file .drillyard-NONCE into the directory")
    check.add_argument(
        "--nonce", help="look for the file .drillyard-NONCE in the directory, for ten seconds"
    )
    check.add_argument(
        "--port", type=int, help="first of 16 ports, of which the free ones are listed"
    )
    check.add_argument("--python", help="a Python that should have Drillyard installed")
    check.add_argument("--launch-directory", help="list this run's agents on this host")
    check.add_argument("--image", help="a container image: whether it is here and can be run")
    check.add_argument("--runs", action="store_true", help="list the runs that are active here")
    what = "lock and write a launch directory, and note its run in the index"
    place = add("place", "submit.place", what, "launch-directory", "submission")
    place.add_argument("--sent", required=True, help="directory of the files")
    place.add_argument(
        "--entry", required=True, help="JSON with run, cluster, platform, launch_directory, ..."
    )
    what = "let other launches use a launch directory again"
    add("unlock", "submit.unlock", what, "launch-directory", "submission")
    what = "write launch directories and submit their job to Slurm"
    submitting = add(
        "submit", "submit.submit", what, "cluster", "sent", "launch-directory", "script"
    )
    submitting.add_argument("--after", help="handle of the run that must have succeeded before")
    add("list", "index.list_runs", "a cluster's runs in this host's index", "cluster")
    forget = add("forget", "index.forget", "remove a run from this host's index", "cluster", "run")
    forget.add_argument("--submission", help="only where it was entered by this submission")
    return parser
