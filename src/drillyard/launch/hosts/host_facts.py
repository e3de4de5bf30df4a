"""Checks the facts that the hosts of a run report, before anything starts on any of them. Pure.

One error lists every problem of every host with its fix; hosts with the same problem share a line.
Clocks are compared among the hosts, never with the machine that launches: a host reads its clock
between the request and the answer, so a slow connection can hide a difference but cannot invent
one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drillyard.errors import UserError
from drillyard.formatting import first_few
from drillyard.hardware.machines import Machine
from drillyard.launch.agent.job import Job
from drillyard.launch.agent.protocol import NUM_PORTS
from drillyard.programs import Result, login_command
from drillyard.version import __version__

CLOCK_SECONDS = 2.0
"""Events of all hosts are ordered by their clocks, and certificates and file system leases depend
on them."""
LEAST_FREE_BYTES = 1 << 30
_SHOWN_HOSTS = 4


@dataclass(frozen=True)
class HostAnswer:
    """The answer of one host."""

    host: str
    result: Result | None
    error: str = ""
    """Reason why there is no result: no answer in time, no ssh here."""
    asked_at: float = 0.0
    answered_at: float = 0.0
    is_reached: bool = False
    """Whether there is no result although it answered: its login runs no command."""

    @property
    def stderr(self) -> str:
        return "" if self.result is None else self.result.stderr

    def parsed(self) -> dict[str, Any] | None:
        """The JSON object it printed, if it did."""
        if self.result is None or self.result.returncode != 0:
            return None
        try:
            reported = self.result.printed_json()
        except UserError:
            return None
        return reported if isinstance(reported, dict) else None


@dataclass(frozen=True)
class HostProblem:
    """What is wrong with a host, and what to do. `check`: the kind of fact it was found in."""

    host: str
    check: str
    text: str


def problem_lines(problems: Iterable[tuple[str, str]]) -> list[str]:
    """One line per problem, from pairs of a host and its problem: hosts with the same problem share
    it."""
    hosts_with: dict[str, list[str]] = {}
    for host, problem in problems:
        hosts_with.setdefault(problem, []).append(host)
    return [f"{first_few(hosts, _SHOWN_HOSTS)}: {problem}" for problem, hosts in hosts_with.items()]


def judge(
    answers: Sequence[HostAnswer],
    job: Job,
    image: str | None = None,
    machine: Machine | None = None,
) -> list[str]:
    """The problems to fix before the run can start, a line each. `machine`: what the cluster config
    says they are."""
    parsed = {answer.host: answer.parsed() for answer in answers}
    reported = {host: facts for host, facts in parsed.items() if facts is not None}
    problems = [
        (answer.host, no_answer_reason(answer)) for answer in answers if parsed[answer.host] is None
    ]
    for host, facts in reported.items():
        problems += [(host, each.text) for each in problems_of_host(host, facts, image, machine)]
        problems += [(host, text) for text in _problems_for_run(facts, job)]
    problems += [(each.host, each.text) for each in differences(reported)]
    problems += [(each.host, each.text) for each in clock_problems(answers, reported)]
    return problem_lines(problems)


def differences(reported: Mapping[str, Mapping[str, Any]]) -> Iterator[HostProblem]:
    """Hosts that differ from most in what all must have in common. `reported`: facts by host."""
    for check, what, value_of, advice in _COMPARED:
        values = {
            host: value
            for host, facts in reported.items()
            if (value := value_of(facts)) is not None
        }
        usual = statistics.mode(values.values()) if values else None
        for host, value in values.items():
            if value != usual:
                other = next(each for each in values if values[each] == usual)
                text = f"{what}: {value}, where {other} has {usual}; {advice}"
                yield HostProblem(host, check, text)


def no_answer_reason(answer: HostAnswer) -> str:
    """Reason why a host did not answer, in its own or ssh's text, and what to do."""
    if answer.result is None:
        return answer.error
    said = [
        line.strip()
        for line in (answer.result.stderr or answer.result.stdout).splitlines()
        if line.strip()
    ]
    text = said[-1] if said else f"exit code {answer.result.returncode}"
    if answer.result.unreachable:
        return f"cannot be reached: {text} (try: {login_command(answer.result.argv, answer.host)})"
    if answer.result.returncode == 127 and "python3" in text:
        return (
            "has no python3 on its PATH, which the agent needs: install it (any version from 3.9"
            " on, no packages)"
        )
    return f"the check failed there: {text}"


