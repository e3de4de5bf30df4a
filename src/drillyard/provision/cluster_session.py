"""What `up` and `down` share: the options of a command, the parts of other modules that it calls,
and a session, which holds the state's lock around an initialised Terraform."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from drillyard.errors import UserError
from drillyard.provision.clouds import cloud_of
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.existing_objects import ComparedCluster
from drillyard.provision.google.endpoints import require_terraform_endpoints
from drillyard.provision.made_hosts import MadeHost
from drillyard.provision.node_request import Ask
from drillyard.provision.progress import print_progress
from drillyard.provision.provisioner import PlannedCluster
from drillyard.provision.running_command import Limits
from drillyard.provision.state_bucket import StateBucket
from drillyard.provision.state_lock import HeldLock, state_lock
from drillyard.provision.terraform_engine import Terraform, working_directory
from drillyard.provision.terraform_program import (
    TerraformProgram,
    find_terraform,
    minimum_version,
)


def ask_terminal(question: str) -> bool:
    """Ask on the terminal. Raises UserError where there is none to ask on."""
    if not sys.stdin.isatty():
        raise UserError(f"{question}\nThere is no terminal to ask on: give --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@dataclass(frozen=True)
class Request:
    """One `up` or `down`. `command`: what the user repeats, without --yes; `down_command`: what
    removes the cluster."""

    plan: ClusterPlan
    command: str
    down_command: str
    yes: bool = False
    unlock: str | None = None
    """Id of another's lock that is to be released."""
    report: Callable[[str], None] = print_progress
    ask: Callable[[str], bool] = ask_terminal
    limits: Limits = field(default_factory=Limits)

    def confirm(self, question: str) -> None:
        """Ask, unless --yes was given. Raises UserError where the answer is no."""
        if not self.yes and not self.ask(question):
            raise UserError("Nothing was changed.")


def command_line(*words: str) -> str:
    """The command to repeat, as it is typed."""
    return shlex.join(["drillyard", "cluster", *words])


@dataclass(frozen=True)
class Session:
    """An initialised Terraform under the lock. `require_lock` raises UserError where the lock was
    released by somebody."""

    request: Request
    terraform: Terraform
    bucket: StateBucket
    require_lock: Callable[[], None]


def terraform_program(plan: ClusterPlan) -> TerraformProgram:
    """The program that the plan needs. Raises UserError where it is missing or too old, or cannot
    find Google's services."""
    require_terraform_endpoints()
    return find_terraform(minimum_version(plan.terraform))


@contextlib.contextmanager
def session(request: Request, program: TerraformProgram) -> Iterator[Session]:
    """Lock the state, whose bucket is there, and initialise Terraform."""
    plan = request.plan
    cloud = cloud_of(plan)
    bucket = cloud.state_bucket(plan)
    with held_state(request, bucket) as (require_lock, _):
        terraform = Terraform(
            program,
            working_directory(plan.project, plan.name),
            project=plan.project,
            command=request.command,
            report=request.report,
            limits=request.limits,
            environment=cloud.provider_environment(),
            kinds=cloud.error_kinds,
        )
        version = ".".join(map(str, program.version))
        request.report(f"{program.name} {version}: init")
        bucket.begin_state(version)
        terraform.init(plan.terraform, bucket.backend())
        yield Session(request, terraform, bucket, require_lock)


@contextlib.contextmanager
def held_state(
    request: Request, bucket: StateBucket
) -> Iterator[tuple[Callable[[], None], list[HeldLock]]]:
    """Hold the lock of the state; gives `require_lock` (`Session`), and the locks of processes of
    this machine that died and were released."""
    released: list[HeldLock] = []

    def release_dead(held: HeldLock) -> bool:
        question = f"The state is locked by {held.text}, which has died. Release its lock?"
        if not request.yes and not request.ask(question):
            return False
        request.report(f"released the lock of {held.text}, which has died")
        released.append(held)
        return True

    with state_lock(
        bucket, request.command, unlock=request.unlock, release_dead=release_dead
    ) as require_lock:
        yield require_lock, released


