"""`drillyard image build | push | logs`: container images, from a commit to a digest."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from drillyard.errors import UserError

WHAT, WHERE, CLOUD = "What is built", "The machines it is for", "Cloud Build"

Tag = Annotated[
    str,
    typer.Option(
        "--tag",
        "-t",
        metavar="IMAGE",
        help="The image's name, with its registry. Default for its tag: sha-COMMIT.",
    ),
]
Builder = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="docker, podman, buildah or cloud-build. Default: the first of them that is here.",
    ),
]
Further = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGUMENT", help="Further arguments for the builder."),
]
Write = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Set `image` of this cluster config to the digest, once pushed."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the commands, and stop.")]
Project = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Project that builds. Default: that of the registry.",
        rich_help_panel=CLOUD,
    ),
]
CloudRegion = Annotated[
    str | None,
    typer.Option(
        metavar="REGION",
        help="Region that builds. Default: that of the registry.",
        rich_help_panel=CLOUD,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(help="Build and push container images.", no_args_is_help=True)
    group.command()(build)
    group.command()(push)
    group.command()(logs)
    app.add_typer(group, name="image")


def build(
    tag: Tag,
    further: Further = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="DOCKERFILE",
            help="Default: docker/Dockerfile, or Dockerfile, of the context.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    context: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the files. Default: that of --file, or this one.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    build_arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--build-arg",
            metavar="NAME=VALUE",
            help="Value of an ARG of the Dockerfile; repeatable. No secrets: images keep them.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Cluster config whose machine and network the base must fit.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    driver: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="GPU driver of the nodes, as nvidia-smi shows it, which must run the base's CUDA.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(
            metavar="OS/ARCH",
            help="Default: the machine's, or linux/amd64.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    builder: Builder = None,
    write: Write = None,
    dry_run: DryRun = False,
    is_async: Annotated[
        bool,
        typer.Option(
            "--async",
            help="Print the build's id, and do not wait for its end.",
            rich_help_panel=CLOUD,
        ),
    ] = False,
    project: Project = None,
    region: CloudRegion = None,
    machine_type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Machine that builds, such as e2-highcpu-32.",
            rich_help_panel=CLOUD,
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Longest build; default: 2h.", rich_help_panel=CLOUD),
    ] = None,
) -> None:
    """Build an image from what git tracks in a directory, with docker, podman, buildah or Google
    Cloud Build, which pushes it as well.

    The image has its commit, version and date as labels. Files that differ from the commit, and
    those that are left out, are named. Standard output has the image, or the id of --async; what
    builders print is on standard error.
    """
    from drillyard.programs import Programs
    from drillyard.provision.images.cluster_image import require_writable
    from drillyard.provision.images.image_commands import build_image, follow_build
    from drillyard.provision.images.image_request import BuildRequest, prepare_build

    programs = Programs()
    request = BuildRequest(
        tag=tag,
        file=file,
        context=context,
        arguments=tuple(build_arguments or ()),
        cluster=cluster,
        driver=driver,
        platform=platform,
        builder=builder,
        further=tuple(further or ()),
        project=project,
        region=region,
        machine_type=machine_type,
        timeout=timeout,
        is_async=is_async,
    )
    plan, notices = prepare_build(request, programs)
    if write is not None and (plan.cloud is None or is_async):
        raise UserError(
            "--write: the digest is known once the image is pushed: `drillyard image push --write`,"
            " or --builder cloud-build without --async"
        )
    if write is not None:
        require_writable(write, plan.image)
    for notice in notices:
        print(f"warning: {notice}", file=sys.stderr)
    if dry_run:
        print(plan.text)
        return
    build_id = build_image(plan, programs)
    if build_id is None or plan.cloud is None:
        print(plan.image)
        print(
            f"push it: drillyard image push --tag {shlex.quote(plan.image)}"
            f" --builder {plan.builder}",
            file=sys.stderr,
        )
        return
    own = shlex.join(["drillyard", "image", "logs", build_id, *plan.cloud.flags])
    if is_async:
        print(build_id)
        print(f"follow it: {own}", file=sys.stderr)
        return
    print(f"build {build_id}; after Ctrl-C it goes on: {own}", file=sys.stderr)
    _print_image(follow_build(build_id, plan.cloud, programs), write)


def push(
    tag: Tag,
    further: Further = None,
    builder: Builder = None,
    write: Write = None,
    dry_run: DryRun = False,
) -> None:
    """Push an image that `image build` has built, and print the line of cluster.yaml that names it
    by its digest."""
    from drillyard.programs import Programs
    from drillyard.provision.images.cluster_image import require_writable
    from drillyard.provision.images.image_commands import push_image
    from drillyard.provision.images.image_plan import push_commands
    from drillyard.provision.images.image_request import local_builder, require_pushable

    programs = Programs()
    name = local_builder(builder, programs)
    arguments = require_pushable(tag, tuple(further or ()))
    if write is not None:
        require_writable(write, tag)
    if dry_run:
        print("\n".join(shlex.join(command) for command in push_commands(tag, name, arguments)))
        return
    _print_image(push_image(tag, name, arguments, programs), write)


def logs(
    build_id: Annotated[
        str, typer.Argument(metavar="ID", help="The build, as `image build --async` printed it.")
    ],
    project: Annotated[str, typer.Option(metavar="ID", help="Project that builds.")],
    region: Annotated[
        str, typer.Option(metavar="REGION", help="Region that builds; us-docker.pkg.dev: global.")
    ] = "global",
    write: Write = None,
) -> None:
    """Follow a build of Cloud Build to its end, and print the line of cluster.yaml that names its
    image by its digest."""
    from drillyard.programs import Programs
    from drillyard.provision.images.image_commands import follow_build
    from drillyard.provision.images.image_plan import CloudPlace

    _print_image(follow_build(build_id, CloudPlace(project, region), Programs()), write)


def _print_image(image: str, write: Path | None) -> None:
    from drillyard.provision.images.cluster_image import write_image

    print(f"image: {image}")
    if write is not None:
        write_image(write, image)
        print(f"{write}: written", file=sys.stderr)
