"""What a launch needs, looked for on all nodes of a partition at once.

Slurm itself knows the states of nodes, the partition's limits and whether it would take the job
(`sbatch --test-only`, with the options of a launch). What only a node knows is asked by one srun
over all idle nodes, which takes seconds and needs no file on the storage that is looked at; it asks
for the same GPUs, account and reservation as a run. The login host, where `launch` writes a run's
directory, leaves one file there that all nodes should see; it is removed at the end. Nodes with
jobs of others, and ones that are powered down, are named and not looked at.
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Generator, Iterator, Mapping, Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UnreachableError, UserError
from drillyard.hardware.catalog import Catalog
from drillyard.launch.agent.submit import CONTROLLER_VARIABLES, SITE_DEFAULTS
from drillyard.launch.cluster_check import (
    ClusterCheck,
    Finding,
    FindingResult,
    by_check,
    shared_findings,
)
from drillyard.launch.hosts.host_agents import ask_all
from drillyard.launch.hosts.host_facts import no_answer_reason
from drillyard.launch.node_probe import (
    Looked,
    NodeAnswer,
    forget,
    login_findings,
    meeting_words,
    node_findings,
    parse_answers,
    probe_argv,
    status_request,
    storage_words,
)
from drillyard.launch.prepared_run import accelerators_of, agent_files, paths_on, port_of
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import Handle
from drillyard.launch.slurm.commands import Slurm, advice_on
from drillyard.launch.slurm.config import SlurmConfig
from drillyard.launch.slurm.job_script import directives
from drillyard.launch.slurm.launcher import SlurmLauncher
from drillyard.launch.slurm.nodes import SlurmNode, short_of_gpus, usable_nodes
from drillyard.launch.slurm.partition_check import (
    SHOW_CONFIG,
    SHOW_PARTITIONS,
    SINFO_HARDWARE,
    NodeHardware,
    hardware_findings,
    most_nodes,
    parse_config,
    parse_hardware,
    parse_partitions,
    partition_findings,
    partition_names,
    settings_findings,
    sorted_nodes,
    starts_jobs,
    state_findings,
)
from drillyard.launch.slurm.rules import gpus_of_gres, options_in
from drillyard.programs import Host, Programs, Result, archive, shown_text

_LOGIN_PROGRAMS = (
    *("sbatch", "srun", "scancel", "squeue", "sinfo", "scontrol", "sacct"),
    *("bash", "python3", "tar", "mktemp"),
)
"""What `drillyard launch` and `drillyard runs` call there."""
_NODE_PROGRAMS = ("bash", "python3", "scontrol", "srun", "squeue", "scancel", "sed", "timeout")
"""What a job calls on its first node (slurm/job.sh, agent/slurm_job.py), and any may be that."""
_PROBE_OPTIONS = {
    *("--partition", "--account", "--qos", "--gres", "--gpus-per-node", "--exclusive"),
    *("--mem", "--mem-per-cpu", "--mem-per-gpu", "--reservation"),
}
"""Options of a run's job that decide whether it gets its nodes, and what it sees of them."""
_SECONDS, _PROBE_SECONDS = 60.0, 300.0
_SRUN_SECONDS = 240
"""After which srun ends its job: tasks that hang in the kernel do not end by themselves."""
_WAIT_SECONDS = 30
"""For nodes that were idle a moment ago."""
_LIMIT_MINUTES = 5
_ROUNDS = 3
"""srun starts nothing where one node cannot start its task; it is named, and the others are asked
again."""
_FAILED_ON = re.compile(r"failed on node ([^ :]+): (.*)")
_CLEAN = f"""\
for name in ${{!SBATCH_@}}; do
    case " $0 " in
        *" $name "*) defaults+=("SLURM_${{name#SBATCH_}}=${{!name}}") ;;
        *) unset -v "$name" ;;
    esac
done
for name in ${{!SLURM_@}} ${{!SRUN_@}}; do
    case $name in {"|".join(sorted(CONTROLLER_VARIABLES))}) ;; *) unset -v "$name" ;; esac
done
exec env "${{defaults[@]}}" "$@"
"""
"""Runs a command outside of an allocation in which this may run, with the defaults of a site or
user that a launch keeps, named in `$0` (agent/submit.py); srun calls them SLURM_..."""


