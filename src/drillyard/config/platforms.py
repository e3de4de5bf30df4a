"""The registry of platforms: what `platform` of a cluster config may be, and which class launches
there.

`PlatformFacts` describe a platform: what its config needs, how its machines are bought, how its
nodes see network and storage. A launcher's facts are in its own package; those of platforms without
a launcher are beside their plans, in `provision`. A distribution adds a launcher by an entry point
`drillyard.launchers` under the platform's name: a subclass of `drillyard.launch.launcher.Launcher`
with `facts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from drillyard.allowed_values import Allowed
from drillyard.config.problems import Problem
from drillyard.config.strict_model import StrictModel
from drillyard.errors import ConfigError
from drillyard.plugins import load_plugins

# ssh reads a name that begins with "-" as an option, and some options run programs.
Login = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+@\\-]*$"),
    Allowed("a login, which begins with a letter or digit"),
]
HostAddress = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*$"),
    Allowed("a host's name or address"),
]
SshHost = Annotated[
    str,
    Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.+@\\-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*$"),
    Allowed("[USER@]HOST, a host's name or address"),
]

THIS_MACHINE = "local"
"""The platform of a new cluster config."""


class PlatformSection(StrictModel):
    """Base of a platform's own settings: the section of cluster.yaml that has the platform's
    name."""

    @property
    def project_directory(self) -> str | None:
        """The project's directory on the cluster; None: the same path as here."""
        return None

    @property
    def head_host(self) -> str:
        """The host on which run directories can be read, for people; empty: this machine."""
        return ""

    @property
    def mounts_network_libraries(self) -> bool | None:
        """Whether pods get the network stack's libraries from their node; None: where the machine's
        nodes have them."""
        return False

    @property
    def limit_seconds(self) -> int | None:
        """The time limit of one job (`time_limit`), after which the run continues in another
        job."""
        return None

    def problems(self, nodes: int) -> Iterator[Problem]:
        """Contradictions between this section and the cluster's number of nodes."""
        yield from ()


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a launcher; a config that asks for more is refused with the launchers that
    have them."""

    multi_node: bool = True
    queue: bool = False
    """Runs of a sweep wait for nodes; without a queue all would start at once."""
    image: bool = False
    sync: bool = False
    """Copies the working directory to the nodes (`--sync`)."""
    dependency: bool = False
    """Starts a run once another has succeeded (`--after`)."""
    exclude: bool = False
    """Keeps a run off named nodes (`--exclude`)."""


@dataclass(frozen=True)
class PlatformFacts:
    """Facts that hold for every cluster of a platform."""

    required: tuple[str, ...] = ()
    """Settings of cluster.yaml that must be given."""
    optional: tuple[str, ...] = ()
    """Settings that may be given, in addition to those of every platform."""
    section: type[PlatformSection] = PlatformSection
    """The model of the platform's section; PlatformSection itself: there is none."""
    section_key: str = ""
    """Key of the section in cluster.yaml; empty: the platform's name."""
    consumption: tuple[str, ...] = ()
    """Ways to buy capacity."""
    max_nodes: int | None = None
    cloud: str | None = None
    """The cloud whose machines and quotas the platform uses; None: any or none."""
    machines: Literal["own", "own or bought", "bought"] = "bought"
    is_this_machine: bool = False
    in_pods: bool = False
    """Containers see the network as GKE's pods do: Google's installers mount libraries below
    /usr/local."""
    has_prolog: bool = False
    """The scheduler's prolog starts the daemon that a network stack needs on hosts, one per job."""
    bucket_mount: str | None = None
    """The directory below which nodes see storage.bucket; None: nodes share a file system."""
    capabilities: Capabilities = Capabilities()
    completed: str = ""
    """The `module:name` of a function `(ClusterConfig) -> ClusterConfig` that fills in what a file
    leaves out and the rest of it decides, before the config is checked; empty: nothing."""
    on_pool: str = ""
    """The `module:name` of a function `(ClusterConfig, pool, nodes) -> ClusterConfig`: the config
    as a run on a pool needs it (`config/cluster.py`); empty: a cluster has no pools."""
    provisioner: str = ""
    """The `module:name` of the function that plans a cluster (`provision/provisioner.py`); empty:
    `drillyard cluster` cannot create one."""
    provision_rules: str = ""
    """The `module:name` of a function `(ClusterConfig, Catalog) -> problems`: what of a config,
    also of one that lacks settings, cannot be created."""
    instead_of_provisioning: str = "runs start there with `drillyard launch`"
    """What to do where `drillyard cluster` cannot create a cluster of the platform."""
    instead_of_launching: str = ""
    """What to do where the platform has no launcher; `{file}` becomes the cluster config."""
    cluster_check: str = ""
    """The `module:name` of a function (`launch/cluster_check.py`) with which `drillyard cluster
    status` looks at all nodes of a cluster that exists; empty: it cannot."""
    launcher: str | type[Any] = ""
    """The launcher class, or its `module:name`; empty: nothing can be launched there yet."""