@dataclass(frozen=True)
class Stages:
    """What other parts of provisioning do for `up` and `down`; tests put their own in. A context is
    a name in the kubeconfig."""

    check_project: Callable[[ClusterPlan], Sequence[Any]]
    """Findings with `level` (error, warning, unknown), `what` and `fix`."""
    find_leaks: Callable[[ClusterPlan, frozenset[str]], Any]
    """A report with `text` and `exit_code`."""
    image_digest: Callable[[str], str]
    """What the registry says of an image with its tag: `sha256:...`."""
    require_programs: Callable[[ClusterPlan], None]
    write_context: Callable[[ClusterPlan, Mapping[str, Any]], str]
    """Writes the context of the cluster with these attributes; its name."""
    remove_context: Callable[[ClusterPlan], None]
    compare_existing: Callable[[ClusterPlan, str | None], ComparedCluster]
    install_releases: Callable[[ClusterPlan, str | None], None]
    write_secret: Callable[[str, str], str]
    """Writes the value of an environment variable into the cluster; SECRET/KEY."""
    write_login: Callable[[ClusterPlan, Sequence[MadeHost]], Path]
    """Writes the ssh configuration of the hosts; its path."""
    remove_login: Callable[[ClusterPlan], None]
    node_request: Ask
    running_on_hosts: Callable[[ClusterPlan, Sequence[MadeHost]], Sequence[str]]
    """Raises UnreachableError where that is not known."""
    running_jobs: Callable[[ClusterPlan], Sequence[str]]
    """Jobs of a service, such as Vertex AI, or of Slurm. Raises UnreachableError where that is not
    known."""
    login_settings: Callable[[ClusterPlan], Mapping[str, Any]]
    """What `launch` needs of a Slurm cluster, with the user's login. Raises UserError where nobody
    knows that."""
    has_image: Callable[[ClusterPlan], bool]
    """Whether the image of a Slurm cluster's machines is there already."""
    remove_left: Callable[[ClusterPlan, Collection[str]], Sequence[str]]
    """Removes what Slurm's controller and image builds leave behind, of some kinds; what it was."""
    running_workloads: Callable[[str], Sequence[Any]]
    delete_workloads: Callable[[str], Sequence[str] | None]
    """The disks that stay."""


_IN_KUBERNETES = "drillyard.provision.kubernetes_stage"
_ON_HOSTS = "drillyard.provision.hosts_stage"
_OF_JOBS = "drillyard.provision.jobs_stage"
_ON_SLURM = "drillyard.provision.slurm_stage"


def _room_of(plan: ClusterPlan) -> str:
    """The module of what runs are on."""
    if plan.job_service is not None:
        return _OF_JOBS
    if plan.toolkit is not None:
        return _ON_SLURM
    return _IN_KUBERNETES if plan.login is None else _ON_HOSTS


def real_stages(planned: PlannedCluster) -> Stages:
    """The services of the cloud and of the cluster's Kubernetes, for a plan and its facts. Each
    module is imported when its first function is called."""
    hosts = "drillyard.provision.made_hosts"

    def lazy(module: str, name: str) -> Callable[..., Any]:
        return lambda *arguments: resolve_name(f"{module}:{name}")(*arguments)

    def write_secret(context: str, name: str) -> str:
        values = [each.values for each in planned.plan.releases if "namespaces" in each.values]
        namespaces = [each["name"] for each in values[0]["namespaces"]]
        return str(lazy(_IN_KUBERNETES, "write_secret")(context, namespaces, name))

    return Stages(
        check_project=lambda plan: cloud_of(plan).check_project(plan),
        find_leaks=lambda plan, owned: cloud_of(plan).find_leaks(plan, owned, planned.facts),
        write_secret=write_secret,
        image_digest=lazy("drillyard.provision.image_registry", "image_digest"),
        require_programs=lazy(_room_of(planned.plan), "require_programs"),
        write_login=lazy(hosts, "write_login"),
        remove_login=lazy(hosts, "remove_login"),
        node_request=lazy("drillyard.provision.google.granted_nodes", "node_request"),
        running_on_hosts=lazy(_ON_HOSTS, "running_on_hosts"),
        running_jobs=lazy(_room_of(planned.plan), "running_jobs"),
        login_settings=lazy(_ON_SLURM, "login_settings"),
        has_image=lazy(_ON_SLURM, "has_image"),
        remove_left=lazy(_ON_SLURM, "remove_left"),
        **{
            name: lazy(_IN_KUBERNETES, name)
            for name in (
                "write_context",
                "remove_context",
                "compare_existing",
                "install_releases",
                "running_workloads",
                "delete_workloads",
            )
        },
    )