def check_slurm(cluster: ClusterConfig, facts: Catalog, programs: Programs) -> ClusterCheck:
    """Look at all nodes of a cluster's partition. Raises UserError for a config that `launch` would
    refuse."""
    request = status_request(cluster, facts)
    SlurmLauncher(cluster, programs).plan(request)
    look = _Look(request, programs)
    try:
        findings = tuple(look.findings())
    finally:
        left = look.forget()
    return ClusterCheck(
        cluster.name,
        cluster.platform,
        cluster.nodes,
        tuple(look.nodes),
        tuple(look.answers),
        by_check((*findings, *left)),
    )


class _Look:
    """One look at a cluster, and what it has found so far."""

    def __init__(self, request: LaunchRequest, programs: Programs) -> None:
        self.nodes: list[str] = []
        self.answers: dict[str, NodeAnswer] = {}
        self._asked: dict[str, tuple[float, float]] = {}
        self._leaders: dict[str, str] = {}
        self._request = request
        self._programs = programs
        slurm = request.cluster.section_as(SlurmConfig)
        self._slurm = slurm
        self._host = Host(slurm.login_host, config_file=slurm.config_file)
        self._commands = Slurm(request.cluster.name, self._host, programs)
        self._nonce = secrets.token_hex(16)
        self._may_have_written = False
        self._has_written = False
        self._handle = Handle("slurm", request.cluster.name, request.run.name)
        self._starts_jobs = True
        self._most: int | None = None
        """Nodes that the partition gives a job; None: no limit."""

    def findings(self) -> Iterator[Finding]:
        """All, in the order of the checks."""
        is_reached, login = self._login()
        yield from login
        if not is_reached:
            return
        try:
            yield from self._settings()
            yield from self._nodes()
        except UserError as error:
            said = " ".join(str(error).split("\ncommand: ")[0].split())
            unreachable = isinstance(error, UnreachableError)
            yield Finding("slurm", "unknown" if unreachable else "missing", said)

    def forget(self) -> list[Finding]:
        """Remove the file that the nodes should see."""
        if not self._may_have_written:
            return []
        return forget(self._host, self._request, self._nonce, self._programs)

    def _login(self) -> tuple[bool, list[Finding]]:
        """The login host: its programs and its storage."""
        words = [*storage_words(self._request), "--write-nonce", self._nonce]
        words += ["--project", paths_on(self._request).project]
        argv = self._host.argv(probe_argv(_LOGIN_PROGRAMS, words))
        title = self._host.title
        self._may_have_written = True
        sent = archive(agent_files())
        (answer,) = ask_all([title], [argv], self._programs, stdin=sent, seconds=_PROBE_SECONDS)
        if answer.result is None or answer.result.unreachable:
            self._may_have_written = answer.result is None
            result: FindingResult = "missing" if answer.is_reached else "unknown"
            return False, [Finding("login", result, no_answer_reason(answer), (title,))]
        said = parse_answers(answer.result.stdout).get("-")
        found = said or NodeAnswer(failed=no_answer_reason(answer))
        problems = list(login_findings(title, found))
        self._has_written = bool(found.facts) and not found.facts["directory"]["error"]
        if not any(each.check == "login" for each in problems):
            problems.insert(0, Finding("login", "ok", f"{title}: Slurm's programs and python3"))
        return True, problems

    def _settings(self) -> Iterator[Finding]:
        """What Slurm says of itself, the partition and the job."""
        yield from settings_findings(parse_config(self._output(SHOW_CONFIG)))
        listed = parse_partitions(self._output(SHOW_PARTITIONS))
        self._starts_jobs = starts_jobs(listed, self._slurm)
        yield from partition_findings(listed, self._slurm, self._request.cluster.nodes)
        self._most = most_nodes(listed, self._slurm)
        yield self._job()
        if self._request.image is not None:
            yield self._image_plugin()

    def _job(self) -> Finding:
        """Whether Slurm would take the job of a run."""
        words = [word for option in self._directives() for word in shlex.split(option)]
        test = ["sbatch", "--test-only", "--chdir=/", *words, "--wrap", "true"]
        result = self._clean(test, _SECONDS)
        said = [line for line in result.stderr.splitlines() if line.strip()]
        last = re.sub(r"^sbatch: (error: )?", "", said[-1]) if said else "no answer"
        if result.returncode == 0:
            return Finding("job", "ok", f"sbatch --test-only: {shown_text(last)}")
        advice = advice_on(result.stderr)
        text = f"sbatch would refuse a run's job: {shown_text(last)}" + (advice and f"; {advice}")
        return Finding("job", "missing", text)

    def _image_plugin(self) -> Finding:
        if "--container-image" in self._output(["srun", "--help"]):
            return Finding("image", "ok", "srun has pyxis, and starts runs in their image")
        text = (
            "srun has no --container-image, with which runs start in their image: have pyxis and"
            " enroot installed (https://github.com/NVIDIA/pyxis), or remove image"
        )
        return Finding("image", "missing", text)

    def _nodes(self) -> Iterator[Finding]:
        """The nodes that a run may get: by Slurm, and by themselves."""
        slurm, wanted = self._slurm, self._request.cluster.nodes
        of = [self._commands.nodes(name) for name in partition_names(slurm)]
        listed = list({each.name: each for nodes in of for each in nodes}.values())
        excluded = self._commands.host_names(slurm.exclude)
        usable = usable_nodes(listed, slurm, excluded)
        if usable is None:
            usable = [each for each in listed if each.name not in excluded]
            text = "slurm.constraint is more than one feature: nodes without it are looked at, too"
            yield Finding("nodes", "note", text)
        self.nodes = [each.name for each in usable]
        found = sorted_nodes(usable)
        yield from state_findings(found, wanted)
        hardware = parse_hardware(self._output(SINFO_HARDWARE))
        yield from hardware_findings(hardware, self.nodes)
        short = self._short_of_gpus(usable)
        yield from shared_findings(
            Finding("gpus", "missing", text, (node,)) for node, text in short.items()
        )
        if self._starts_jobs:
            yield from self._ask([each for each in found.idle if each not in short], hardware)
        looked = Looked(
            answers=self.answers,
            asked=self._asked,
            writer=self._host.title,
            is_written=self._has_written,
            leaders=self._leaders,
            first_port=port_of(self._handle),
        )
        yield from node_findings(self._request, looked)

    def _short_of_gpus(self, nodes: Sequence[SlurmNode]) -> dict[str, str]:
        asked = gpus_of_gres(self._slurm.gres) if self._slurm.gres else None
        needed = asked or accelerators_of(self._request)
        return short_of_gpus(nodes, needed, self._request.cluster.nodes) if needed else {}

    def _ask(self, nodes: Sequence[str], hardware: Mapping[str, NodeHardware]) -> Iterator[Finding]:
        """Ask all idle nodes with one srun, or as few as the partition's limit allows; where that
        gets no nodes, such as at a limit of the account, as many at a time as a run takes."""
        all_at_once = min(len(nodes), self._most or len(nodes))
        unanswered: dict[str, str] = {}
        for size in dict.fromkeys((all_at_once, min(all_at_once, self._request.cluster.nodes))):
            unanswered = {}
            for start in range(0, len(nodes), size or 1):
                batch = nodes[start : start + size]
                silent = yield from self._ask_at_once(batch, hardware)
                unanswered |= silent
                if len(silent) == len(batch):
                    # The next would wait as long for nothing.
                    unanswered |= dict.fromkeys(nodes[start + size :], silent[batch[0]])
                    break
            if self.answers or not unanswered:
                break
        yield from shared_findings(
            Finding("nodes", "unknown", f"did not answer: {said}: repeat it later", (node,))
            for node, said in unanswered.items()
        )

    def _ask_at_once(
        self, nodes: Sequence[str], hardware: Mapping[str, NodeHardware]
    ) -> Generator[Finding, None, dict[str, str]]:
        """Ask nodes with one srun; again without those on which Slurm starts nothing. Returns those
        that did not answer, each with srun's words."""
        waiting, said = list(nodes), ""
        for _ in range(_ROUNDS):
            if not waiting:
                break
            begun_at = time.time()
            result = self._clean(self._srun(waiting, hardware), _PROBE_SECONDS, sends_agent=True)
            times = begun_at, time.time()
            answers = parse_answers(result.stdout)
            found = {node: answers[node] for node in waiting if node in answers}
            self.answers |= found
            self._asked |= dict.fromkeys(found, times)
            if len(waiting) > 1:
                self._leaders |= dict.fromkeys(found, waiting[0])
            failed = dict(_FAILED_ON.findall(result.stderr))
            blamed = {
                node: failed[node] for node in waiting if node in failed and node not in found
            }
            for node, why in blamed.items():
                text = f"Slurm cannot start a task there: {shown_text(why)}: see its slurmd's log"
                yield Finding("nodes", "missing", text, (node,))
            waiting = [node for node in waiting if node not in found and node not in blamed]
            said = shown_text((result.stderr.strip().splitlines() or ["srun printed nothing"])[-1])
            if not blamed:
                break
        return dict.fromkeys(waiting, said)

    def _srun(self, nodes: Sequence[str], hardware: Mapping[str, NodeHardware]) -> list[str]:
        """The command that looks at all `nodes`."""
        request, leader, count = self._request, nodes[0], len(nodes)
        words = [*storage_words(request), "--nonce", self._nonce]
        if not self._has_written:
            words = words[:-2]
        words += ["--project", paths_on(request).project]
        words += [] if request.image else ["--python", paths_on(request).python]
        if count > 1:
            address = hardware[leader].address if leader in hardware else leader
            port = port_of(self._handle)
            words += meeting_words(f"{leader},{address}", port, self._nonce, count - 1)
        programs = [*_NODE_PROGRAMS, *(["enroot"] if request.image else [])]
        chosen = [
            f"{name}={value}" if value else name
            for name, value in options_in(self._directives())
            if name in _PROBE_OPTIONS
        ]
        return [
            *("timeout", "--kill-after=10", str(_SRUN_SECONDS), "srun"),
            f"--job-name={request.run.name}",
            *(f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
            f"--nodelist={','.join(nodes)}",
            *(f"--immediate={_WAIT_SECONDS}", f"--time={_LIMIT_MINUTES}"),
            *("--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--chdir=/", "--export=ALL"),
            *chosen,
            *probe_argv(programs, words, leader=leader if count > 1 else ""),
        ]

    def _directives(self) -> list[str]:
        return [option for option, _, _ in directives(self._request, self._handle)]

    def _clean(self, words: Sequence[str], seconds: float, *, sends_agent: bool = False) -> Result:
        """Run a command as a launch does, whatever allocation this runs in."""
        given = {name for name, _ in options_in(self._directives())}
        kept = [name for name, options in SITE_DEFAULTS.items() if given.isdisjoint(options)]
        argv = self._host.argv(["bash", "-c", _CLEAN, " ".join(kept), *words])
        sent = archive(agent_files()) if sends_agent else b""
        return self._programs.run(argv, stdin=sent, timeout=seconds)

    def _output(self, words: Sequence[str]) -> str:
        """What a command of Slurm prints. Raises UserError."""
        return self._commands.output(words, f"{words[0]} fails")
