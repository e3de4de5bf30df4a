"""Agents of a run as processes that talk over loopback: attempts, lost nodes, the fence, stops,
what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.integration.disks import MIB, Tmpfs
from tests.integration.launch.agents import Agents, Make, codes, free_port_range, until

from drillyard.launch.agent import index
from drillyard.supervise.process_identity import process_of
from drillyard.supervise.stop_requests import SECONDS_OF_ONE_REQUEST

WAIT = "while [ ! -e $RUN/finish ]; do sleep 0.05; done"
"""A command that works until the test lets it finish."""
TELL = "echo $NODE_RANK $ROUND $$ $MASTER_PORT >> $RUN/commands"

ALL_HERE = "while [ $(wc -l < $RUN/commands) -lt %d ]; do sleep 0.05; done"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes runs, and ends what is left of them."""
    made: list[Agents] = []

    def agents(script: str, nodes: int = 1, **settings: Any) -> Agents:
        made.append(Agents(tmp_path / f"run-{len(made)}", script, nodes, **settings))
        return made[-1]

    yield agents
    for each in made:
        each.close()


def commands(agents: Agents, attempt: int) -> set[str]:
    """The nodes whose command was started in an attempt."""
    return {line.split()[0] for line in agents.lines("commands") if line.split()[1] == str(attempt)}


def test_an_attempt_of_three_nodes(make: Make) -> None:
    script = (
        'echo "node $NODE_RANK of $NNODES x $NPROC_PER_NODE at $MASTER_ADDR:$MASTER_PORT'
        ' {node_rank} {other}"'
    )
    agents = make(script, 3)
    # Either may be first: the order in which nodes start is the scheduler's.
    followers = [agents.run(2), agents.run(1)]
    assert codes([agents.run(0), *followers]) == [0, 0, 0]
    state = agents.state
    assert (state["state"], state["round"], state["failures"], state["exit_code"]) == (
        "succeeded",
        0,
        0,
        0,
    )
    assert len(state["hosts"]) == 3 and state["failure"] is None
    meetings = set()
    for node in range(3):
        found = re.search(
            rf"node {node} of 3 x 1 at (127.0.0.1:\d+) {node} {{other}}\n", agents.log(node)
        )
        assert found
        meetings.add(found[1])
    assert len(meetings) == 1
    assert agents.marked() == []
    assert not list((agents.launch / "agents").iterdir())


def test_a_failed_node_ends_the_attempt_on_all(make: Make) -> None:
    fail = f"{ALL_HERE % 3}; echo 'ValueError: bad row'; exit 7"
    look = (
        "for pid in $(grep ' 0 ' $RUN/commands | cut -d' ' -f3); do kill -0 $pid && echo $pid >>"
        " $RUN/alive; done"
    )
    script = f"""
        {TELL}
        [ $ROUND = 1 ] && {{ {look}; exit 0; }}
        [ $NODE_RANK = 1 ] && {{ {fail}; }}
        exec sleep 600
    """
    agents = make(script, 3)
    assert codes(agents.run_all()) == [0, 0, 0]
    assert agents.state["failures"] == 1 and agents.state["round"] == 1
    assert commands(agents, 0) == commands(agents, 1) == {"0", "1", "2"}
    assert agents.lines("alive") == []
    assert len({line.split()[3] for line in agents.lines("commands")}) == 2
    assert "node 1 (" in agents.log(
        0
    ) and "exit code 7; ValueError: bad row (counted: 1 of 3)" in agents.log(0)
    first, second = (
        json.loads((agents.launch / "exits" / f"0001-0000.node-{n}.json").read_text())
        for n in (1, 2)
    )
    assert (first["exit_code"], first["asked"], first["lines"]) == (
        7,
        False,
        ["ValueError: bad row"],
    )
    assert (second["exit_code"], second["asked"]) == (143, True)


def test_a_healthy_node_learns_of_the_failure_that_stops_it_and_which_attempt_it_is(
    make: Make,
) -> None:
    look = 'cat "$DRILLYARD_EXIT_RECORD.stop" > $RUN/request; exit 0'
    script = f"""
        {TELL}; echo $DRILLYARD_SUBMISSION $DRILLYARD_LAUNCH_ROUND >> $RUN/attempts-$NODE_RANK
        [ $ROUND = 1 ] && exit 0
        [ $NODE_RANK = 1 ] && {{ {ALL_HERE % 2}; echo 'ValueError: bad row'; exit 7; }}
        trap '{look}' TERM; while true; do sleep 0.05; done
    """
    agents = make(script, 2)
    assert codes(agents.run_all("--submission", "a")) == [0, 0]
    (line,) = agents.lines("request")
    document = json.loads(line)
    assert (document["rank"], document["exit_code"]) == (None, 7)
    assert re.fullmatch(r"node 1 \(.*\): exit code 7; ValueError: bad row", document["reason"])
    assert says(agents.log(0), f"SIGTERM ... command: {document['reason']}")
    assert agents.lines("attempts-0") == agents.lines("attempts-1") == ["a 0", "a 1"]


