"""Cluster config of the user: `cluster.yaml`, where a run config is trained.

`ClusterConfig` has the settings that every platform shares; the model that files are checked
against (`cluster_model`) adds a section for each platform of the registry (`platforms.py`).
`cluster_problems` compares a config with its platform's facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, PositiveInt, create_model
from pydantic.fields import FieldInfo

from drillyard.allowed_values import Allowed
from drillyard.config.creation import Consumption, CreationConfig, ShortName
from drillyard.config.platforms import PlatformFacts, PlatformSection, by_use, platforms
from drillyard.config.problems import Path, Problem
from drillyard.config.strict_model import LocalFile, StrictModel, VariableName
from drillyard.errors import ConfigError

Mount = Annotated[
    str,
    Field(pattern=r"^/[^:]*(:/[^:]*)?(:ro)?$"),
    Allowed("a directory, and where it differs its path in the container: /data or /scratch:/tmp"),
]
ProjectId = Annotated[
    str, Field(pattern=r"[^0-9]"), Allowed("the id of a project such as my-project, not its number")
]
Section = TypeVar("Section", bound=PlatformSection)


class Location(StrictModel):
    """Location of a cloud's machines, and the project that pays for them."""

    project: ProjectId | None = Field(
        default=None, description="Id of the project that pays for the machines."
    )
    region: str | None = Field(default=None, description="Region, such as us-central1.")
    zone: str | None = Field(default=None, description="Zone, such as us-central1-b.")


class StorageConfig(StrictModel):
    """Storage of run directories and data that every node reads and writes."""

    bucket: str | None = Field(
        default=None, description="Object storage bucket, without gs:// or s3://."
    )
    directory: str | None = Field(
        default=None, description="Shared directory, at the same path on every node."
    )


class ClusterConfig(StrictModel):
    """A cluster: where to train. `run.yaml` says what."""

    name: ShortName = Field(
        description=(
            "Name of the cluster: at most 40 lower case letters, digits and '-', beginning with a"
            " letter."
        ),
        examples=["my-cluster"],
    )
    platform: str = Field(description="Where the run is launched.", examples=["local"])
    location: Location | None = Field(
        default=None, description="Project, region and zone of a cloud platform."
    )
    machine: str | None = Field(default=None, description="Machine type, such as a4-highgpu-8g.")
    nodes: PositiveInt = Field(default=1, description="Number of machines.")
    hardware: LocalFile | None = Field(
        default=None,
        description=(
            "File with your own hardware and prices, which win over the built-in ones; a relative"
            " path is relative to this file."
        ),
    )
    consumption: Consumption | None = Field(
        default=None,
        description=(
            "How capacity is bought: on-demand, reservation, spot, flex-start, flex-start-queued or"
            " calendar."
        ),
    )
    reservation: str | None = Field(
        default=None,
        description="Name of the reservation, for consumption: reservation or calendar.",
    )
    storage: StorageConfig = Field(
        default=StorageConfig(), description="Storage that every node shares."
    )
    image: str | None = Field(default=None, description="Container image of the run.")
    mounts: list[Mount] = Field(
        default=[],
        description=(
            "Further directories of the nodes for the container: [/data, /scratch:/tmp/scratch]."
        ),
    )
    python: str | None = Field(
        default=None,
        description=(
            "Python interpreter on the nodes, or in the image, that has drillyard; default: python3"
            " in an image, else .venv/bin/python of the project's directory."
        ),
    )
    processes_per_node: PositiveInt | None = Field(
        default=None, description="Ranks per node; default: the accelerators of `machine`."
    )
    environment: dict[VariableName, str] = Field(
        default={},
        description="Environment variables of every rank; they win over the network stack's.",
    )
    network_stack: Literal["tcpx", "tcpxo", "gib", "infiniband", "efa", "ethernet"] | None = Field(
        default=None,
        description="How NCCL reaches the data NICs; default: the machine's own stack.",
    )

    cluster: CreationConfig | None = Field(
        default=None,
        description="What only `drillyard cluster` needs, which creates the cluster.",
    )

    @property
    def section(self) -> PlatformSection:
        """The platform's own section, with defaults where it is not given."""
        facts = platforms()[self.platform]
        given: PlatformSection | None = getattr(self, facts.section_key or self.platform, None)
        return given or facts.section()

    def section_as(self, model: type[Section]) -> Section:
        """`section` with its type: that of a platform whose section is a `model`."""
        assert isinstance(self.section, model)
        return self.section

    @property
    def cloud(self) -> str | None:
        """The cloud whose machines and quotas the platform uses; None: any or none."""
        return platforms()[self.platform].cloud

    @property
    def has_own_machines(self) -> bool:
        """Whether the machines exist already, and no cloud creates them: no quota is needed,
        nothing is bought."""
        machines = platforms()[self.platform].machines
        return machines == "own" or (
            machines == "own or bought" and self.location is None and self.consumption is None
        )


@cache
def cluster_model() -> type[ClusterConfig]:
    """`ClusterConfig` with the names of all platforms and a section for each that has settings of
    its own.

    Plug-ins add platforms, so the model is built when the first cluster config is loaded.
    """
    names = tuple(platforms())
    launched, estimated = by_use()
    description = f"What runs the job: {', '.join(launched[:-1])} or {launched[-1]}."
    if estimated:
        description += f" Without a launcher: {', '.join(estimated)}."
    return with_sections(
        platforms(), platform=(Literal[names], Field(description=description, examples=["local"]))
    )


