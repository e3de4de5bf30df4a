"""From the flags of `drillyard image build` and `push` to a plan: everything that can be wrong is
found here, before anything is built."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.guarded_files import read_text
from drillyard.hardware import load_catalog
from drillyard.programs import Programs
from drillyard.provision.image_registry import tag_of
from drillyard.provision.images.base_rules import image_platform, require_base
from drillyard.provision.images.build_context import BuildContext, context_notices, read_context
from drillyard.provision.images.dockerfile import base_image, missing_sources
from drillyard.provision.images.image_commands import find_builder
from drillyard.provision.images.image_plan import (
    BUILDERS,
    CLOUD_BUILD,
    CLOUD_PLATFORM,
    LOCAL_BUILDERS,
    ImagePlan,
    cloud_place,
    dockerfile_of,
    plan_build,
    tagged,
)

_ARGUMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_VERSION = re.compile(r"\d+(\.\d+)*")
_LONGEST_BUILD = "2h"


@dataclass(frozen=True)
class BuildRequest:
    """The flags as they were given."""

    tag: str
    file: Path | None = None
    context: Path | None = None
    arguments: tuple[str, ...] = ()
    cluster: Path | None = None
    driver: str | None = None
    platform: str | None = None
    builder: str | None = None
    further: tuple[str, ...] = ()
    project: str | None = None
    region: str | None = None
    machine_type: str | None = None
    timeout: str | None = None
    is_async: bool = False


def prepare_build(request: BuildRequest, programs: Programs) -> tuple[ImagePlan, list[str]]:
    """The plan of the build, and what the user must know of it, a line each. Raises UserError."""
    arguments = _arguments(request.arguments)
    further = _further(request.further)
    if request.driver is not None and _VERSION.fullmatch(request.driver) is None:
        raise UserError(f"--driver {request.driver}: is not a version such as 570.124.06")
    builder = _builder(request, programs)
    directory = request.context or (request.file.parent if request.file else Path())
    context = read_context(directory, programs)
    image = tagged(request.tag, context)
    dockerfile = dockerfile_of(context, request.file)
    text = read_text(context.directory / dockerfile, errors="replace")
    base = base_image(text, arguments, dockerfile)
    _require_sources(dockerfile, text, context)
    cluster = None
    if request.cluster is not None:
        cluster = load_cluster_config(request.cluster, resolve_environment=False)
    facts = load_catalog(None if cluster is None else cluster.hardware)
    notices = require_base(base, dockerfile, cluster, facts, request.driver)
    platform = request.platform or image_platform(cluster, facts)
    cloud, flags = None, list[str]()
    if builder == CLOUD_BUILD:
        if platform != CLOUD_PLATFORM:
            raise UserError(
                f"{platform}: {CLOUD_BUILD} has machines of {CLOUD_PLATFORM} alone; build it with"
                f" --builder {' or '.join(LOCAL_BUILDERS)}"
            )
        cloud = cloud_place(image, request.project, request.region)
        flags = [f"--timeout={request.timeout or _LONGEST_BUILD}"]
        flags += [f"--machine-type={request.machine_type}"] if request.machine_type else []
    plan = plan_build(
        image,
        builder,
        base,
        dockerfile,
        context,
        arguments=arguments,
        platform=platform,
        further=further,
        cloud=cloud,
        cloud_flags=flags,
    )
    return plan, [*notices, *context_notices(context)]


def _require_sources(dockerfile: str, text: str, context: BuildContext) -> None:
    """Raise UserError with what the Dockerfile copies and the context does not have."""
    missing = [
        f"{dockerfile}:{line}: {source}: git has no such file below {context.directory}"
        + (", or it is left out" if (context.directory / source.lstrip("/")).exists() else "")
        for line, source in missing_sources(text, context.files)
    ]
    if missing:
        fix = "git add what is new; --context names another directory of the files"
        left_out = context_notices(replace(context, changed=()))
        raise UserError("\n".join([*missing, fix, *left_out]))


def local_builder(name: str | None, programs: Programs) -> str:
    """The builder whose images are pushed. Raises UserError for Cloud Build, which pushes itself,
    and for a name of none."""
    if name is not None and name not in LOCAL_BUILDERS:
        reason = "pushes what it builds" if name == CLOUD_BUILD else "is not known"
        raise UserError(f"--builder {name}: {reason}; give {', '.join(LOCAL_BUILDERS)}")
    return name or find_builder(programs)


def require_pushable(image: str, further: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments for the builder. Raises UserError for an image without a registry or a tag."""
    tag = tag_of(image)
    if ":" not in image.rpartition("/")[2]:
        raise UserError(
            f"--tag {image}: has no tag; `drillyard image build` printed it: {image}:TAG"
        )
    if "/" not in image:
        raise UserError(
            f"--tag {image}: names no registry, and {tag.registry} takes it from nobody; build"
            " REGISTRY/REPOSITORY/NAME"
        )
    return _further(further)


def _builder(request: BuildRequest, programs: Programs) -> str:
    if request.builder is not None and request.builder not in BUILDERS:
        raise UserError(f"--builder {request.builder}: is not known; give {', '.join(BUILDERS)}")
    builder = request.builder or find_builder(programs)
    given = {
        "--async": request.is_async,
        "--project": request.project,
        "--region": request.region,
        "--machine-type": request.machine_type,
        "--timeout": request.timeout,
    }
    foreign = [flag for flag, value in given.items() if value]
    if foreign and builder != CLOUD_BUILD:
        plural = "belongs" if len(foreign) == 1 else "belong"
        raise UserError(f"{', '.join(foreign)}: {plural} to --builder {CLOUD_BUILD}, not {builder}")
    return builder


def _arguments(given: tuple[str, ...]) -> dict[str, str]:
    for each in given:
        if _ARGUMENT.fullmatch(each) is None:
            raise UserError(f"--build-arg {each}: is not NAME=VALUE")
    return {name: value for name, _, value in (each.partition("=") for each in given)}


def _further(given: tuple[str, ...]) -> tuple[str, ...]:
    if given and not given[0].startswith("-"):
        raise UserError(
            f"{given[0]}: is not an option of a builder; the directory of the files is --context"
            f" {given[0]}, the Dockerfile --file"
        )
    return given