def test_the_limit_of_counted_failures(make: Make) -> None:
    agents = make("echo 'RuntimeError: broken'; exit 9", max_failures=2)
    assert codes([agents.run()]) == [1]
    state = agents.state
    assert (state["state"], state["round"], state["failures"]) == ("failed", 2, 2)
    assert state["failure"]["exit_code"] == 9 and state["failure"]["lines"] == [
        "RuntimeError: broken"
    ]
    assert says(state["reason"], "all 2 restarts")


def test_the_same_error_at_the_same_step_ends_a_launched_run(make: Make) -> None:
    record = (
        '{"rank": 1, "exit_code": 1, "reason": "rank 1: bad row", "lines": ["ValueError: bad row'
        ' 7"], "step": %s}'
    )
    write = f"echo '{record % 7}' > $DRILLYARD_EXIT_RECORD; exit 1"
    agents = make(
        f"{TELL}; [ $NODE_RANK = 0 ] && exec sleep 600; {ALL_HERE % 2}; {write}", 2, max_failures=9
    )
    assert codes(agents.run_all()) == [1, 1]
    state = agents.state
    assert (state["state"], state["round"], state["failures"], state["repeats"]) == (
        "failed",
        2,
        2,
        2,
    )
    assert "same step 7" in state["reason"] and state["failure"]["rank"] == 1
    started = make(f"echo '{record % 'null'}' > $DRILLYARD_EXIT_RECORD; exit 1", max_failures=9)
    assert codes([started.run()]) == [1]
    assert (started.state["round"], started.state["failures"], started.state["failed_starts"]) == (
        2,
        0,
        3,
    )


def test_refused_is_never_started_again(make: Make) -> None:
    agents = make(f"{TELL}; [ $NODE_RANK = 0 ] && exec sleep 600; {ALL_HERE % 2}; exit 2", 2)
    assert codes(agents.run_all()) == [2, 2]
    assert agents.state["state"] == "failed" and agents.state["reason"].startswith("refused")
    assert len(agents.lines("commands")) == 2


def test_what_ranks_tell_counts_more_than_their_launchers_code(make: Make) -> None:
    message = (
        '{"rank": 5, "exit_code": 2, "reason": "no such model", "lines": ["error: no such model"]}'
    )
    agents = make(f"echo '{message}' > $DRILLYARD_EXIT_RECORD; exit 1")
    assert codes([agents.run()]) == [2]
    failure = agents.state["failure"]
    assert (failure["rank"], failure["exit_code"], failure["lines"]) == (
        5,
        2,
        ["error: no such model"],
    )


def test_85_without_a_newer_checkpoint_comes_to_an_end(make: Make) -> None:
    agents = make(f"{TELL}; exit 85", max_failures=1)
    assert codes([agents.run()]) == [1]
    assert [line.split()[1] for line in agents.lines("commands")] == ["0", "1", "2"]


def test_85_with_newer_checkpoints_is_not_counted(make: Make) -> None:
    script = f"{TELL}; [ $ROUND = 2 ] && exit 0; echo > $RUN/step-$ROUND; exit 85"
    agents = make(script, max_failures=0, checkpoints=str(Path("{run}")))
    job = json.loads(agents.job.read_text())
    agents.job.write_text(json.dumps({**job, "checkpoints": str(agents.directory / "step-*")}))
    assert codes([agents.run()]) == [0]
    assert agents.state["failures"] == 0 and agents.state["round"] == 2