def with_sections(facts: Mapping[str, PlatformFacts], **fields: Any) -> type[ClusterConfig]:
    """`ClusterConfig` with further `fields` and a section for each platform of `facts` that has
    one."""
    named: dict[str, list[str]] = {}
    for name, each in facts.items():
        if each.section is not PlatformSection:
            named.setdefault(each.section_key or name, []).append(name)
    for key, users in named.items():
        section, plural = facts[users[0]].section, "s" if len(users) > 1 else ""
        description = f"Settings of platform{plural} {' and '.join(users)}."
        fields[key] = (section | None, Field(default=None, description=description))
    return create_model(
        "ClusterConfig", __base__=ClusterConfig, __doc__=ClusterConfig.__doc__, **fields
    )


def find_setting(model: type[BaseModel], path: Path) -> FieldInfo | None:
    """The field of a model, or of its sections, at `path`; None where there is none."""
    key, *rest = path
    field = model.model_fields.get(str(key))
    if field is None or not rest:
        return field
    kinds = (field.annotation, *get_args(field.annotation))
    section = next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None
    )
    return None if section is None else find_setting(section, tuple(rest))


_EVERYWHERE = (
    "name",
    "platform",
    "nodes",
    "hardware",
    "processes_per_node",
    "environment",
    "network_stack",
)


def completed(config: ClusterConfig) -> ClusterConfig:
    """The config with what its platform fills in (`PlatformFacts.completed`)."""
    function = platforms()[config.platform].completed
    if not function:
        return config
    made: ClusterConfig = resolve_name(function)(config)
    made._origin = config._origin
    return made


def on_pool(
    config: ClusterConfig, pool: str | None = None, nodes: int | None = None
) -> ClusterConfig:
    """The config as a run on one of its pools needs it: with the pool's machine, nodes (or
    `nodes`), way of buying, reservation, zone and queue as the file's own.

    `pool` is a name of `drillyard cluster plan`; None: the pool whose queue the config names, else
    the first, whose config stays as it is. Raises ConfigError for a pool that the config does not
    have, and for what the pool lacks.
    """
    function = platforms()[config.platform].on_pool
    if not function:
        if pool is not None:
            able = ", ".join(name for name, each in platforms().items() if each.on_pool)
            raise ConfigError(
                f"--pool {pool}: platform {config.platform} has no pools; it belongs to {able}"
            )
        return config
    made: ClusterConfig = resolve_name(function)(config, pool, nodes)
    return made


def cluster_problems(config: ClusterConfig) -> list[Problem]:
    """List what the config's platform lacks, does not know or cannot do."""
    creation = [] if config.cluster is None else [*config.cluster.problems()]
    head = None if config.cluster is None else config.cluster.head
    has_head = platforms()[config.platform].has_head
    if not has_head and head not in (None, CreationConfig().head):
        message = f"only a Slurm cluster has it, and platform is {config.platform}: remove it"
        creation.append(Problem(("cluster", "head"), message))
    return [*_fields(config), *_capacity(config), *_nodes(config), *creation]


def _fields(config: ClusterConfig) -> Iterator[Problem]:
    facts = platforms()[config.platform]
    for name in facts.required:
        path = tuple(name.split("."))
        if _value(config, path) is None:
            meaning = getattr(find_setting(type(config), path), "description", None) or ""
            yield Problem(path, f"missing: platform {config.platform} needs it. {meaning}")
    known = {*_EVERYWHERE, *facts.optional, *(name.split(".")[0] for name in facts.required)}
    for name, field in type(config).model_fields.items():
        if name not in known and getattr(config, name) != field.get_default():
            paths = {
                platform: (*each.optional, *each.required) for platform, each in platforms().items()
            }
            others = [
                platform
                for platform, its in paths.items()
                if name in {path.split(".")[0] for path in its}
            ]
            yield Problem(
                (name,),
                f"platform {config.platform} has no such setting; it belongs to"
                f" {', '.join(others)}",
            )


def _capacity(config: ClusterConfig) -> Iterator[Problem]:
    facts = platforms()[config.platform]
    bought = config.consumption
    if bought is not None and facts.consumption and bought not in facts.consumption:
        offered = ", ".join(facts.consumption)
        yield Problem(
            ("consumption",), f"found '{bought}'; platform {config.platform} allows {offered}"
        )
    if bought in ("reservation", "calendar") and not config.reservation:
        yield Problem(
            ("reservation",), f"missing: consumption {bought} needs the name of the reservation"
        )
    if config.reservation is not None and bought not in ("reservation", "calendar"):
        yield Problem(
            ("reservation",),
            "only consumption reservation or calendar uses it; consumption is"
            f" {bought or 'not given'}",
            depends_on=(("consumption",),),
        )
    if (
        facts.machines == "own or bought"
        and config.machine is not None
        and not config.has_own_machines
    ):
        for path in (("location", "project"), ("location", "zone"), ("consumption",)):
            if _value(config, path) is None:
                message = (
                    "missing: a cloud needs it; of machines of one's own give neither location nor"
                    " consumption"
                )
                yield Problem(path, message)


def _nodes(config: ClusterConfig) -> Iterator[Problem]:
    if (limit := platforms()[config.platform].max_nodes) is not None and config.nodes > limit:
        yield Problem(
            ("nodes",),
            f"found {config.nodes}; platform {config.platform} is this machine alone: {limit}",
        )
    if (
        getattr(config, platforms()[config.platform].section_key or config.platform, None)
        is not None
    ):
        yield from config.section.problems(config.nodes)


def _value(config: ClusterConfig, path: Path) -> object:
    value: object = config
    for part in path:
        value = getattr(value, str(part), None)
    return value
