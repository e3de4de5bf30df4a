"""`drillyard cluster status` of a Slurm partition: what Slurm's commands and the nodes say, and
what of it a run would miss."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.requests import cluster, request

from drillyard.errors import UnreachableError, UserError
from drillyard.launch.cluster_check import ClusterCheck, Finding
from drillyard.launch.slurm.cluster_check import _CLEAN, check_slurm
from drillyard.launch.slurm.config import seconds_of
from drillyard.launch.slurm.partition_check import parse_hardware
from drillyard.programs import Programs, Result

PARTITION = (
    "PartitionName=main AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=2-00:00:00"
    " MinNodes=0 Nodes=n[1-4] State=UP TotalNodes=4 PreemptMode=REQUEUE"
)
SETTINGS = {
    "SLURM_VERSION": "24.05.3",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "ProctrackType": "proctrack/cgroup",
    "PreemptMode": "REQUEUE",
    "JobRequeue": "1",
    "MinJobAge": "300 sec",
}
H100 = ["NVIDIA H100 80GB HBM3"] * 8


def facts(node: str, **changes: Any) -> dict[str, Any]:
    """What a node tells where all is well."""
    well: dict[str, Any] = {
        **{"gpus": 8, "gpu_models": H100, "clock": time.time(), "user": 1001},
        "clock_at_end": time.time(),
        "directory": {"path": "/s", "error": None, "free_bytes": 1 << 40, "seen": True},
        "meeting": {"joined": 3 if node == "n1" else 1, "error": None},
    }
    return well | changes


@dataclass
class Partition(Programs):
    """A login host and its nodes n1 to n4; a test changes what they say."""

    states: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    gres: dict[str, str] = field(default_factory=dict)
    features: dict[str, str] = field(default_factory=dict)
    partitions: str = PARTITION
    settings: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    nodes: dict[str, str | dict[str, Any]] = field(default_factory=dict)
    """The lines or the changed facts of a node that is asked."""
    unstartable: dict[str, str] = field(default_factory=dict)
    most: int = 1000
    """Nodes that one user may have."""
    srun_says: str = ""
    """Of an srun that gets no nodes."""
    login: str | dict[str, Any] | Result | UserError = field(default_factory=dict)
    calls: list[list[str]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """The variables that each command of a job keeps."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        directory: Path | None = None,
    ) -> Result:
        words = shlex.split(argv[-1])[5:] if argv[0] == "ssh" else list(argv)
        if words[0] == "bash":
            self.kept.append(words[3])
            words = words[4:]
        self.calls.append(words)
        answer = self._answer(words)
        if isinstance(answer, str):
            return Result(tuple(argv), 0, answer, "")
        return Result(tuple(argv), answer.returncode, answer.stdout, answer.stderr)

    def _answer(self, words: list[str]) -> str | Result:
        if words[0] == "sh":
            if isinstance(self.login, UserError):
                raise self.login
            if isinstance(self.login, Result):
                return self.login
            return lines("-", self.login)
        if words[0] == "timeout":
            return self._srun(words)
        if words[:2] == ["sbatch", "--test-only"]:
            said = (
                self.refusal or "sbatch: Job 7 to start at 2026-11-28T12:00:00 using 8 processors"
            )
            return Result((), int(bool(self.refusal)), "", f"{said}\n")
        if words[:2] == ["sinfo", "--noheader"]:
            names = [f"n{number}" for number in range(1, 5)]
            if words[-1].endswith("%o"):
                return "".join(f"{name}|96|2000000|10.0.0.{name[1:]}\n" for name in names)
            return "".join(
                f"{name}|main*|{self.states.get(name, 'idle')}|"
                f"{self.features.get(name, '(null)')}|{self.gres.get(name, 'gpu:h100:8(S:0-1)')}|"
                f"{self.reasons.get(name, 'none')}\n"
                for name in names
            )
        if words[0] == "scontrol":
            if "partition" in words:
                return self.partitions + "\n"
            if "config" in words:
                shown = {**SETTINGS, **self.settings}
                return "".join(f"{name:24}= {value}\n" for name, value in shown.items())
            return "".join(f"{name}\n" for name in words[-1].split(","))
        if words[:2] == ["srun", "--help"]:
            return "  --container-image=[USER@][REGISTRY#]IMAGE\n"
        assert words[0] == "rm", words
        return ""

    def _srun(self, words: list[str]) -> Result:
        if self.srun_says:
            return Result((), 1, "", self.srun_says)
        (nodes,) = (word.partition("=")[2] for word in words if word.startswith("--nodelist="))
        names = nodes.split(",")
        if len(names) > self.most:
            return Result((), 1, "", "srun: error: Job violates accounting/QOS policy\n")
        if failing := [name for name in names if name in self.unstartable]:
            return Result((), 1, "", "".join(f"{self.unstartable[name]}\n" for name in failing))
        out = "".join(lines(name, self.nodes.get(name, {})) for name in names)
        return Result((), 0, out, "")

    def sruns(self) -> list[list[str]]:
        return [words for words in self.calls if words[0] == "timeout"]