def test_counts_go_on_over_a_requeue_and_begin_again_with_a_submission(make: Make) -> None:
    script = f'{TELL}; trap "exit 85" TERM; [ -e $RUN/fail ] && rm $RUN/fail && exit 1; {WAIT}'
    agents = make(script, max_failures=1, checkpoints="/nonexistent/*")
    (agents.directory / "fail").touch()
    first = agents.run(0, "--submission", "a")
    until(lambda: commands(agents, 1))
    first.terminate()
    assert first.wait() == 85
    assert (agents.state["state"], agents.state["failures"]) == ("restarting", 1)
    (agents.directory / "fail").touch()
    assert codes([agents.run(0, "--submission", "a", "--attempt", "1")]) == [1]
    assert agents.state["round"] == 2
    (agents.directory / "fail").touch()
    (agents.directory / "finish").touch()
    assert codes([agents.run(0, "--submission", "b")]) == [0]
    assert (agents.state["failures"], agents.state["round"]) == (1, 1)


def test_a_signal_to_one_node_stops_all_with_their_checkpoint(make: Make) -> None:
    agents = make(f'{TELL}; trap "sleep 0.5; echo saved; exit 85" USR1; {WAIT}', 3)
    running = agents.run_all()
    until(lambda: len(commands(agents, 0)) == 3)
    running[2].send_signal(signal.SIGUSR1)
    assert codes(running) == [85, 85, 85]
    assert all("saved" in agents.log(node) for node in range(3))
    assert says(agents.state["reason"], "SIGUSR1 ... saved")


@pytest.mark.parametrize("saves", [True, False])
def test_a_foreign_command_that_ends_by_sigterm_has_stopped(make: Make, saves: bool) -> None:
    agents = make(f"{TELL}; {'touch $RUN/saved; ' if saves else ''}{WAIT}")
    job = json.loads(agents.job.read_text())
    agents.job.write_text(json.dumps({**job, "checkpoints": str(agents.directory / "saved*")}))
    agent = agents.run()
    until(lambda: agents.lines("commands") and (not saves or (agents.directory / "saved").exists()))
    agent.terminate()
    assert agent.wait() == (85 if saves else 1)
    assert saves or says(agents.state["reason"], "SIGTERM without a checkpoint")


def test_an_insisting_signal_ends_at_once(make: Make) -> None:
    agents = make(f'{TELL}; trap "" TERM; {WAIT}', stop_seconds=600)
    agent = agents.run()
    until(lambda: agents.lines("commands"))
    agent.terminate()
    # What comes so long after the first signal was heard is another request.
    until(lambda: says(agents.log(0).splitlines(), "SIGTERM: ... stops"))
    time.sleep(SECONDS_OF_ONE_REQUEST + 0.1)
    agent.terminate()
    assert codes([agent]) == [1]
    assert agents.marked() == []


@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "follower"])
def test_a_killed_agent_is_started_again_by_its_respawner(make: Make, victim: int) -> None:
    agents = make(f"{TELL}; {WAIT}", 2)
    started = [agents.start(node) for node in range(2)]
    until(lambda: len(commands(agents, 0)) == 2)
    os.kill(started[victim]["agent"]["pid"], signal.SIGKILL)
    until(lambda: len(commands(agents, 1)) == 2)
    (agents.directory / "finish").touch()
    until(lambda: agents.state["state"] == "succeeded")
    assert (agents.state["failures"], agents.state["round"]) == (0, 1)
    assert agents.state["epoch"] == (2 if victim == 0 else 1)
    until(lambda: agents.marked() == [])


def test_a_frozen_node_is_lost_and_comes_back(make: Make) -> None:
    agents = make(f"{TELL}; {WAIT}", 2, lease_seconds=4)
    running = agents.run_all()
    until(lambda: len(commands(agents, 0)) == 2)
    running[1].send_signal(signal.SIGSTOP)
    until(
        lambda: (
            agents.state["state"] == "restarting"
            and says(agents.state["reason"], "waits ... node 1")
        )
    )
    running[1].send_signal(signal.SIGCONT)
    until(lambda: len(commands(agents, 1)) == 2)
    (agents.directory / "finish").touch()
    assert codes(running) == [0, 0]
    assert agents.state["failures"] == 0


def test_a_node_that_never_joins_is_named_with_its_host_and_excluded(make: Make) -> None:
    agents = make(f"{TELL}; {WAIT}", 3, join_seconds=0, start_seconds=2)
    log = agents.directory / "srun.log"
    log.touch()
    words = ["--hosts", "a,b,c", "--srun-log", str(log), "0"]
    running = [agents.run(node, *words) for node in (0, 1)]
    until(lambda: says(agents.state.get("reason") or "", "waits ... node 2 (c)"))
    assert codes(running) == [75, 75]
    assert says(agents.state["reason"], "node 2 (c) ... 2 s") and agents.state["exclude"] == "c"
    assert agents.lines("commands") == []


