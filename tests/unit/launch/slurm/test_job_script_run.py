"""job.sbatch under bash, with programs in place of Slurm's: what follows which end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.requests import WORKLOAD, cluster, planned, request

FACTS = "Reason=None PreemptTime=None ExcNodeList=(null)"
SCONTROL = """
case "$1 $2" in
    "show hostnames") printf 'n1\\nn2\\n' ;;
    "update "*) echo "$@" >>"$PLAY/updates" ;;
    "show node") echo "NodeName=n1 NodeAddr=10.0.0.1 State=IDLE" ;;
    "show job") echo "JobId=12 $(cat "$PLAY/facts") Restarts=$(cat "$PLAY/restarts") BatchFlag=1 Power=" ;;
    "requeue "*) echo "$@" >>"$PLAY/calls"; touch "$PLAY/updates"; cp "$PLAY/updates" "$PLAY/updates-before-requeue" ;;
    *) echo "$@" >>"$PLAY/calls" ;;
esac
"""  # noqa: E501
PROGRAMS = {
    "scontrol": SCONTROL,
    "squeue": 'case "$*" in *%k) cat "$PLAY/comment" ;; *) cat "$PLAY/job-state" ;; esac',
    "sbatch": 'echo "sbatch $*" >>"$PLAY/asked-slurm"; [ -e "$PLAY/others" ]',
    "scancel": 'echo "scancel $@" >>"$PLAY/calls"; touch "$PLAY/asked"',
    "srun": 'echo "$@" >"$PLAY/srun"; . "$PLAY/agents"',
}


class Play:
    """One start of a job; `agents` is what srun does."""

    def __init__(
        self, directory: Path, agents: str, restarts: int = 0, slurm: str = "{max_requeues: 2}"
    ) -> None:
        self.directory = directory
        plan = planned(
            request(cluster(storage=f"{{directory: {directory}}}", slurm=slurm), WORKLOAD)
        )
        self.launch = Path(plan.launch_directory)
        self.launch.mkdir(parents=True, exist_ok=True)
        (self.launch / "agent").mkdir(exist_ok=True)
        for file in plan.files:
            if file.path in ("job.sbatch", "job.json") or file.path.startswith("agent/"):
                (self.launch / file.path).write_text(file.content)
        (directory / "bin").mkdir(exist_ok=True)
        for name, text in PROGRAMS.items():
            (directory / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (directory / "bin" / name).chmod(0o755)
        self.write("agents", agents)
        self.write("restarts", f"{restarts}")
        self.write("job-state", "RUNNING\n")
        self.write("facts", FACTS)
        self.write("comment", "slurm://c/nccl\n")
        self.write("others", "")
        message = {
            "SLURM_JOB_ID": "12",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_JOB_NODELIST": "n[1-2]",
        }
        message |= {
            "SLURMD_NODENAME": "n1",
            "SLURM_JOB_CPUS_PER_NODE": "72(x2),36",
            "PLAY": str(directory),
        }
        self.environment = {
            **os.environ,
            **message,
            "PATH": f"{directory}/bin:{os.environ['PATH']}",
        }

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def state(
        self, code: int | None, attempt: int = 0, submission: str = "12", **fields: object
    ) -> None:
        """state.json as the leader leaves it."""
        message = {
            "state": "running",
            "submission": submission,
            "attempt": str(attempt),
            "failure": {"exit_code": 7},
            "exit_code": code,
        }
        message |= fields
        (self.launch / "state.json").write_text(json.dumps(message, indent=2) + "\n")

    def start(self) -> subprocess.Popen[str]:
        command = ["bash", str(self.launch / "job.sbatch")]
        return subprocess.Popen(
            command,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self) -> int:
        """The script's exit code."""
        process = self.start()
        self.said = process.communicate(timeout=60)[0] + self.log
        return process.returncode

    @property
    def log(self) -> str:
        path = self.launch / "slurm-12.log"
        return path.read_text() if path.exists() else ""

    @property
    def calls(self) -> str:
        path = self.directory / "calls"
        return path.read_text() if path.exists() else ""

    @property
    def comment(self) -> str:
        """What the job's comment says after the run's handle."""
        return self.updates.rpartition("Comment=slurm://c/nccl ")[2].partition("\n")[0]

    @property
    def updates(self) -> str:
        """Changes of the job, one a line: update JobId=12 ExcNodeList=NODES, or Comment=TEXT."""
        path = self.directory / "updates"
        return path.read_text() if path.exists() else ""

    @property
    def ended(self) -> dict[str, Any] | None:
        path = self.launch / "ended.json"
        return json.loads(path.read_text()) if path.exists() else None

    def signalled(self, number: int) -> int:
        """The exit code where the script hears a signal while the agents run."""
        process = self.start()
        while not (self.directory / "srun").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(number)
        self.said = process.communicate(timeout=60)[0] + self.log
        return process.returncode


