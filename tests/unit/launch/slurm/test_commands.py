"""What Slurm's commands print, as it is read, and what sbatch's refusals are answered with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.errors import UnreachableError, UserError
from drillyard.launch.run_status import Handle
from drillyard.launch.slurm import commands
from drillyard.launch.slurm.commands import Slurm, parse_sacct, parse_squeue
from drillyard.programs import Host, Programs, Result

SQUEUE = """\
12|RUNNING|None|1795304546|1795304549|1795308149|2|n[1-2]|main|/shared/a|b/launch/job.sbatch|slurm://c/run
13_2|PENDING|(ReqNodeNotAvail, UnavailableNodes:n[1-2])|1795304546|N/A|N/A|4||main,long|/x/array.sbatch|slurm://c/first
14|CANCELLED by 1000|None|1795304546|1795304546|1795304550|1-4|(null)|main|(null)|(null)
"""


class Answers(Programs):
    """Programs that end with one answer."""

    def __init__(self, returncode: int = 0, stdout: str = "", stderr: str = "") -> None:
        self.answer = (returncode, stdout, stderr)
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], **options: Any) -> Result:
        self.asked.append(tuple(argv))
        return Result(tuple(argv), *self.answer)


def test_a_line_of_squeue_is_a_job():
    run, waits, over = parse_squeue(SQUEUE)
    assert (run.job_id, run.state, run.reason, run.nodes, run.node_list) == (
        "12",
        "RUNNING",
        "",
        2,
        "n[1-2]",
    )
    assert (run.submitted_at, run.started_at) == (1795304546.0, 1795304549.0)
    assert (run.script, run.comment) == ("/shared/a|b/launch/job.sbatch", "slurm://c/run")
    assert (waits.job_id, waits.started_at, waits.partition) == ("13_2", None, "main,long")
    assert waits.reason == "(ReqNodeNotAvail, UnavailableNodes:n[1-2])"
    assert (over.state, over.script, over.comment, over.nodes) == ("CANCELLED", "", "", 1)


@given(
    reason=st.text(
        st.characters(blacklist_categories=("C", "Z"), blacklist_characters="|"), min_size=1
    ),
    script=st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1),
)
def test_no_reason_or_path_breaks_the_reading(reason: str, script: str):
    (job,) = parse_squeue(f"7|PENDING|{reason}|1|2|3|1|n1|main|{script}|slurm://c/run\n")
    assert job.comment == "slurm://c/run" and job.script == ("" if script == "(null)" else script)
    assert job.reason == ("" if reason == "None" else reason)


def test_later_jobs_and_later_tasks_are_newer():
    jobs = parse_squeue(
        "".join(
            f"{name}|RUNNING|None|1|2|3|1|n1|main|s|c\n" for name in ("9", "10_2", "10_11", "11")
        )
    )
    assert sorted(jobs, key=lambda job: job.number) == jobs


@pytest.mark.parametrize(("status", "code"), [("0:0", 0), ("85:0", 85), ("0:9", 137), ("", None)])
def test_of_the_accounts_the_last_start_counts(status: str, code: int | None):
    lines = (
        "5|NODE_FAIL||1|2|3|2|n[1-2]|main|1:0\n5|CANCELLED by"
        f" 0|None|1|4|9|2|n[3-4]|main|{status}\n"
    )
    (job,) = parse_sacct(lines)
    assert (job.state, job.node_list, job.exit_code, job.ended_at) == (
        "CANCELLED",
        "n[3-4]",
        code,
        9.0,
    )


def test_without_accounts_the_accounts_know_nothing():
    refuses = Answers(1, stderr="Slurm accounting storage is disabled\n")
    assert Slurm("c", Host(), refuses).accounts({"5": "run"}) == {}
    nobody = Answers()
    assert Slurm("c", Host(), nobody).accounts({}) == {} and nobody.asked == []


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("sbatch: error: invalid partition specified: nosuch", "slurm.partition"),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition",
            "slurm.account",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "slurm.qos"),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid",
            "slurm.time_limit",
        ),
        (
            (
                "sbatch: error: Batch job submission failed: Invalid generic resource (gres)"
                " specification"
            ),
            "slurm.gres",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid job array specification",
            "MaxArraySize",
        ),
    ],
)
def test_a_refusal_of_sbatch_comes_with_its_words_its_command_and_what_to_do(
    said: str, advice: str
):
    argv = ("sbatch", "--parsable", "/shared/launch/job.sbatch")
    with pytest.raises(UserError) as refused:
        Slurm("c", Host(), Answers()).require_submitted(Result(argv, 1, "", said + "\n"))
    assert said in str(refused.value) and "sbatch --parsable /shared/launch/job.sbatch" in str(
        refused.value
    )
    assert advice in str(refused.value)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("error: [Errno 30] Read-only file system: '/shared/launch/state.json'", 1),
        ("sh: 1: python3: not found", 127),
    ],
)
def test_what_fails_before_sbatch_is_no_refusal_of_sbatch(said: str, code: int):
    with pytest.raises(UserError, match="nothing was submitted") as failed:
        Slurm("c", Host(), Answers()).require_submitted(
            Result(("sh", "-c", "..."), code, "", said + "\n")
        )
    assert said in str(failed.value) and "sbatch" not in str(failed.value)


@pytest.mark.parametrize(
    "said",
    [
        "Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send",
    ],
)
def test_a_controller_that_is_away_is_distinguished_from_a_mistake(said: str):
    with pytest.raises(UnreachableError, match="the queue cannot be read"):
        Slurm("c", Host(), Answers(1, stderr=said)).jobs()
    with pytest.raises(UnreachableError):
        Slurm(
            "c",
            Host("login"),
            Answers(255, stderr="ssh: connect to host login: Connection refused"),
        ).jobs()
    with pytest.raises(UnreachableError, match="sbatch refused"):
        Slurm("c", Host(), Answers()).require_submitted(
            Result(("sbatch",), 1, "", f"sbatch: error: {said}")
        )
    with pytest.raises(UserError) as mistake:
        Slurm("c", Host(), Answers(1, stderr="squeue: error: bad configuration")).jobs()
    assert not isinstance(mistake.value, UnreachableError)


def test_times_are_asked_for_in_unix_seconds_whatever_the_login_nodes_zone():
    answers = Answers()
    assert Slurm("c", Host(), answers).jobs() == []
    assert answers.asked[0][:3] == ("env", "SLURM_TIME_FORMAT=%s", "squeue")


def test_a_job_that_is_over_is_cancelled_without_an_error():
    Slurm(
        "c",
        Host(),
        Answers(1, stderr="scancel: error: Kill job error on job id 5: Invalid job id specified"),
    ).cancel("5")
    with pytest.raises(UserError, match="Access/permission denied"):
        Slurm(
            "c",
            Host(),
            Answers(
                1, stderr="scancel: error: Kill job error on job id 5: Access/permission denied"
            ),
        ).cancel("5")


def test_nodes_that_cannot_be_used_are_named_with_their_reason():
    message = "n[3-4]|down*|Not responding\nn7|drained|ECC|NVLink\n"
    assert Slurm("c", Host(), Answers(stdout=message)).unusable_nodes("main") == [
        "n[3-4] down (Not responding)",
        "n7 drained (ECC|NVLink)",
    ]


@pytest.mark.parametrize(
    ("job_id", "script", "comment", "entry", "is_own"),
    [
        ("7", "/s", "slurm://c/r", {}, True),
        # The id was given again, to a job of another run, of somebody else, or by hand.
        ("7", "/o/other/launch/job.sbatch", "slurm://c/other", {}, False),
        ("7", "/home/me/train.sh", "", {}, False),
        ("7", "", "", {}, False),
        # A site's plugin has replaced the comment.
        ("7", "/o/r/launch/job.sbatch", "billed=42", {}, True),
        # Tasks of an array: with the comment of its first run, and with their own after a requeue.
        ("7_1", "/o/first/launch/array.sbatch", "slurm://c/first", {}, True),
        ("7_1", "/s", "slurm://c/first", {"comment": "slurm://c/first"}, True),
        ("7_1", "/s", "slurm://c/r", {"comment": "slurm://c/first"}, True),
        ("7_1", "/o/first/launch/array.sbatch", "", {"comment": "slurm://c/first"}, True),
        ("7_1", "/x/x/launch/array.sbatch", "slurm://c/x", {"comment": "slurm://c/first"}, False),
        ("7_1", "/x/x/launch/array.sbatch", "slurm://d/x", {}, False),
    ],
)
def test_a_job_with_the_id_of_the_index_is_the_runs_where_it_says_so(
    job_id: str, script: str, comment: str, entry: dict[str, str], is_own: bool
):
    (job,) = parse_squeue(f"{job_id}|RUNNING|None|1|2|3|1|n1|main|{script}|{comment}\n")
    there = {"job_id": job_id, "launch_directory": "/o/r/launch", **entry}
    assert commands.is_job_of(job, Handle("slurm", "c", "r"), there) is is_own


def test_the_accounts_of_a_job_of_another_name_are_not_the_runs():
    lines = "5|FAILED||1|2|3|2|n1|main|1:0|run\n5|RUNNING||7|8||1|n9|main|0:0|other\n"
    asked = Answers(stdout=lines)
    found = Slurm("c", Host(), asked).accounts({"5": "run"})
    assert {name: job.state for name, job in found.items()} == {"5": "FAILED"}
    # The first run of an array that an earlier version submitted is not known.
    assert Slurm("c", Host(), asked).accounts({"5": ""})["5"].state == "RUNNING"
    assert Slurm("c", Host(), asked).accounts({"5": "third"}) == {}
