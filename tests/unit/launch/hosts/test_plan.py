"""Plans for hosts without a scheduler: what is asked, carried and started where, in which order."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shlex
import subprocess
import sys
import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from tests.module_time import set_time
from tests.unit.launch.requests import TRAINING, WORKLOAD, request

from drillyard.errors import UserError
from drillyard.launch.agent import submit
from drillyard.launch.agent.job import UsageError
from drillyard.launch.agent.submit import SUBMIT_LOCK_SECONDS, TAKEN
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Plan, Program
from drillyard.launch.remote_files import print_notices
from drillyard.launch.submission import plan_requests
from drillyard.launch.sync_archive import carried_list
from drillyard.plan_files import PlanFile
from drillyard.programs import Programs, Result, archive
from drillyard.supervise.process_identity import Process, this_process

PAIR = """
name: pair
platform: ssh
nodes: 2
processes_per_node: 8
ssh: {hosts: [a, b], user: me, port: 2222, config_file: /etc/conf, rendezvous_host: 10.0.0.1}
"""
LOCAL = "name: here\nplatform: local\nprocesses_per_node: 2\n"
IMAGE = "image: nvcr.io/nvidia/pytorch:25.12-py3\n"


def plan(cluster: str = PAIR, run: str = WORKLOAD, **options: object) -> Plan:
    asked = request(cluster, run, **options)
    return launcher_for(asked.cluster).plan(asked)


def steps(plan: Plan, stage: str) -> list[Program]:
    return [step for step in plan.steps if isinstance(step, Program) and step.stage == stage]


def remote(step: Program) -> list[str]:
    """The words that run on the host."""
    return shlex.split(step.argv[-1])[5:] if step.argv[0] == "ssh" else list(step.argv)


def test_the_same_request_gives_the_same_plan_byte_for_byte() -> None:
    assert repr(plan()) == repr(plan())


def test_all_hosts_are_looked_at_and_the_run_is_recorded_before_anything_is_started() -> None:
    stages = [step.stage for step in plan(sync=True).steps if isinstance(step, Program)]
    assert list(dict.fromkeys(stages)) == [
        "check",
        "share",
        "forget",
        "carry",
        "write",
        "start",
        "release",
    ]
    assert (stages.count("check"), stages.count("share"), stages.count("start")) == (2, 1, 2)


def test_what_is_executed_is_ssh_with_the_clusters_settings_and_one_shared_connection_per_host() -> (  # noqa: E501
    None
):
    argv = steps(plan(), "check")[1].argv
    assert argv[:9] == ("ssh", "-F", "/etc/conf", "-l", "me", "-p", "2222", "-o", "BatchMode=yes")
    assert argv[-2] == "b" and "ControlMaster=auto" in argv


def test_a_plan_has_the_sizes_and_directories_of_its_job() -> None:
    planned = plan()
    assert (planned.nodes, planned.processes_per_node) == (2, 8)
    assert (planned.run_directory, planned.launch_directory) == (
        planned.job.run_directory,
        planned.job.launch_directory,
    )


def test_each_host_starts_its_node_and_all_join_the_first() -> None:
    message = [remote(step)[-3:] for step in steps(plan(), "start")]
    launch = "/home/me/project/runs/nccl/launch"
    assert message == [[launch, "0", "10.0.0.1"], [launch, "1", "10.0.0.1"]]


def test_paths_are_below_the_storage_that_is_shared_else_below_the_project() -> None:
    assert plan().run_directory == "/home/me/project/runs/nccl"
    assert plan(PAIR + "storage: {directory: /shared}\n").run_directory == "/shared/runs/nccl"
    assert plan(PAIR.replace("user: me", "directory: /srv/p")).run_directory == "/srv/p/runs/nccl"
    assert plan(run=WORKLOAD + "output: /fsx/out\n").run_directory == "/fsx/out/nccl"


def test_a_directory_that_is_not_absolute_is_refused() -> None:
    with pytest.raises(UserError, match=r"ssh.directory: '~/p' is not an absolute path"):
        plan(PAIR.replace("user: me", "directory: ~/p"))


def test_a_trainer_is_started_with_the_projects_python_whose_version_is_asked_for() -> None:
    planned = plan(run=TRAINING)
    python = "/home/me/project/.venv/bin/python"
    assert json.loads(planned.file("job.json").content)["command"][:4] == [
        python,
        "-m",
        "drillyard",
        "train",
    ]
    assert all(python in remote(step) for step in steps(planned, "check"))
    named = plan(PAIR + "python: /opt/py/bin/python\n", TRAINING)
    assert json.loads(named.file("job.json").content)["command"][0] == "/opt/py/bin/python"


def test_programs_beside_the_python_are_found_and_an_image_has_its_own() -> None:
    assert plan().file("path").content == "/home/me/project/.venv/bin\n"
    assert plan(LOCAL).file("path").content == "/usr/bin\n"
    assert "path" not in {file.path for file in plan(PAIR + IMAGE).files}


def test_a_workload_needs_no_drillyard_on_the_hosts() -> None:
    assert not any("--python" in remote(step) for step in steps(plan(), "check"))


@pytest.mark.parametrize(
    ("more", "hosts"),
    [
        # The run directory is below the project, so the hosts share both.
        ("", ["a"]),
        ("storage: {directory: /home/me}\n", ["a"]),
        ("storage: {directory: /shared}\n", ["a", "b"]),
    ],
)
def test_sync_carries_the_directory_once_where_it_is_shared_else_to_every_host(
    more: str, hosts: list[str]
) -> None:
    planned = plan(PAIR + more, sync=True)
    assert [step.argv[-2] for step in steps(planned, "carry")] == hosts
    assert {step.sends_directory for step in steps(planned, "carry")} == {"/home/me/project"}
    assert planned.code.startswith("carried (--sync): /home/me/project")


def test_a_project_with_the_run_directory_in_it_is_shared_whatever_the_storage() -> None:
    run = WORKLOAD + "output: /home/me/project/out\n"
    planned = plan(PAIR + "storage: {directory: /shared}\n", run, sync=True)
    assert [step.argv[-2] for step in steps(planned, "carry")] == ["a"]


def test_the_plan_says_how_the_code_travels() -> None:
    assert plan().code == "there already: /home/me/project on every host"
    assert plan(PAIR + IMAGE).code == "in the image nvcr.io/nvidia/pytorch:25.12-py3"


def test_secrets_are_in_no_plan() -> None:
    run = WORKLOAD.replace("workload: {", "workload: {environment: {TOKEN: '${env:TOKEN}'}, ")
    planned = plan(run=run)
    assert "${env:TOKEN}" in planned.file("job.json").content
    assert not {"secret", "secrets.json"} & {file.path for file in planned.files}


def test_local_is_one_host_without_ssh() -> None:
    planned = plan(LOCAL)
    assert [step.stage for step in planned.steps if isinstance(step, Program)] == [
        "check",
        "write",
        "start",
        "release",
    ]
    assert all("ssh" not in step.argv for step in planned.steps if isinstance(step, Program))
    assert planned.run_directory == "/home/me/project/runs/nccl"
    assert json.loads(planned.file("job.json").content)["nodes"] == 1


def test_a_sweep_is_refused_where_all_points_would_run_at_once() -> None:
    asked = request(PAIR, WORKLOAD)
    with pytest.raises(
        UserError,
        match=(
            r"--sweep: platform ssh cannot do that \(queue\); these can: slurm, kubernetes, gke,"
            r" vertex"
        ),
    ):
        plan_requests([asked, asked])


def test_carrying_removes_what_is_gone_here_and_leaves_what_was_never_carried(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
    for name in ("a.py", "odd name\twith\nbreaks.py", "tschüß.py", "sub/b.py"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(name)
    (there / "theirs.txt").touch()
    (there / ".venv").mkdir()
    cluster = PAIR.replace("user: me", f"directory: {there}")

    def carry() -> None:
        step = steps(plan(cluster, sync=True, here=str(here)), "carry")[0]
        packed = subprocess.run(
            ["tar", "-C", str(here), "--mtime=@0", "-cf", "-", *_names(here)],
            capture_output=True,
            check=True,
        )
        assert Programs().run(remote(step), stdin=packed.stdout).returncode == 0

    carry()
    assert (there / "sub" / "b.py").read_text() == "sub/b.py"
    for name in ("a.py", "tschüß.py", "sub/b.py"):
        (here / name).unlink()
    carry()
    left = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert left == {"odd name\twith\nbreaks.py", "theirs.txt", carried_list(str(here))}
    assert (there / ".venv").is_dir()


def _names(directory: Path) -> list[str]:
    return [
        str(path.relative_to(directory)) for path in sorted(directory.rglob("*")) if path.is_file()
    ]


def test_an_agent_is_in_a_scope_of_its_users_manager_where_one_stays(tmp_path: Path) -> None:
    start = remote(steps(plan(), "start")[0])
    (tmp_path / "secret").write_text("x")
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd" / "private").touch()
    fakes = tmp_path / "bin"
    fakes.mkdir()
    (fakes / "systemd-run").write_text('#!/bin/sh\necho scoped "$@"\n')
    (fakes / "python3").write_text('#!/bin/sh\necho plain "$@"\n')
    (tmp_path / "path").write_text("/of/the/run\n")
    for fake in fakes.iterdir():
        fake.chmod(0o755)
    environment = {"PATH": f"{fakes}:/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path)}
    words = [*start[:4], str(tmp_path), *start[5:]]

    def said() -> str:
        return subprocess.run(
            words, capture_output=True, text=True, env=environment, check=True
        ).stdout

    # Without lingering the manager ends with the last login, and what is in its scopes with it.
    assert said().startswith(
        f"plain {tmp_path}/agent start --job {tmp_path}/job.json --node-rank 0 --leader 10.0.0.1"
    )
    words[2] = words[2].replace("/var/lib/systemd/linger/$(id -un)", str(tmp_path / "secret"))
    assert said().startswith(f"scoped --user --scope --quiet --collect {fakes}/python3")


SECRETS = [PlanFile("secret", secret, 0o600) for secret in ("one\n", "two\n")]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "drillyard" / "desk" / "nccl.json"


def _placed(tmp_path: Path, which: int, client: Process, stage: str = "write") -> Result:
    """What writing the launch directory or releasing it says, for one of two submissions."""
    planned = plan(LOCAL.replace("here", "desk") + f"storage: {{directory: {tmp_path}}}\n")
    step = steps(planned, stage)[0]
    files = [file for file in planned.files if file.path in step.sends]
    message = PlanFile("client", json.dumps(client.as_json()))
    words = [sys.executable if word == "/usr/bin/python3" else word for word in remote(step)]
    return Programs().run(
        words,
        stdin=archive([*files, SECRETS[which], PlanFile("secrets.json", "{}", 0o600), message]),
    )


def test_the_launch_directory_keeps_modes_and_an_old_state_is_gone(
    tmp_path: Path, index: Path
) -> None:
    launch = tmp_path / "runs" / "nccl" / "launch"
    launch.mkdir(parents=True)
    (launch / "state.json").write_text('{"state": "failed"}')
    done = _placed(tmp_path, 0, this_process())
    assert (done.returncode, done.stderr) == (0, "")
    assert not (launch / "state.json").exists() and not (launch / "client").exists()
    assert {
        (launch / name).stat().st_mode & 0o777 for name in ("run.yaml", "secret", "secrets.json")
    } == {0o600}
    assert (launch / "agent" / "__main__.py").exists()
    assert json.loads(index.read_text())["launch_directory"] == str(launch)


def test_the_submit_lock_keeps_others_out_until_it_is_released(tmp_path: Path, index: Path) -> None:
    me = this_process()
    assert _placed(tmp_path, 0, me).returncode == 0
    second = _placed(tmp_path, 1, me)
    assert second.returncode == TAKEN and "submission " in second.stderr
    assert (tmp_path / "runs" / "nccl" / "launch" / "secret").read_text() == "one\n"
    # A launch without the lock releases nothing.
    assert _placed(tmp_path, 1, me, "release").returncode == 0
    assert _placed(tmp_path, 1, me).returncode == TAKEN
    assert _placed(tmp_path, 0, me, "release").returncode == 0
    assert _placed(tmp_path, 1, me).returncode == 0


def test_the_submit_lock_ends_with_the_process_that_launches_and_that_of_another_machine_with_time(
    tmp_path: Path, index: Path
) -> None:
    me = this_process()
    elsewhere, reused = replace(me, machine="other/1"), replace(me, started=me.started + 1)
    assert _placed(tmp_path, 0, reused).returncode == 0
    assert _placed(tmp_path, 1, elsewhere).returncode == 0
    assert _placed(tmp_path, 0, me).returncode == TAKEN
    (lock,) = tmp_path.rglob("launch/claim")
    held = json.loads(lock.read_text())
    lock.write_text(json.dumps({**held, "at": held["at"] - SUBMIT_LOCK_SECONDS}))
    assert _placed(tmp_path, 0, me).returncode == 0


def test_a_run_that_is_submitted_again_gets_its_secrets_and_keeps_its_files(
    tmp_path: Path, index: Path
) -> None:
    assert _placed(tmp_path, 0, this_process()).returncode == 0
    options = _options(tmp_path, "two")
    assert submit.unlock(_options(tmp_path, _submission("one\n"))) == 0
    launch = Path(options.launch_directory)
    (launch / "agent" / "cli.py").write_text("as it was")
    (Path(options.sent) / "agent").mkdir(parents=True)
    for name in ("agent/cli.py", "secret", "secrets.json"):
        (Path(options.sent) / name).write_text("new")
    assert submit.place(options) == 0
    assert [(launch / name).read_text() for name in ("agent/cli.py", "secret", "secrets.json")] == [
        "as it was",
        "new",
        "new",
    ]


def test_agents_of_the_run_that_are_alive_keep_a_launch_out(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        submit, "running_agents", lambda launch: [{"node": 0, "submission": "0123"}]
    )
    options = _options(tmp_path, "two")
    assert submit.place(options) == TAKEN and "submission 0123" in capsys.readouterr().err
    assert not index.exists() and Path(options.launch_directory, "claim").read_text() == ""


def test_a_launch_that_still_writes_is_waited_for_by_the_next_one(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is lost, so the launching process releases the lock while the program on the
    host goes on."""
    options = {name: _options(tmp_path, name) for name in ("one", "two")}
    for name, each in options.items():
        for path in ("job.json", "secret", "secrets.json"):
            Path(each.sent, path).write_text(name)
    copy, writes, may_go_on = submit._copy, threading.Event(), threading.Event()

    def slow(source: Path, target: Path) -> None:
        copy(source, target)
        if source.parent.name == "one":
            writes.set()
            assert may_go_on.wait(60)

    monkeypatch.setattr(submit, "_copy", slow)
    codes: dict[str, list[int]] = {}

    def lost() -> None:
        codes["one"] = [submit.place(options["one"])]

    def next_one() -> None:
        codes["two"] = [submit.unlock(options["one"]), submit.place(options["two"])]

    threads = [threading.Thread(target=each, daemon=True) for each in (lost, next_one)]
    threads[0].start()
    assert writes.wait(60)
    threads[1].start()
    threads[1].join(0.5)
    may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert codes == {"one": [0], "two": [0, 0]}
    launch = Path(options["two"].launch_directory)
    assert {(launch / name).read_text() for name in ("job.json", "secret", "secrets.json")} == {
        "two"
    }