def lines(node: str, said: str | dict[str, Any]) -> str:
    """What the script prints on a node."""
    if isinstance(said, str):
        return "".join(f"{node} {line}\n" for line in said.splitlines())
    text = json.dumps(facts(node, **said))
    return "".join(f"{node} facts {text[at : at + 500]}\n" for at in range(0, len(text), 500))


def look(programs: Partition, nodes: int = 2, **more: Any) -> ClusterCheck:
    """The check of a cluster on whose login host slurm's commands are."""
    settings: dict[str, Any] = {"machine": "gpu-h100-sxm", "storage": "{directory: /s}"} | more
    asked = request(cluster("slurm", nodes=nodes, **settings))
    return check_slurm(asked.cluster, asked.facts, programs)


def wrong(check: ClusterCheck) -> list[tuple[str, str, tuple[str, ...]]]:
    return [
        (each.check, each.result, each.nodes)
        for each in check.findings
        if each.result != "ok" and each.check != "drillyard"
    ]


def only(check: ClusterCheck, name: str, result: str = "missing") -> Finding:
    (finding,) = [each for each in check.findings if (each.check, each.result) == (name, result)]
    return finding


def test_a_partition_that_lacks_nothing_is_ready() -> None:
    programs = Partition()
    check = look(programs)
    assert check.exit_code == 0 and wrong(check) == [], check.text("c.yaml")
    assert check.nodes == check.looked_at == check.proved == ("n1", "n2", "n3", "n4")
    names = [each.check for each in check.findings]
    assert names.index("login") < names.index("partition") < names.index("job")
    assert {"settings", "nodes", "hardware", "programs", "storage", "gpus", "ports"} <= {*names}


def test_one_srun_asks_for_what_a_run_asks_for() -> None:
    programs = Partition()
    look(
        programs,
        slurm="{account: lab, qos: high, gres: 'gpu:h100:8', time_limit: '1-00:00:00',"
        " arguments: ['--reservation=big --mail-type=END']}",
    )
    (srun,) = programs.sruns()
    assert {
        *("--nodes=4", "--ntasks=4", "--nodelist=n1,n2,n3,n4", "--gres=gpu:h100:8", "--exclusive"),
        *("--account=lab", "--qos=high", "--mem=0", "--reservation=big", "--time=5"),
    } <= {*srun}
    assert not [word for word in srun if word.startswith(("--mail", "--comment", "--signal"))]
    (test,) = [words for words in programs.calls if words[:2] == ["sbatch", "--test-only"]]
    assert {"--nodes=2", "--time=1-00:00:00", "--account=lab", "--mail-type=END"} <= {*test}


def test_the_file_that_all_should_see_is_removed_and_no_other() -> None:
    programs = Partition()
    look(programs)
    (removal,) = [words for words in programs.calls if words[0] == "rm"]
    login = next(words for words in programs.calls if words[0] == "sh")
    nonce = login[login.index("--write-nonce") + 1]
    assert removal == ["rm", "-f", "--", f"/s/runs/.drillyard-{nonce}", f"/s/.drillyard-{nonce}"]
    (srun,) = programs.sruns()
    assert srun[srun.index("--nonce") + 1] == nonce and "--write-nonce" not in srun