@pytest.mark.parametrize(
    ("code", "state", "exits"),
    [(0, "succeeded", 0), (2, "failed", 2), (130, "cancelled", 130), (1, "failed", 1)],
)
def test_what_is_over_is_noted_and_not_queued_again(
    tmp_path: Path, code: int, state: str, exits: int
):
    play = Play(tmp_path, f"exit {code}")
    assert play.run() == exits
    # A job that ends with 130 by itself would be FAILED in Slurm's books.
    assert play.calls == ("scancel 12\n" if state == "cancelled" else "")
    assert play.ended is not None and (play.ended["state"], play.ended["code"]) == (state, code)


@pytest.mark.parametrize("code", [85, 75])
def test_what_is_to_start_again_is_queued_again_and_not_noted_as_over(tmp_path: Path, code: int):
    play = Play(tmp_path, f"exit {code}")
    assert play.run() == 0
    assert play.calls == "requeue 12\n" and play.ended is None


def test_requeues_have_a_limit(tmp_path: Path):
    play = Play(tmp_path, "exit 85", restarts=2)
    assert play.run() == 1 and play.calls == ""
    assert play.ended is not None and "queued again 2 times before" in play.ended["reason"]
    beyond = Play(tmp_path, "exit 0", restarts=3)
    assert (
        beyond.run() == 1 and beyond.ended is not None and "lost capacity" in beyond.ended["reason"]
    )


def test_the_leaders_code_counts_where_srun_tells_of_an_agent_that_was_killed(tmp_path: Path):
    play = Play(tmp_path, "exit 137")
    play.state(75)
    assert play.run() == 0 and play.calls == "requeue 12\n"


@pytest.mark.parametrize(("attempt", "submission"), [(1, "12"), (0, "11")])
def test_the_code_of_another_start_counts_for_nothing(
    tmp_path: Path, attempt: int, submission: str
):
    play = Play(tmp_path, "exit 1")
    play.state(85, attempt, submission)
    assert play.run() == 1 and play.calls == ""


def test_a_leader_that_never_starts_is_tried_elsewhere_up_to_a_limit(tmp_path: Path):
    for number in range(3):
        play = Play(tmp_path, "exit 137", restarts=number, slurm="{}")
        assert play.run() == 0 and play.calls == "requeue 12\n" * (number + 1)
        assert play.updates.count(" ExcNodeList=n1\n") == number + 1
    last = Play(tmp_path, "exit 137", restarts=3, slurm="{}")
    assert (
        last.run() == 1
        and last.ended is not None
        and "no agent can lead the run, last on n1" in last.ended["reason"]
    )


@pytest.mark.parametrize(
    ("losses", "excluded"), [({}, False), ({"n2": 1}, False), ({"n1": 1}, True)]
)
def test_a_killed_leader_is_named_and_its_host_excluded_the_second_time(
    tmp_path: Path, losses: dict[str, int], excluded: bool
):
    play = Play(tmp_path, "exit 137")
    play.state(None, losses=losses, exclude="")
    assert play.run() == 0 and play.calls == "requeue 12\n"
    assert play.comment.startswith("the agent of node 0 (n1) was killed")
    assert ("ExcNodeList=n1\n" in play.updates) == excluded


def test_nodes_that_the_leader_excludes_are_added_to_those_of_the_job(tmp_path: Path):
    play = Play(tmp_path, "exit 137")
    play.write("facts", "Reason=None PreemptTime=None ExcNodeList=n[7-9]")
    play.state(
        75,
        reason='lost node 1 (n2): said "no" | so; to be started again (exit code 75)',
        exclude="n2",
    )
    assert play.run() == 0
    assert "ExcNodeList=n2,n[7-9]\n" in play.updates
    assert play.comment == 'lost node 1 (n2): said "no"   so; from now on without n2'
    assert (
        (tmp_path / "asked-slurm").read_text().startswith("sbatch --test-only --exclude=n2,n[7-9] ")
    )


