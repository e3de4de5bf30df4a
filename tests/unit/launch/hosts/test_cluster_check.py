"""`drillyard cluster status` of ssh hosts: the check runs on this machine in place of each host,
which lacks what a test takes from it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.requests import cluster, request

from drillyard.cli.main import main
from drillyard.errors import UnreachableError, UserError
from drillyard.launch import node_probe
from drillyard.launch.cluster_check import ClusterCheck, Finding
from drillyard.launch.hosts.cluster_check import check_hosts
from drillyard.launch.node_probe import (
    HOST_PROGRAMS,
    Looked,
    NodeAnswer,
    node_findings,
    parse_answers,
)
from drillyard.launch.request import LaunchRequest
from drillyard.programs import Programs, Result

H100 = "NVIDIA H100 80GB HBM3"


@dataclass
class Hosts(Programs):
    """Hosts that are this machine. `paths`: the PATH of a host; `before`: shell that a host runs
    first; `says`: what ssh gives in place of the check."""

    paths: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    says: dict[str, Result | UserError] = field(default_factory=dict)
    commands: list[tuple[str, list[str]]] = field(default_factory=list)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        directory: Path | None = None,
    ) -> Result:
        host, words = argv[-2], shlex.split(argv[-1])[5:]
        self.commands.append((host, words))
        said = self.says.get(host)
        if isinstance(said, UserError):
            raise said
        if said is not None:
            return said
        if words[:2] == ["sh", "-c"] and host in self.before:
            words = [*words[:2], f"{self.before[host]}\n{words[2]}", *words[3:]]
        environment = {"PATH": self.paths[host]} if host in self.paths else None
        done = subprocess.run(words, input=stdin, capture_output=True, env=environment, check=False)
        return Result(tuple(argv), done.returncode, done.stdout.decode(), done.stderr.decode())


def look(programs: Hosts, storage: Path, count: int = 2, **more: Any) -> ClusterCheck:
    """The check of hosts a, b, ... with runs in `storage`."""
    names = ", ".join("abcdef"[:count])
    ssh = f"{{hosts: [{names}], directory: {storage}, rendezvous_host: 127.0.0.1}}"
    settings = {"machine": None, "processes_per_node": 1} | more
    asked = request(
        cluster("ssh", nodes=count, ssh=ssh, storage=f"{{directory: {storage}}}", **settings)
    )
    return check_hosts(asked.cluster, asked.facts, programs)


def found(check: ClusterCheck, name: str) -> list[Finding]:
    return [each for each in check.findings if each.check == name]


def only(check: ClusterCheck, name: str) -> Finding:
    (finding,) = found(check, name)
    return finding


def programs_without(directory: Path, *names: str) -> str:
    """A PATH with all programs but these."""
    directory.mkdir()
    for name in (*HOST_PROGRAMS, "sh", "rm", "fold", "sed", "tail", "timeout"):
        if name not in names:
            (directory / name).symlink_to(shutil.which(name) or name)
    return str(directory)


def test_hosts_that_have_everything_are_ready_and_nothing_of_the_check_is_left(
    tmp_path: Path,
) -> None:
    check = look(Hosts(), tmp_path, 3)
    assert check.exit_code == 0, check.text("c.yaml")
    assert check.proved == check.looked_at == check.nodes == ("a", "b", "c")
    assert {each.check for each in check.findings if each.result == "ok"} >= {
        *("hosts", "programs", "storage", "gpus", "user", "clocks", "ports", "project")
    }
    assert list(tmp_path.iterdir()) == []
    last = check.text("'my cluster.yaml'").splitlines()[-1]
    assert last == "ready: drillyard launch RUN --cluster 'my cluster.yaml'"


def test_the_directory_of_runs_is_looked_at_where_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    check = look(Hosts(), tmp_path)
    assert only(check, "storage").text.startswith(f"{tmp_path}/runs: writable, the same on all")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_host_alone_needs_nobody_to_meet(tmp_path: Path) -> None:
    programs = Hosts()
    check = look(programs, tmp_path, 1)
    assert check.exit_code == 0
    assert not found(check, "ports") and not found(check, "clocks")
    assert len(programs.commands) == 1 and "--meet" not in programs.commands[0][1]


def test_each_host_is_named_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look finds all of it, and what is well on the others."""
    monkeypatch.setattr(node_probe, "_MEET_SECONDS", 1.0)
    old = tmp_path / "old"
    old.mkdir()
    stand_in = "#!/bin/sh\ncase $2 in *exit*) exit 1 ;; esac\necho 3.6.8\n"
    (old / "python3").write_text(stand_in)
    (old / "python3").chmod(0o755)
    everything = programs_without(tmp_path / "bin", "python3")
    storage = tmp_path / "storage"
    storage.mkdir()
    programs = Hosts(
        paths={"b": everything, "c": f"{old}:{everything}"},
        says={
            "d": Result(("ssh", "-o", "d", "x"), 255, "", "ssh: connect to host d port 22: lost\n"),
            "e": UnreachableError("e: no answer after 240 s\ncommand: ssh e"),
            "f": UserError("f: its login shell ended with exit code 0 and did not run the command"),
        },
    )
    check = look(programs, storage, 6)
    assert check.exit_code == 1
    assert check.looked_at == ("a", "b", "c") and check.proved == ("a",)
    named = {each.nodes: each for each in check.findings if each.result == "missing"}
    assert named[("b",)].check == "programs" and "no python3 on its PATH" in named[("b",)].text
    assert "Python 3.6.8, and the agent needs 3.9" in named[("c",)].text
    for host, words in (("d", "port 22: lost"), ("e", "after 240 s"), ("f", "login shell ended")):
        assert named[(host,)].check == "hosts" and words in named[(host,)].text
    # The first host's own checks are not hidden by the others.
    assert str(storage) in only(check, "storage").text
    assert list(storage.iterdir()) == []