def test_each_node_is_named_with_what_it_lacks() -> None:
    read_only = {"path": "/s", "error": "/s: Read-only file system", "free_bytes": None}
    programs = Partition(
        states={"n4": "drain"},
        reasons={"n4": "a bad GPU"},
        nodes={"n2": {"directory": {**read_only, "seen": True}}, "n3": "lacks python3"},
    )
    check = look(programs)
    assert check.exit_code == 1 and check.proved == ("n1",)
    assert wrong(check) == [
        ("nodes", "note", ("n4",)),
        ("programs", "missing", ("n3",)),
        ("storage", "missing", ("n2",)),
    ]
    assert "Read-only" in only(check, "storage").text
    drained = only(check, "nodes", "note").text
    assert "a bad GPU" in drained and "scontrol update NodeName=n4 State=RESUME" in drained
    (srun,) = programs.sruns()
    assert "--nodelist=n1,n2,n3" in srun


def test_too_few_nodes_for_a_run() -> None:
    states = {"n1": "drain", "n2": "down*", "n3": "drng"}
    check = look(Partition(states=states))
    assert check.exit_code == 1 and check.proved == ("n4",)
    named = [nodes for name, result, nodes in wrong(check) if name == "nodes"]
    assert named == [(), ("n1", "n3"), ("n2",)]
    assert look(Partition(), nodes=5).exit_code == 1


def test_nodes_with_jobs_of_others_are_named_and_not_looked_at() -> None:
    """Enough others prove what a run needs; too few leave it unknown."""
    programs = Partition(states={"n1": "alloc", "n2": "idle~"})
    check = look(programs)
    assert check.exit_code == 0 and check.looked_at == ("n3", "n4")
    assert wrong(check) == [("nodes", "note", ("n1",)), ("nodes", "note", ("n2",))]
    assert look(Partition(states=dict.fromkeys(("n1", "n2", "n3"), "mix"))).exit_code == 3
    busy = Partition(states=dict.fromkeys(("n1", "n2", "n3", "n4"), "alloc"))
    assert look(busy).exit_code == 3 and not busy.sruns()


def test_a_node_on_which_slurm_starts_nothing_hides_no_other() -> None:
    why = "srun: error: Task launch for StepId=5.0 failed on node n2: Communication failure"
    programs = Partition(unstartable={"n2": why}, nodes={"n3": "lacks bash"})
    check = look(programs)
    assert [words for words in programs.sruns()[1] if words.startswith("--nodelist")] == [
        "--nodelist=n1,n3,n4"
    ]
    assert check.proved == ("n1", "n4") and check.exit_code == 1
    assert "Communication failure" in only(check, "nodes").text
    assert only(check, "nodes").nodes == ("n2",)


def test_an_srun_that_gets_no_nodes_leaves_them_unknown() -> None:
    said = "srun: error: Unable to allocate resources: Immediate execution impossible"
    check = look(Partition(srun_says=said))
    assert check.exit_code == 3
    assert only(check, "nodes", "unknown").nodes == ("n1", "n2", "n3", "n4")
    assert "Immediate execution impossible" in only(check, "nodes", "unknown").text


def test_limits_on_nodes_of_a_job_or_a_user() -> None:
    """As many at a time as the partition gives, else as a run takes."""
    limited = Partition(partitions=PARTITION.replace("MaxNodes=UNLIMITED", "MaxNodes=3"))
    check = look(limited)
    assert check.exit_code == 0 and check.proved == ("n1", "n2", "n3", "n4")
    asked = [word for words in limited.sruns() for word in words if word.startswith("--nodelist")]
    assert asked == ["--nodelist=n1,n2,n3", "--nodelist=n4"]
    user = Partition(most=2)
    check = look(user)
    assert check.exit_code == 0 and len(user.sruns()) == 3
    assert "all can join n1, n3" in only(check, "ports", "ok").text
    none = Partition(most=0)
    check = look(none)
    assert check.exit_code == 3 and len(none.sruns()) == 2
    assert only(check, "nodes", "unknown").nodes == ("n1", "n2", "n3", "n4")


