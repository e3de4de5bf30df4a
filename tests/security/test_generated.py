"""Hostile words in configs: host names, and everything that is put into a generated script."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.unit.launch.requests import TRAINING, WORKLOAD, cluster, request

from drillyard.errors import UserError
from drillyard.launch.agent.job import Job
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Call, Plan, Program
from drillyard.launch.plan_output import plan_text, write_plan
from drillyard.plan_files import PlanFile
from drillyard.programs import Host

HOSTILE_HOSTS = [
    "-oProxyCommand=touch escaped",
    "--",
    "-F/dev/null",
    "user@-oProxyCommand=touch",
    "-l root",
    "host name",
    "host;touch escaped",
    "$(touch escaped)",
    "host\ntouch escaped",
    "`id`",
    "",
]
SETTINGS = {
    "ssh.hosts": (
        'platform: ssh\nname: c\nnodes: 1\nprocesses_per_node: 1\nssh: {{hosts: ["{}"]}}\n'
    ),
    "ssh.rendezvous_host": (
        "platform: ssh\nname: c\nnodes: 1\nprocesses_per_node: 1\nssh: {{hosts: [n0],"
        ' rendezvous_host: "{}"}}\n'
    ),
    "ssh.user": (
        "platform: ssh\nname: c\nnodes: 1\nprocesses_per_node: 1\nssh: {{hosts: [n0], user:"
        ' "{}"}}\n'
    ),
    "slurm.login_host": (
        'platform: slurm\nname: c\nnodes: 1\nprocesses_per_node: 1\nslurm: {{login_host: "{}"}}\n'
    ),
}


@pytest.mark.parametrize("host", HOSTILE_HOSTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_host_that_ssh_could_take_for_an_option_is_refused(setting: str, host: str) -> None:
    with pytest.raises(UserError, match=setting.replace(".", r"\.")):
        request(SETTINGS[setting].format(host.replace("\n", "\\n")), WORKLOAD)


@pytest.mark.parametrize(
    "host", ["n0", "me@login.example.org", "10.0.0.1", "fe80::1%eth0", "my_alias-2", "a.b@c@host"]
)
def test_hosts_as_people_name_them_are_accepted(host: str) -> None:
    assert (
        request(SETTINGS["slurm.login_host"].format(host), WORKLOAD).cluster.slurm.login_host
        == host
    )


def test_what_follows_the_options_of_ssh_is_never_one() -> None:
    argv = Host("-oProxyCommand=touch escaped").argv(["true"])

    assert argv[-3:-1] == ("--", "-oProxyCommand=touch escaped")
    assert shlex.split(argv[-1])[-1] == "true"


HOSTILE_PATHS = [
    "/runs/a b",
    "/runs/it's",
    "/runs/$(touch escaped)",
    "/runs/`touch escaped`",
    "/runs/\ntouch escaped\n#",
    "/runs/a\rtouch escaped",
    "/runs/-rf *",
    '/runs/"; touch escaped; "',
    "/runs/\\",
    "/runs/a\x1b[2J",
]


@pytest.mark.parametrize("path", HOSTILE_PATHS)
def test_no_path_gets_out_of_the_comments_and_quotes_of_a_job_script(
    tmp_path: Path, path: str
) -> None:
    quoted = path.replace("\\", "\\\\").replace('"', '\\"')
    quoted = quoted.replace("\n", "\\n").replace("\r", "\\r").replace("\x1b", "\\e")
    asked = request(cluster("slurm", storage=f'{{directory: "{quoted}"}}'), WORKLOAD)
    plan = launcher_for(asked.cluster).plan(asked)
    script = plan.file("job.sbatch").content

    # Everything up to the first command is comments, and the first command is what it always is.
    comments = script.partition("\nset -euo pipefail\n")[0].split("\n")
    assert [line for line in comments if not line.startswith("#")] == []
    assert all(line.isprintable() for line in comments)
    assert [line for line in plan_text(plan).split("\n")[:4] if not line.startswith("# ")] == []
    setting = re.search(r"\nlaunch=(.*?)\nhandle=", script, re.DOTALL)
    shown = subprocess.run(
        ["bash", "-c", f'launch={setting[1]}; printf %s "$launch"'],
        capture_output=True,
        cwd=tmp_path,
    )
    assert shown.stdout.decode() == plan.launch_directory
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", HOSTILE_PATHS)
def test_every_line_of_a_plan_as_a_script_does_what_the_plan_says(
    tmp_path: Path, word: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("gcloud", "curl"):
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>"{tmp_path}/called"\n')
        (programs / name).chmod(0o755)
    steps = (
        Program(
            f"write {word}", ("sh", "-c", 'printf %s "$0" >"$1"', word, str(tmp_path / "said"))
        ),
        Call(f"upload to {word}", "PUT", word, None, sends=("job.json",)),
        Call(f"create {word}", "POST", word, {"name": word}),
    )
    plan = Plan(
        Job("run", "here", "slurm", 1, 1, word, word, []),
        code=word,
        files=(PlanFile("job.json", "{}\n"),),
        steps=steps,
    )
    write_plan(plan, here / "out")

    environment = {"PATH": f"{programs}:/usr/bin:/bin"}
    subprocess.run(["sh", "out/apply.sh"], check=True, cwd=here, env=environment)

    assert (tmp_path / "said").read_bytes().decode() == word
    assert (tmp_path / "called").read_bytes().decode().count(f"\n{word}\n") == 2
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\x00"])
@pytest.mark.parametrize("setting", ["partition", "account", "qos", "gres", "constraint"])
def test_no_control_character_gets_into_an_sbatch_line(setting: str, character: str) -> None:
    value = f'"a{character.encode("unicode_escape").decode()}touch escaped"'
    with pytest.raises(UserError):
        asked = request(cluster("slurm", slurm=f"{{{setting}: {value}}}"), TRAINING)
        launcher_for(asked.cluster).plan(asked)


@pytest.mark.parametrize("target", ["../escaped", "/escaped", "a/../../escaped", "a\nb", ".."])
def test_a_carried_file_stays_in_the_launch_directory(tmp_path: Path, target: str) -> None:
    (tmp_path / "here.sh").write_text("true")
    quoted = target.replace("\n", "\\n")
    run = f'name: a\nworkload: {{command: [a], files: {{"{quoted}": {tmp_path}/here.sh}}}}\n'
    asked = request(cluster("slurm"), run, here=str(tmp_path))

    with pytest.raises(UserError, match=r"workload\.files"):
        launcher_for(asked.cluster).plan(asked)