def test_agents_that_end_before_they_join_are_reported_by_srun(make: Make) -> None:
    agents = make(f"{TELL}; {WAIT}", 3, join_seconds=0)
    log = agents.directory / "srun.log"
    log.write_text("2: error: no such file\nsrun: error: c: task 2: Exited with exit code 2\n")
    words = ["--hosts", "a,b,c", "--srun-log", str(log), "0"]
    assert codes([agents.run(node, *words) for node in (0, 1)]) == [75, 75]
    assert says(
        agents.state["reason"],
        "node 2 (c) ... start: error: no such file (Exited with exit code 2)",
    )
    # Without its leader a node does not wait for it.
    log.write_text("srun: error: a: task 0: Killed\n")
    assert codes([agents.run(1, *words, "--attempt", "1")]) == [75]


def test_a_leader_that_is_killed_again_and_again_comes_to_an_end(make: Make) -> None:
    agents = make(f"{TELL}; {WAIT}", max_failures=1)
    agent = process_of(agents.start(0)["agent"])
    for number in range(3):
        until(lambda number=number: len(commands(agents, number)) == 1)
        agent = process_of(agents.state["agent"])
        assert agent is not None
        os.kill(agent.pid, signal.SIGKILL)
    until(lambda: agents.state["state"] == "failed")
    assert agents.state["failures"] == 1 and len(agents.lines("commands")) == 3
    assert says(
        agents.state["reason"], "killed; ... without a newer checkpoint; ... all 1 restarts"
    )
    until(lambda: agents.marked() == [])


def test_a_node_that_stays_away_is_lost_for_good(make: Make) -> None:
    agents = make(f"{TELL}; {WAIT}", 2, join_seconds=3)
    running = agents.run_all()
    until(lambda: len(commands(agents, 0)) == 2)
    running[1].kill()
    assert running[0].wait() == 75
    assert "lost capacity: node 1" in agents.state["reason"]