def test_where_slurm_has_no_other_node_the_same_ones_are_tried_again(tmp_path: Path):
    play = Play(tmp_path, "exit 75")
    (tmp_path / "others").unlink()
    play.state(75, reason="lost node 1 (n2)", exclude="n2")
    assert play.run() == 0 and play.calls == "requeue 12\n"
    assert "ExcNodeList" not in play.updates
    assert play.comment == "lost node 1 (n2); Slurm has no other node in place of n2"


def test_the_reason_is_noted_before_the_job_waits(tmp_path: Path):
    play = Play(tmp_path, "exit 75", restarts=1)
    play.state(75, attempt=1, reason="lost node 1 (n2)", exclude="n2")
    assert play.run() == 0
    cleared, noted = (tmp_path / "updates-before-requeue").read_text().splitlines()
    # Slurm itself may have queued the job again meanwhile: the reason of the start before would be
    # wrong then.
    assert cleared == "update JobId=12 Comment=slurm://c/nccl "
    assert (
        noted == "update JobId=12 Comment=slurm://c/nccl lost node 1 (n2); from now on without n2"
    )
    assert play.updates.splitlines()[2:] == ["update JobId=12 ExcNodeList=n2"]


def test_nodes_that_slurm_does_not_exclude_are_not_said_to_be(tmp_path: Path):
    play = Play(tmp_path, "exit 75")
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(
        scontrol.read_text().replace("case", 'case "$*" in *ExcNodeList=*) exit 1 ;; esac\ncase', 1)
    )
    play.state(75, reason="lost node 1 (n2)", exclude="n2")
    assert play.run() == 0 and play.calls == "requeue 12\n"
    assert play.comment == "lost node 1 (n2); Slurm did not exclude n2"


@pytest.mark.parametrize(
    ("ends", "code", "reason"),
    [
        ("n1: task 0: Exited with exit code 2", 2, "refused: node 0 (n1): error: job.json is torn"),
        (
            "n[1-2]: tasks 0-1: Exited with exit code 127",
            127,
            "exit code 127: node 0 (n1): error: job.json is torn",
        ),
    ],
)
def test_a_refusal_of_the_first_node_ends_the_run_with_its_words(
    tmp_path: Path, ends: str, code: int, reason: str
):
    # The others wait for it in vain, and srun tells of the highest code.
    play = Play(
        tmp_path, f'echo "0: error: job.json is torn" >&2; echo "srun: error: {ends}" >&2; exit 137'
    )
    assert play.run() == code and play.calls == ""
    assert play.ended is not None and play.ended["reason"] == reason


def test_a_node_on_which_slurm_cannot_start_the_agent_is_excluded(tmp_path: Path):
    words = (
        "srun: error: Task launch for StepId=12.0 failed on node n2: Communication connection"
        " failure"
    )
    play = Play(tmp_path, f'echo "{words}" >&2; exit 1')
    assert play.run() == 0 and play.calls == "requeue 12\n" and "ExcNodeList=n2\n" in play.updates
    assert play.comment.startswith("Slurm cannot start the agent of n2")


def test_without_the_storage_the_job_is_queued_again_elsewhere_up_to_a_limit(tmp_path: Path):
    play = Play(tmp_path, "exit 0")
    script = tmp_path / "slurm_script"
    (play.launch / "job.sbatch").rename(script)
    play.launch.rename(tmp_path / "elsewhere")
    command = ["bash", str(script)]
    assert subprocess.run(command, env=play.environment, check=False).returncode == 0
    assert play.calls == "requeue 12\n" and "ExcNodeList=n1\n" in play.updates
    assert play.comment == f"n1 cannot read {play.launch}; from now on without n1"
    play.write(
        "comment", "slurm://c/nccl n2 cannot read /a; n3 cannot read /a; n4 cannot read /a\n"
    )
    assert subprocess.run(command, env=play.environment, check=False).returncode == 1
    assert play.calls == "requeue 12\n" and "n2 cannot read /a; " in play.comment
    assert not play.launch.exists() and not (tmp_path / "srun").exists()