def test_where_no_host_answers_nothing_is_known(tmp_path: Path) -> None:
    lost = Result(("ssh", "-o", "a", "x"), 255, "", "ssh: Could not resolve hostname\n")
    programs = Hosts(says={"a": lost, "b": lost})
    check = look(programs, tmp_path)
    assert check.exit_code == 3 and check.looked_at == ()
    assert {each.result for each in found(check, "hosts")} == {"unknown"}
    # Nobody tries to remove a file where none can be.
    assert len(programs.commands) == 2


def test_storage_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    check = look(Hosts(), hidden)
    missing = next(each for each in found(check, "storage") if each.result == "missing")
    assert missing.nodes == ("a", "b") and "cannot be written: is not there" in missing.text
    assert check.exit_code == 1 and not hidden.exists()


def findings_of(
    count: int = 3, asked: LaunchRequest | None = None, **changes: Any
) -> list[Finding]:
    """The findings of hosts a, b, ... with these facts; `b={...}` changes those of b."""
    facts = {
        host: {
            **{"gpus": 0, "gpu_models": [], "clock": 1000.2, "clock_at_end": 1000.4, "user": 1},
            "directory": {"path": "/s", "error": None, "free_bytes": 1 << 40, "seen": host != "a"},
            "meeting": {"joined": count - 1 if host == "a" else 1, "error": None},
            **changes.get(host, {}),
        }
        for host in "abcdef"[:count]
    }
    looked = Looked(
        {host: NodeAnswer(facts=each) for host, each in facts.items()},
        dict.fromkeys(facts, (1000.0, 1001.0)),
        writer="a",
        is_written=not facts["a"]["directory"]["error"],
        leaders=dict.fromkeys(facts, "a") if count > 1 else {},
        first_port=21000,
    )
    ssh = f"{{hosts: [{', '.join(facts)}], directory: /p, rendezvous_host: 127.0.0.1}}"
    config = cluster("ssh", None, count, processes_per_node=1, ssh=ssh)
    return node_findings(asked or request(config), looked)


def wrong(findings: list[Finding]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(each.check, each.result, each.nodes) for each in findings if each.result != "ok"]


def test_facts_of_hosts_that_lack_nothing() -> None:
    assert wrong(findings_of()) == [] and wrong(findings_of(1)) == []


def test_hosts_that_see_another_directory_under_the_path() -> None:
    elsewhere = {"path": "/s", "error": None, "free_bytes": 1 << 40, "seen": False}
    findings = findings_of(b={"directory": elsewhere}, c={"directory": elsewhere})
    assert wrong(findings) == [("storage", "missing", ("b", "c"))]
    full = {"path": "/s", "error": None, "free_bytes": 5 << 20, "seen": True}
    assert wrong(findings_of(b={"directory": full})) == [("storage", "missing", ("b",))]


def test_a_first_host_that_cannot_write_accuses_no_other() -> None:
    error = {"path": "/s", "error": "Read-only file system", "free_bytes": None, "seen": None}
    unseen = {"path": "/s", "error": None, "free_bytes": 1 << 40, "seen": False}
    findings = findings_of(a={"directory": error}, b={"directory": unseen}, c={"directory": unseen})
    assert wrong(findings) == [("storage", "missing", ("a",)), ("storage", "unknown", ())]


def test_hosts_that_cannot_join_the_first() -> None:
    refused = {"meeting": {"joined": None, "error": "a: [Errno 111] Connection refused"}}
    findings = findings_of(b=refused, c=refused)
    assert wrong(findings) == [("ports", "missing", ("b", "c"))]
    # Where the first did not listen, that is not the others' fault.
    taken = {"meeting": {"joined": None, "error": "ports 21000 to 21015 are all taken"}}
    findings = findings_of(a=taken, b=refused, c=refused)
    assert wrong(findings) == [("ports", "missing", ("a",)), ("ports", "unknown", ("b", "c"))]
    assert wrong(findings_of(a={"meeting": {}}, b=refused)) == [("ports", "unknown", ("b", "c"))]