def _submission(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()[:16]


def _options(tmp_path: Path, submission: str) -> Namespace:
    launch = str(tmp_path / "runs" / "nccl" / "launch")
    entry = json.dumps(
        {"run": "nccl", "cluster": "desk", "platform": "local", "launch_directory": launch}
    )
    (sent := tmp_path / "sent" / submission).mkdir(parents=True, exist_ok=True)
    return Namespace(launch_directory=launch, submission=submission, sent=str(sent), entry=entry)


def test_where_a_file_system_has_no_kernel_locks_the_submit_lock_holds_and_that_is_reported(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_lock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_lock)
    one, two = _options(tmp_path, "one"), _options(tmp_path, "two")
    assert submit.place(one) == 0
    print_notices(capsys.readouterr().err)
    lock = Path(one.launch_directory, "claim")
    output = capsys.readouterr().err
    # That of the launch directory, and that of the name in the index.
    noted = [line for line in output.splitlines() if line.startswith("drillyard: no lock on ")]
    assert len(noted) == output.count("\n") == 2
    assert any(f"{lock} (No locks available): " in line for line in noted)
    assert submit.place(two) == TAKEN
    assert submit.unlock(one) == 0 and lock.read_text() == ""
    assert submit.place(two) == 0


def test_a_lock_that_another_launch_keeps_is_waited_for_and_refuses(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    set_time(
        monkeypatch,
        "drillyard.launch.agent.submit",
        monotonic=lambda: sum(waited),
        sleep=waited.append,
    )
    options = _options(tmp_path, "one")
    assert submit.place(options) == 0
    with open(Path(options.launch_directory, "claim"), encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for verb in (submit.place, submit.unlock):
            waited.clear()
            with pytest.raises(UsageError, match=r"another launch has had the lock for 30 s"):
                verb(options)
            assert 29 < sum(waited) < 31
    assert submit.place(options) == 0


def test_bytecode_is_not_placed_and_a_failure_names_one_file(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = _options(tmp_path, "one")
    for name in (
        "job.json",
        "agent/cli.py",
        "agent/index.py",
        "agent/__pycache__/cli.pyc",
        "files/data/a.txt",
    ):
        Path(options.sent, name).parent.mkdir(parents=True, exist_ok=True)
        Path(options.sent, name).touch()
    launch = Path(options.launch_directory)
    assert submit.place(options) == 0
    placed = {str(path.relative_to(launch)) for path in launch.rglob("*") if path.is_file()}
    assert placed == {"claim", "job.json", "agent/cli.py", "agent/index.py", "files/data/a.txt"}

    def full(content: object, out: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match=r"No space left on device: ") as failure:
        submit.place(options)
    assert str(failure.value).count("No space left") == 1 and str(
        failure.value.filename
    ).startswith(f"{launch}/")