def test_one_of_several_partitions_is_enough() -> None:
    both = f"{PARTITION}\n{PARTITION.replace('=main', '=urgent').replace('=UP', '=DOWN')}"
    check = look(Partition(partitions=both), slurm="{partition: 'main,urgent'}")
    assert check.exit_code == 0 and check.nodes == ("n1", "n2", "n3", "n4")
    assert "urgent is DOWN" in only(check, "partition", "note").text
    assert look(Partition(partitions=both), slurm="{partition: urgent}").exit_code == 1


def test_nodes_short_of_gpus_are_named_and_the_others_asked() -> None:
    programs = Partition(gres={"n2": "gpu:h100:7"})
    check = look(programs)
    assert only(check, "gpus").nodes == ("n2",) and check.proved == ("n1", "n3", "n4")
    (srun,) = programs.sruns()
    assert "--nodelist=n1,n3,n4" in srun


@pytest.mark.parametrize(
    ("changed", "slurm", "words"),
    [
        ("State=DOWN", "{}", "scontrol update PartitionName=main State=UP"),
        ("MaxNodes=1", "{}", "set nodes: 1"),
        ("MinNodes=3", "{}", "set nodes: 3"),
        ("MaxTime=12:00:00", "{time_limit: '1-00:00:00'}", 'Set slurm.time_limit: "12:00:00"'),
        ("", "{partition: gpu}", "there is no partition gpu, but main"),
        ("Default=NO", "{}", "no partition is the default"),
    ],
)
def test_limits_of_the_partition(changed: str, slurm: str, words: str) -> None:
    name = changed.partition("=")[0]
    fields = [
        changed if name and each.startswith(f"{name}=") else each for each in PARTITION.split()
    ]
    programs = Partition(partitions=" ".join(fields))
    check = look(programs, slurm=slurm)
    if changed == "State=DOWN":
        assert not programs.sruns(), "it would wait for nothing"
    assert check.exit_code == 1 and words in only(check, "partition").text


def test_limits_that_a_run_keeps() -> None:
    for limit in ("2-00:00:00", "2880", "47:59:59"):
        assert look(Partition(), slurm=f"{{time_limit: '{limit}'}}").exit_code == 0
    assert seconds_of("UNLIMITED") is None and seconds_of("1:30") == 90
    assert look(Partition(), slurm="{exclude: [n1, n2]}").nodes == ("n3", "n4")
    fast = Partition(features={"n1": "fast", "n3": "fast,big"})
    assert look(fast, slurm="{constraint: fast}").nodes == ("n1", "n3")
    check = look(fast, slurm="{constraint: 'fast&big'}")
    assert len(check.nodes) == 4 and only(check, "nodes", "note").nodes == ()


def test_a_job_that_sbatch_would_refuse() -> None:
    said = "allocation failure: Invalid account or account/partition combination specified"
    check = look(Partition(refusal=said))
    assert check.exit_code == 1
    text = only(check, "job").text
    assert "Invalid account" in text and "sacctmgr show associations" in text
    said = "allocation failure: Invalid feature specification"
    assert "sinfo -o '%P %f'" in only(look(Partition(refusal=said)), "job").text


def test_settings_that_change_how_runs_end_are_notes() -> None:
    settings = {
        "AccountingStorageType": "accounting_storage/none",
        "ProctrackType": "proctrack/linuxproc",
        "Prolog[0]": "/etc/slurm/prolog.d/*",
        "SchedulerParameters": "bf_continue",
    }
    programs = Partition(
        settings=settings, partitions=PARTITION.replace("PreemptMode=REQUEUE", "PreemptMode=CANCEL")
    )
    check = look(programs)
    assert check.exit_code == 0
    assert [each for each in wrong(check) if each[0] != "settings"] == []
    assert (
        len([each for each in check.findings if (each.check, each.result) == ("settings", "note")])
        == 4
    )
    assert "24.05.3" in only(check, "settings", "ok").text