WRITER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
out = os.open(sys.argv[1] + "/writes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while not os.path.exists(sys.argv[1] + "/finish"):
    os.write(out, (os.environ["START"] + "\\n").encode())
    time.sleep(0.01)
"""


@pytest.mark.parametrize("frozen", [False, True], ids=["agents live", "agents are frozen"])
def test_a_second_start_writes_nothing_before_the_first_is_gone(make: Make, frozen: bool) -> None:
    agents = make("", 2, lease_seconds=3, command=["python3", "-c", WRITER, "{run_directory}"])
    first = [agents.run(node, "--submission", "a", START="first") for node in range(2)]
    until(lambda: len(agents.lines("writes")) > 20)
    if frozen:
        for agent in first:
            agent.send_signal(signal.SIGSTOP)
    second = [
        agents.run(node, "--submission", "a", "--attempt", "1", START="second") for node in range(2)
    ]
    until(lambda: agents.lines("writes").count("second") > 20)
    (agents.directory / "finish").touch()
    assert codes(second) == [0, 0]
    if frozen:
        for agent in first:
            agent.send_signal(signal.SIGCONT)
    assert codes(first) == [75, 75]
    writes = agents.lines("writes")
    assert "first" not in writes[writes.index("second") :]
    assert agents.state["epoch"] == 2 and agents.state["state"] == "succeeded"


def test_stop_leaves_nothing(make: Make) -> None:
    child = "setsid sh -c 'trap \"\" TERM; while true; do sleep 1; done' &"
    agents = make(f"{TELL}; {child} {WAIT}", 2)
    started = [agents.start(node) for node in range(2)]
    again = agents.start(1)
    assert again["already"] and again["agent"]["pid"] == started[1]["agent"]["pid"]
    until(lambda: len(commands(agents, 0)) == 2)
    assert len(agents.marked()) >= 4
    message = agents.stop()
    assert message["left"] == [] and message["state"] == "cancelled"
    assert agents.marked() == []
    assert not any(process_of(each[who]).alive for each in started for who in ("agent", "keeper"))
    assert agents.stop() == {"agents": [], "left": [], "state": "cancelled"}
    assert (
        agents.call(
            "run",
            "--job",
            str(agents.job),
            "--submission",
            "first",
            "--node-rank",
            "0",
            "--leader",
            "x",
        ).returncode
        == 130
    )


def test_a_killed_agent_without_respawner_leaves_nothing_and_is_reported_as_failed(
    make: Make,
) -> None:
    agents = make(f"{TELL}; setsid sleep 600 & {WAIT}")
    agent = agents.run()
    until(lambda: agents.lines("commands"))
    agent.kill()
    agent.wait()
    until(lambda: agents.marked() == [])
    seen = index.look({"launch_directory": str(agents.launch)})
    assert agents.state["state"] == "running"
    assert (seen["agent"], seen["state"]["state"]) == ("gone", "failed")
    assert "agent gone" in seen["state"]["reason"]


def test_two_runs_on_the_same_ports_do_not_meet(make: Make) -> None:
    port = free_port_range()
    one, other = (make(f"{TELL}; {WAIT}", 2, port=port) for _ in range(2))
    leaders = [one.run(0), other.run(0)]
    until(lambda: one.state and other.state)
    followers = [other.run(1), one.run(1)]
    until(lambda: len(commands(one, 0)) == len(commands(other, 0)) == 2)
    for each in (one, other):
        (each.directory / "finish").touch()
    assert codes(leaders + followers) == [0, 0, 0, 0]


def test_all_that_is_printed_is_in_the_log_line_by_line(make: Make) -> None:
    lines = 200_000
    agents = make(f"seq 1 {lines}; printf 'a bar\\r50 %%\\r100 %%\\n'; printf 'no end' >&2")
    begun = time.time()
    assert codes([agents.run()]) == [0]
    log = [line for line in agents.log(0).splitlines() if " === " not in line]
    assert [line[28:] for line in log] == [
        *(str(number) for number in range(1, lines + 1)),
        "100 %",
        "no end",
    ]
    stamps = [line[:28] for line in log]
    assert all(
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z ", each) for each in set(stamps)
    )
    assert stamps == sorted(stamps)
    assert time.strftime("%Y-%m-%dT", time.gmtime(begun)) <= stamps[0]
    assert (agents.launch / "node-0.log").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_ends_no_run(make: Make, tmp_path: Path) -> None:
    disk = Tmpfs(tmp_path / "run-0", 4 * MIB)
    disk.mount()
    try:
        flood = "printf '%08000d\\n' 1; sleep 0.05"
        agents = make(f"{TELL}; while [ ! -e $RUN/finish ]; do {flood}; done", lease_seconds=4)
        agent = agents.run()
        until(lambda: agents.lines("commands"))
        ballast = disk.fill()
        before = os.stat(agents.launch / "epochs" / "0001.node-0.alive").st_mtime
        # Twice as long as an agent may be silent before its command is killed.
        until(lambda: os.stat(agents.launch / "epochs" / "0001.node-0.alive").st_mtime > before + 4)
        ballast.unlink()
        (agents.directory / "finish").touch()
        assert codes([agent]) == [0]
        assert (agents.state["state"], agents.state["round"]) == ("succeeded", 0)
        assert says(agents.log(0).splitlines(), "=== ... bytes of output")
    finally:
        disk.unmount()


def test_a_profile_script_is_sourced_in_the_shell_that_becomes_the_command(
    make: Make, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.sh"
    profile.write_text("export NET=fast\n")
    agents = make('echo "$NET $PWD"', profile_script=str(profile), working_directory=str(tmp_path))
    assert codes([agents.run()]) == [0]
    assert f"fast {tmp_path}" in agents.log(0)


def test_the_index_lists_runs_with_what_they_do(make: Make, tmp_path: Path) -> None:
    agents = make("true")
    home = {"XDG_STATE_HOME": str(tmp_path / "state")}
    entry = {
        "run": "tiny",
        "cluster": "here",
        "platform": "local",
        "launch_directory": str(agents.launch),
    }
    (tmp_path / "sent").mkdir()
    words = [
        "--sent",
        str(tmp_path / "sent"),
        "--launch-directory",
        str(agents.launch),
        "--submission",
        "first",
    ]
    assert agents.call("place", *words, "--entry", json.dumps(entry), **home).returncode == 0
    (before,) = json.loads(agents.call("list", "--cluster", "here", **home).stdout)
    assert before.pop("entry").items() >= entry.items()
    assert before == {"state": None, "agent": "none", "cancelled": False, "problem": None}
    assert codes([agents.run()]) == [0]
    (after,) = json.loads(agents.call("list", "--cluster", "here", **home).stdout)
    assert after["state"]["state"] == "succeeded"
    assert agents.call("forget", "--cluster", "here", "--run", "tiny", **home).returncode == 0
    assert json.loads(agents.call("list", "--cluster", "here", **home).stdout) == []