_BUILT_IN: dict[str, str | PlatformFacts] = {
    "local": "drillyard.launch.hosts.config:LOCAL",
    "ssh": "drillyard.launch.hosts.config:SSH",
    "slurm": "drillyard.launch.slurm.config:SLURM",
    "kubernetes": "drillyard.launch.kubernetes.config:KUBERNETES",
    "gke": "drillyard.launch.kubernetes.config:GKE",
    "vertex": "drillyard.launch.vertex.config:VERTEX",
    "gce": "drillyard.provision.gce.config:GCE",
    "nebius": "drillyard.provision.nebius.config:NEBIUS",
}
"""Facts by platform, or the `module:name` that has those of a launcher."""


@cache
def platforms() -> dict[str, PlatformFacts]:
    """The facts of every platform by name: built-in ones, then plug-ins."""
    plugins = load_plugins(
        "drillyard.launchers", "drillyard.launch.launcher:Launcher", tuple(_BUILT_IN), _why_unusable
    )
    return {
        **{
            name: resolve_name(row) if isinstance(row, str) else row
            for name, row in _BUILT_IN.items()
        },
        **{name: replace(found.facts, launcher=found) for name, found in plugins.items()},
    }


def by_use() -> tuple[list[str], list[str]]:
    """The platforms with a launcher, and those that can only be created or estimated."""
    launched = [name for name, facts in platforms().items() if facts.launcher]
    return launched, [name for name in platforms() if name not in launched]


def _why_unusable(name: str, launcher: Any) -> str | None:
    """Say what would break the model of cluster configs, or every later use of the facts. Other
    errors are raised."""
    # Resolved by name, as launchers are: cluster.py builds its model from this registry.
    cluster: Any = resolve_name("drillyard.config.cluster")
    facts = launcher.facts
    if not isinstance(facts, PlatformFacts):
        return "its `facts` are no PlatformFacts"
    if re.fullmatch("[a-z][a-z0-9_-]*", name) is None:
        return "a platform's name has lower-case letters, digits, - and _, and begins with a letter"
    if name in cluster.ClusterConfig.model_fields or hasattr(cluster.ClusterConfig, name):
        return "the name is a key of cluster.yaml that every platform has, or reserved"
    for fact, kind in get_type_hints(PlatformFacts).items():
        try:
            TypeAdapter(kind).validate_python(getattr(facts, fact), strict=True)
        except ValidationError:
            return (
                f"facts.{fact} is {getattr(facts, fact)!r}; needed is"
                f" {PlatformFacts.__annotations__[fact]}"
            )
    model = cluster.with_sections({name: facts})
    model.model_json_schema()
    for setting in (*facts.required, *facts.optional):
        if cluster.find_setting(model, tuple(setting.split("."))) is None:
            return f"facts name {setting}, which is no setting of cluster.yaml"
    if name not in {setting.split(".")[0] for setting in facts.required}:
        if unset := [
            key for key, field in facts.section.model_fields.items() if field.is_required()
        ]:
            return f"facts.required must name {name}.{unset[0]}, which has no default"
        facts.section()
    return None


def require_capability(platform: str, capability: str, option: str) -> None:
    """Raise ConfigError where the platform's launcher lacks what `option` needs; it names those
    that have it."""
    assert capability in {each.name for each in fields(Capabilities)}, capability
    if not getattr(platforms()[platform].capabilities, capability):
        able = [
            name
            for name, each in platforms().items()
            if each.launcher and getattr(each.capabilities, capability)
        ]
        raise ConfigError(
            f"{option}: platform {platform} cannot do that ({capability}); these can:"
            f" {', '.join(able)}"
        )