def test_a_login_host_that_cannot_be_reached_is_all_that_is_known() -> None:
    lost = Result(("ssh", "-o", "login", "x"), 255, "", "ssh: connect to host login: lost\n")
    programs = Partition(login=lost)
    check = look(programs, slurm="{login_host: login}")
    assert check.exit_code == 3 and wrong(check) == [("login", "unknown", ("login",))]
    assert len(programs.calls) == 1
    late = Partition(login=UnreachableError("login: no answer after 300 s\ncommand: ssh"))
    check = look(late, slurm="{login_host: login}")
    assert check.exit_code == 3
    # It may have written before it was silent.
    assert late.calls[-1][0] == "rm"


def test_a_login_host_that_lacks_programs_or_storage() -> None:
    check = look(Partition(login="lacks sacct python3"))
    assert check.exit_code == 1
    said = [each.text for each in check.findings if each.check == "login"]
    assert "sacct" in said[0] and "python3" in said[1] and len(said) == 2
    error = {"path": "/s", "error": "is not there", "free_bytes": None, "seen": None}
    programs = Partition(login={"directory": error})
    check = look(programs)
    assert check.exit_code == 1 and only(check, "storage").nodes == ("this machine",)
    (srun,) = programs.sruns()
    assert "--nonce" not in srun


def test_a_controller_that_does_not_answer_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"

    def fail(self: Partition, words: list[str]) -> str | Result:
        return Result((), 1, "", said) if words[0] == "scontrol" else answer(self, words)

    answer = Partition._answer
    monkeypatch.setattr(Partition, "_answer", fail)
    check = look(Partition())
    assert (
        check.exit_code == 3
        and "Unable to contact slurm controller" in only(check, "slurm", "unknown").text
    )


def test_an_image_needs_pyxis_and_enroot_and_python_all_the_same() -> None:
    programs = Partition(nodes={"n1": "lacks python3", "n2": "lacks python3 enroot"})
    check = look(programs, image="nvcr.io/x/y:1")
    assert only(check, "image", "ok")
    found = [each for each in check.findings if each.check == "programs"]
    assert {each.result for each in found} == {"missing"}
    lacks = {each.nodes: each.text for each in found}
    assert "enroot" in lacks[("n2",)] and "python3" in lacks[("n1", "n2")]


def test_commands_run_outside_of_an_allocation_with_the_defaults_of_a_launch() -> None:
    environment = {
        **{
            "SBATCH_ACCOUNT": "lab",
            "SBATCH_MEM_PER_CPU": "1",
            "SBATCH_EXPORT": "NONE",
            "SLURM_JOB_ID": "7",
        },
        **{"SLURM_CONF": "/etc/s.conf", "SRUN_CONTAINER": "x", "PATH": os.environ["PATH"]},
    }
    programs = Partition()
    look(programs)
    # A run has --mem=0, which such a default would contradict; the account is left open.
    kept = next(iter(programs.kept))
    assert "SBATCH_ACCOUNT" in kept.split() and "SBATCH_MEM_PER_CPU" not in kept.split()
    look(programs, slurm="{account: other}")
    assert "SBATCH_ACCOUNT" not in programs.kept[-1].split()
    words = ["bash", "-c", _CLEAN, kept, "env"]
    shown = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    found = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    slurms = {name: value for name, value in found.items() if name.startswith("S") and "_" in name}
    assert slurms == {
        **{"SBATCH_ACCOUNT": "lab", "SLURM_ACCOUNT": "lab", "SLURM_CONF": "/etc/s.conf"},
    }


def test_processors_and_memory_of_nodes() -> None:
    text = "n1|96|2000000|10.0.0.1\nn1|96|2000000|10.0.0.1\nn2|48+|1000+|n2.lab\nwarning: old\n"
    found = parse_hardware(text)
    assert (found["n2"].cpus, found["n2"].memory_mib, found["n2"].address) == (48, 1000, "n2.lab")
    assert set(found) == {"n1", "n2"}