def problems_of_host(
    host: str, facts: Mapping[str, Any], image_name: str | None, machine: Machine | None
) -> Iterator[HostProblem]:
    """What is wrong with one host alone, whatever is to run there."""
    image, drillyard = facts.get("image"), facts.get("drillyard")
    if image and image.get("error"):
        yield HostProblem(host, "image", f"image {image_name}: {image['error']}")
    elif drillyard and drillyard.get("version") is None:
        text = (
            f"{drillyard['python']} cannot run drillyard: {drillyard.get('error')}; install"
            f" drillyard {__version__} there, or name another `python` in the cluster config"
        )
        yield HostProblem(host, "drillyard", text)
    elif drillyard and drillyard["version"].split()[-1:] != [__version__]:
        has = f"{drillyard['python']} has {drillyard['version']}"
        text = f"{has}, and this machine launches with {__version__}: install the same there"
        yield HostProblem(host, "drillyard", text)
    gpus = facts.get("gpus") or 0
    if gpus and facts.get("gpu_models") is None:
        text = "nvidia-smi fails, and there are GPUs: the driver must work before anything can run"
        yield HostProblem(host, "gpus", text)
    elif machine is not None and gpus != machine.num_accelerators:
        has = f"machine {machine.name} has {machine.num_accelerators}"
        text = f"{gpus} GPUs, and {has}: find the missing, or name what it is"
        yield HostProblem(host, "gpus", text)
    directory = facts.get("directory") or {}
    path, free = directory.get("path"), directory.get("free_bytes")
    if directory.get("error"):
        text = (
            f"{path}: cannot be written: {directory['error']}; mount it there for writing, give"
            " this user the right, or name another storage.directory"
        )
        yield HostProblem(host, "storage", text)
    elif free is not None and free < LEAST_FREE_BYTES:
        text = (
            f"{path}: only {free / (1 << 20):.0f} MiB are free, and checkpoints need more: make"
            " room"
        )
        yield HostProblem(host, "storage", text)


def _problems_for_run(facts: Mapping[str, Any], job: Job) -> Iterator[str]:
    """What on a host is in the way of one run."""
    if facts.get("unsafe"):
        yield facts["unsafe"]
    if facts.get("ports_free") == []:
        ports = f"ports {job.port} to {job.port + NUM_PORTS - 1}"
        yield (
            f"{ports}, on which the run's agents meet, are all taken: end the program that listens"
            " there (ss -ltnp)"
        )
    if facts.get("agents"):
        yield (
            f"{job.run} is still running there: drillyard runs cancel {job.run}, or launch"
            " --replace"
        )
    for run in facts.get("runs") or []:
        # Runs without GPUs share a machine as any programs do.
        if run["launch_directory"] != job.launch_directory and facts.get("gpus"):
            active = (
                f"run {run['run']} of cluster {run['cluster']} is active there and has the GPUs"
            )
            yield f"{active}: wait for its end, or drillyard runs cancel {run['run']}"


def gpu_names(facts: Mapping[str, Any]) -> str:
    """How many GPUs of which names a host has."""
    names = sorted(Counter(facts.get("gpu_models") or []).items())
    return (
        ", ".join(f"{count} x {name}" for name, count in names)
        or f"{facts.get('gpus') or 'no'} GPUs"
    )


_COMPARED: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Any], str], ...] = (
    ("gpus", "GPUs", gpu_names, "a run needs the same on all"),
    ("image", "image", lambda facts: (facts.get("image") or {}).get("id"), "pull the same on all"),
    (
        "user",
        "user id",
        lambda facts: facts.get("user"),
        "the agents of a run must be one user's, or they cannot read its directory",
    ),
)
"""Facts that the hosts must have in common: their check and title, how they are found in a host's
facts, and what to do."""


def clock_problems(
    answers: Sequence[HostAnswer], reported: Mapping[str, Mapping[str, Any]]
) -> Iterator[HostProblem]:
    """Compare the hosts' clocks, each known relative to this machine's within an interval, with the
    median."""
    times = {answer.host: (answer.asked_at, answer.answered_at) for answer in answers}
    ahead = {
        host: (
            facts["clock_at_end"] - times[host][1],
            facts["clock"] - times[host][0],
        )
        for host, facts in reported.items()
        if "clock" in facts and "clock_at_end" in facts
    }
    if len(ahead) < 2:
        return
    middles = {host: (low + high) / 2 for host, (low, high) in ahead.items()}
    usual = statistics.median_low(middles.values())
    least, most = ahead[next(host for host in middles if middles[host] == usual)]
    for host, (low, high) in ahead.items():
        apart = max(low - most, least - high)
        if apart > CLOCK_SECONDS:
            way = "ahead of" if low > most else "behind"
            text = (
                f"its clock is {apart:.1f} s or more {way} most others: set it with chrony or ntpd"
                " (timedatectl)"
            )
            yield HostProblem(host, "clocks", text)


def unshared_text(directory: str, head: str) -> str:
    """What is wrong where a host does not see what the head host wrote, and what to do."""
    return (
        f"{directory} is not the directory that {head} sees under that path: put `output` or"
        " storage.directory on storage that all hosts mount at the same path"
    )


def not_shared(answers: Sequence[HostAnswer], directory: str, head: str) -> list[str]:
    """The problems of hosts that do not see what the head host wrote, or cannot be asked."""
    unseen = unshared_text(directory, head)
    return problem_lines(
        (answer.host, no_answer_reason(answer) if facts is None else unseen)
        for answer in answers
        if (facts := answer.parsed()) is None or not facts["directory"]["seen"]
    )