def test_clocks_and_users_that_differ() -> None:
    late = {"clock": 1030.0, "clock_at_end": 1030.4}
    assert wrong(findings_of(c=late)) == [("clocks", "missing", ("c",))]
    assert wrong(findings_of(b={"user": 7})) == [("user", "missing", ("b",))]


def test_a_python_without_drillyard_is_a_lack_only_where_the_config_names_it() -> None:
    bare = {"drillyard": {"python": "/p/bin/python", "version": None, "error": "No such file"}}
    assert wrong(findings_of(1, a=bare)) == [("drillyard", "note", ("a",))]
    config = cluster(
        "ssh", None, 1, processes_per_node=1, ssh="{hosts: [a]}", python="/p/bin/python"
    )
    assert wrong(findings_of(1, request(config), a=bare)) == [("drillyard", "missing", ("a",))]


def test_a_project_that_is_not_there_is_made_by_sync() -> None:
    findings = findings_of(b={"project": {"path": "/p", "is_there": False, "writable": False}})
    assert wrong(findings) == [("project", "note", ("b",))]
    assert "launch --sync" in next(each.text for each in findings if each.check == "project")


@pytest.mark.parametrize(
    ("name", "result"), [(H100, "ok"), ("NVIDIA A100-SXM4-80GB", "missing"), ("Fancy", "unknown")]
)
def test_names_of_gpus(name: str, result: str) -> None:
    asked = request(cluster("ssh", "gpu-h100-sxm", nodes=1, ssh="{hosts: [a]}"))
    findings = findings_of(1, asked, a={"gpus": 8, "gpu_models": [name] * 8})
    (gpus,) = [each for each in findings if each.check == "gpus"]
    assert gpus.result == result


def test_fewer_gpus_than_the_machine_has() -> None:
    asked = request(cluster("ssh", "gpu-h100-sxm", nodes=1, ssh="{hosts: [a]}"))
    findings = findings_of(1, asked, a={"gpus": 7, "gpu_models": [H100] * 7})
    assert wrong(findings) == [("gpus", "missing", ("a",))]
    # Without a machine in the config nobody knows how many there should be.
    assert wrong(findings_of(1, a={"gpus": 7, "gpu_models": [H100] * 7})) == []


def test_answers_of_many_nodes_in_one_stream() -> None:
    """Lines of nodes come in any order among each other, and prologs print into them."""
    facts = {"gpus": 8, "text": "x" * 2000}
    pieces = [json.dumps(facts)[start : start + 500] for start in range(0, 2100, 500)]
    lines = [line for piece in pieces for line in (f"n1 facts {piece}", f"n2 facts {piece}")]
    text = "\n".join(["welcome", *lines, "n3 lacks python3 tar", "n4 failed no disk", "n5 facts {"])
    answers = parse_answers(text)
    assert answers["n1"].facts == answers["n2"].facts == facts
    assert answers["n3"].lacks == ("python3", "tar") and answers["n4"].failed == "no disk"
    assert answers["n5"].failed and not answers["n5"].facts
    assert set(answers) == {"n1", "n2", "n3", "n4", "n5"}


def test_the_command_and_its_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, storage = tmp_path / "c.yaml", tmp_path / "storage"
    storage.mkdir()
    config.write_text(
        "{name: c, platform: ssh, nodes: 1, processes_per_node: 1,"
        f" storage: {{directory: {storage}}}, ssh: {{hosts: [a], directory: {storage}}}}}"
    )
    programs = Hosts()
    monkeypatch.setattr("drillyard.provision.provisioner.Programs", lambda: programs)

    def run(*words: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["cluster", "status", str(config), *words])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    code, out, _ = run()
    assert (code, out.splitlines()[-1]) == (0, f"ready: drillyard launch RUN --cluster {config}")
    code, out, _ = run("--json")
    document = json.loads(out)
    assert code == 0 and document["ready"] and document["proved"] == ["a"]
    assert {each["check"] for each in document["findings"]} >= {"hosts", "storage", "programs"}
    code, out, err = run("--price", "3")
    assert code == 2 and "--price" in err and "Traceback" not in err
    programs.says["a"] = Result(("ssh", "-o", "a", "x"), 255, "", "ssh: lost\n")
    code, out, _ = run()
    assert code == 3 and out.splitlines()[-1].endswith(f"drillyard cluster status {config}")
    with pytest.raises(SystemExit):
        main(["cluster", "up", str(config)])
    assert "`drillyard cluster status` looks at them" in capsys.readouterr().err
    code, _, err = run("--set", "nodes=2")
    assert code == 2 and "ssh.hosts" in err