def test_near_its_time_limit_the_step_is_reported_and_the_job_queued_again(tmp_path: Path):
    play = Play(tmp_path, 'while [ ! -e "$PLAY/asked" ]; do sleep 0.02; done; sleep 0.2; exit 85')
    assert play.signalled(signal.SIGUSR1) == 0
    assert (
        play.calls == "scancel --signal=TERM 12\nrequeue 12\n"
        and "time limit, all is saved" in play.said
    )


def killed_program(play: Play, process: subprocess.Popen[str]) -> None:
    """SIGKILL to the job's program, once it has recorded its srun; returns once it is started
    again."""
    record = play.launch / "srun-12-0"
    while not (record.exists() and record.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    (program,) = programs(process)
    os.kill(program, signal.SIGKILL)
    while not (programs(process) - {program}):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def programs(process: subprocess.Popen[str]) -> set[int]:
    """The job's program among the children of its script."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return {int(pid) for pid in children if b"slurm-job" in cmdline(pid)}


def cmdline(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.parametrize(("code", "calls"), [(0, ""), (85, "requeue 12\n")])
def test_a_killed_program_is_started_again_and_waits_for_the_same_srun(
    tmp_path: Path, code: int, calls: str
):
    agents = 'echo once >>"$PLAY/starts"; while [ ! -e "$PLAY/over" ]; do sleep 0.02; done'
    play = Play(tmp_path, agents)
    process = play.start()
    killed_program(play, process)
    # As the leader leaves it: an srun of a killed program has no exit code for anyone.
    play.state(code)
    play.write("over", "")
    said = process.communicate(timeout=60)[0]
    assert (process.returncode, play.calls) == (0, calls), said + play.log
    assert (tmp_path / "starts").read_text() == "once\n"
    assert not list(play.launch.glob("srun-*"))


def test_a_program_whose_script_was_killed_queues_nothing(tmp_path: Path):
    play = Play(tmp_path, 'while [ ! -e "$PLAY/over" ]; do sleep 0.02; done; exit 85')
    process = play.start()
    while not (play.launch / "srun-12-0").exists() or not (tmp_path / "srun").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.wait()
    play.write("over", "")
    while (play.launch / "srun-12-0").exists():
        time.sleep(0.02)
    assert "the job script was killed" in play.log
    assert play.calls == "" and play.ended is None


def test_a_program_that_cannot_run_is_not_tried_for_ever(tmp_path: Path):
    play = Play(tmp_path, "exit 0")
    del play.environment["SLURM_JOB_NODELIST"]
    assert play.run() == 1 and play.calls == ""
    assert play.ended is not None and "slurm-12.log" in play.ended["reason"]
    assert "KeyError" in play.log and not list(play.launch.glob("srun-*"))


def test_a_node_without_a_new_enough_python_is_named_and_left(tmp_path: Path):
    play = Play(tmp_path, "exit 0")
    python = tmp_path / "bin" / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert play.run() == 0
    assert play.calls == "requeue 12\n" and "ExcNodeList=n1\n" in play.updates
    assert play.comment.startswith("n1 cannot run a python3 of 3.9 or newer; ")
    cannot = "; ".join(f"n{node} cannot run a python3 of 3.9 or newer" for node in (2, 3, 4))
    play.write("comment", f"slurm://c/nccl {cannot}\n")
    assert play.run() == 1 and play.calls == "requeue 12\n"
    assert not (tmp_path / "srun").exists()


def test_a_leader_that_was_asked_to_stop_is_not_asked_again(tmp_path: Path):
    # A second request, seconds after the first, would end the ranks before they have saved.
    play = Play(tmp_path, 'while [ ! -e "$PLAY/over" ]; do sleep 0.02; done; exit 85')
    play.state(None, asked="SIGTERM")
    process = play.start()
    while not (tmp_path / "srun").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    play.state(85)
    play.write("over", "")
    assert process.wait(timeout=60) == 0
    assert play.calls == "requeue 12\n" and "time limit, all is saved" in play.log


@pytest.mark.parametrize("code", [3, 127])
def test_the_code_of_a_setup_line_is_that_of_the_job(tmp_path: Path, code: int):
    play = Play(tmp_path, "exit 0", slurm=f"{{setup: ['(exit {code})']}}")
    assert play.run() == code
    assert play.ended is not None and (play.ended["state"], play.ended["code"]) == ("failed", code)


def test_what_could_not_save_before_its_time_limit_fails_with_that_word(tmp_path: Path):
    play = Play(tmp_path, 'while [ ! -e "$PLAY/asked" ]; do sleep 0.02; done; exit 1')
    assert play.signalled(signal.SIGUSR1) == 1
    assert play.ended is not None and play.ended["reason"] == "time limit: exit code 1"


@pytest.mark.parametrize(
    ("facts", "restarts_now", "calls", "state"),
    [
        ("Reason=None PreemptTime=None", 0, "", "cancelled"),
        ("Reason=None PreemptTime=2026-11-21T23:24:20", 0, "requeue 12\n", None),
        ("Reason=TimeLimit PreemptTime=None", 0, "requeue 12\n", None),
        ("Reason=None PreemptTime=None", 1, "", None),
    ],
)
def test_a_job_that_slurm_ends_is_queued_again_for_preemption_and_time_but_not_when_it_was_cancelled(  # noqa: E501
    tmp_path: Path, facts: str, restarts_now: int, calls: str, state: str | None
):
    end = (
        f'echo COMPLETING >"$PLAY/job-state"; echo "{facts}" >"$PLAY/facts"; echo {restarts_now}'
        ' >"$PLAY/restarts"'
    )
    play = Play(tmp_path, f'{end}; while [ ! -e "$PLAY/over" ]; do sleep 0.02; done; exit 85')
    process = play.start()
    while (tmp_path / "restarts").read_text() != f"{restarts_now}\n":
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    play.write("over", "")
    said = process.communicate(timeout=60)[0]
    assert play.calls == calls, said
    assert (play.ended or {}).get("state") == state


def test_an_orphan_on_a_lost_node_does_not_queue_the_newer_start_again(tmp_path: Path):
    play = Play(tmp_path, 'echo 1 >"$PLAY/restarts"; exit 75')
    assert play.run() == 0 and play.calls == "" and play.ended is None
    failed = Play(tmp_path, 'echo 1 >"$PLAY/restarts"; exit 1')
    assert failed.run() == 1 and failed.ended is None


def test_the_agents_get_all_cores_of_the_smallest_node_and_the_leaders_address(tmp_path: Path):
    play = Play(tmp_path, "exit 0")
    play.run()
    srun = (tmp_path / "srun").read_text()
    assert "--cpus-per-task=36" in srun and "--submission 12 --attempt 0" in srun
    assert "--leader 10.0.0.1" in srun or "--leader n1" in srun


def test_a_bash_of_the_run_is_no_login_shell(tmp_path: Path):
    # With SSH_CLIENT a bash whose level is below 2 reads .bashrc.
    play = Play(tmp_path, 'echo "$SHLVL" >"$PLAY/level"')
    play.environment["SHLVL"] = "0"
    assert play.run() == 0 and (tmp_path / "level").read_text() == "2\n"


def test_a_setup_line_that_fails_ends_the_job_with_a_word(tmp_path: Path):
    play = Play(tmp_path, "exit 0", slurm="{setup: ['echo \"$UNSET\" loaded', 'false']}")
    assert play.run() == 1 and "loaded" in play.said
    assert play.ended is not None and "the job script stopped at line" in play.ended["reason"]
    assert not (tmp_path / "srun").exists()


def test_a_task_of_an_array_never_speaks_of_the_whole_array(tmp_path: Path):
    play = Play(tmp_path, "exit 85")
    play.environment |= {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert play.run() == 0 and play.calls == "requeue 12_3\n"


def test_defaults_of_a_shell_that_submits_by_hand_do_not_reach_the_jobs_own_programs(
    tmp_path: Path,
) -> None:
    play = Play(tmp_path, "env >$PLAY/seen; exit 0")
    play.environment |= {"SBATCH_EXCLUSIVE": "user", "SRUN_CPUS_PER_TASK": "1"}
    assert play.run() == 0
    seen = (tmp_path / "seen").read_text()
    assert "SBATCH_" not in seen and "SRUN_" not in seen and "SLURM_JOB_ID=12" in seen
