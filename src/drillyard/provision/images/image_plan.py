"""What a build of an image executes, as a value: the commands of docker, podman, buildah or Cloud
Build, in a temporary directory that has the files of the build.

No time of the build is in an image. docker sets times that are later than the commit's to the
commit's (https://github.com/moby/buildkit/blob/master/docs/build-repro.md), and its attestations,
which carry the build's, are off. podman and buildah set all times to one (`--timestamp` of
buildah-build(1)), which is the same for every commit, and get the labels as a last instruction:
they take a kept step as it is, and one with another commit's time or labels would give other bytes
than a build without it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drillyard.errors import UserError
from drillyard.provision.image_registry import tag_of
from drillyard.provision.images.build_context import BuildContext
from drillyard.provision.images.dockerfile import BaseImage

CLOUD_BUILD, CLOUD_PLATFORM = "cloud-build", "linux/amd64"
LOCAL_BUILDERS = ("docker", "podman", "buildah")
BUILDERS = (*LOCAL_BUILDERS, CLOUD_BUILD)
CONTEXT, ARCHIVE, CLOUD_CONFIG = "context", "context.tar.gz", "cloudbuild.json"
LABELS = "labels"
DIGEST_FILE = "digest"
FILE_EPOCH = 315532800
"""1980-01-01, the earliest time that ZIP files have; that of docker/Dockerfile."""
_CLOUD_DOCKER = "gcr.io/cloud-builders/docker"
_SPECIAL, _ESCAPED = re.compile(r'["\\$]'), r"\\\g<0>"
_PLUGIN_HINT = (
    "docker builds with its plugin buildx, which `docker buildx version` shows; --builder podman"
    " and --builder buildah need none"
)


@dataclass(frozen=True)
class ImagePlan:
    """One build: `image` with its tag, the image it starts from, its files and the commands.

    `files`: what else is in the temporary directory, by name.
    """

    image: str
    builder: str
    base: BaseImage
    dockerfile: str
    context: BuildContext
    commands: tuple[tuple[str, ...], ...]
    files: Mapping[str, str]
    cloud: CloudPlace | None = None

    @property
    def text(self) -> str:
        """The plan for a person: what goes in, and the commands."""
        context = self.context
        packed = ARCHIVE if self.builder == CLOUD_BUILD else f"{CONTEXT}/"
        lines = [
            f"# image:   {self.image}",
            f"# base:    {self.base.image} ({self.dockerfile}:{self.base.line})",
            f"# commit:  {context.revision} of {source_date(context)}",
            f"# context: {len(context.files)} files of {context.directory}, which are {packed} in"
            " the directory of the commands",
        ]
        for name, content in self.files.items():
            lines += [f"# {name}:", *(f"#   {line}" for line in content.splitlines())]
        return "\n".join([*lines, *(shlex.join(command) for command in self.commands)])


@dataclass(frozen=True)
class CloudPlace:
    """Where Cloud Build builds."""

    project: str
    region: str

    @property
    def flags(self) -> tuple[str, ...]:
        return f"--project={self.project}", f"--region={self.region}"


def source_date(context: BuildContext) -> str:
    """The commit's time, in UTC, as https://specs.opencontainers.org/image-spec/annotations has
    it."""
    return datetime.fromtimestamp(context.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def image_labels(context: BuildContext, base: BaseImage) -> dict[str, str]:
    """Labels that say what an image was made of, by the same specification."""
    name, _, digest = base.image.partition("@")
    labels = {
        "base.name": name,
        "base.digest": digest,
        "created": source_date(context),
        "revision": context.revision,
        "version": context.version,
    }
    return {f"org.opencontainers.image.{key}": value for key, value in labels.items() if value}


def label_instruction(labels: Mapping[str, str]) -> str:
    """The labels as an instruction of a Dockerfile: builders append what further files have."""
    quoted = [f'{key}="{_SPECIAL.sub(_ESCAPED, value)}"' for key, value in labels.items()]
    return "LABEL " + " \\\n    ".join(quoted) + "\n"


def tagged(image: str, context: BuildContext) -> str:
    """The image with a tag: its own, or the commit's. Raises UserError for what is not a name."""
    tag_of(image)
    return image if ":" in image.rpartition("/")[2] else f"{image}:{context.tag}"


def repository(image: str) -> str:
    """The name of an image without its tag and digest."""
    name = image.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def plan_build(
    image: str,
    builder: str,
    base: BaseImage,
    dockerfile: str,
    context: BuildContext,
    *,
    arguments: Mapping[str, str],
    platform: str,
    further: Sequence[str] = (),
    cloud: CloudPlace | None = None,
    cloud_flags: Iterable[str] = (),
) -> ImagePlan:
    """The build of `image`. `further` are arguments for the builder; `cloud` and `cloud_flags`
    belong to Cloud Build."""
    labels = image_labels(context, base)
    named = ["--tag", image, *_pairs("--build-arg", arguments)]
    given = [*named, *_pairs("--label", labels)]
    command: tuple[str, ...]
    files: dict[str, str] = {}
    if builder == CLOUD_BUILD:
        assert cloud is not None
        # A `$` would begin a substitution.
        words = [word.replace("$", "$$") for word in (*given, *further)]
        config = cloud_config(image, dockerfile.replace("$", "$$"), words, context.epoch)
        files[CLOUD_CONFIG] = json.dumps(config, indent=2) + "\n"
        command = (
            *("gcloud", "builds", "submit", ARCHIVE, f"--config={CLOUD_CONFIG}", *cloud.flags),
            *cloud_flags,
            *("--async", "--format=json"),
        )
    elif builder == "docker":
        command = (
            *("docker", "buildx", "build", "--file", f"{CONTEXT}/{dockerfile}"),
            *given,
            *("--platform", platform, "--build-arg", f"SOURCE_DATE_EPOCH={context.epoch}"),
            *("--provenance=false", "--output", "type=docker,rewrite-timestamp=true"),
            *further,
            CONTEXT,
        )
    else:
        files[LABELS] = label_instruction(labels)
        command = (
            *(builder, "build", "--layers", "--file", f"{CONTEXT}/{dockerfile}", "--file", LABELS),
            *named,
            *("--platform", platform, "--timestamp", str(FILE_EPOCH)),
            *further,
            CONTEXT,
        )
    return ImagePlan(image, builder, base, dockerfile, context, (command,), files, cloud)


def cloud_config(
    image: str, dockerfile: str, given: Sequence[str], epoch: object
) -> dict[str, Any]:
    """The configuration of a build for Cloud Build: docker builds with the arguments `given`, Cloud
    Build pushes (https://cloud.google.com/build/docs/build-config-file-schema)."""
    words = ["--build-arg", f"SOURCE_DATE_EPOCH={epoch}", "."]
    step = {
        "name": _CLOUD_DOCKER,
        "env": ["DOCKER_BUILDKIT=1"],
        "args": ["build", "--file", dockerfile, *given, *words],
    }
    return {"steps": [step], "images": [image]}


def push_commands(image: str, builder: str, further: Sequence[str]) -> list[tuple[str, ...]]:
    """The commands that push an image; the last one's output, or DIGEST_FILE, has the digest."""
    if builder == "docker":
        shown = ("docker", "image", "inspect", "--format", "{{json .RepoDigests}}", image)
        return [("docker", "push", *further, image), shown]
    return [(builder, "push", "--digestfile", DIGEST_FILE, *further, image)]


def login_hint(image: str, builder: str) -> str:
    """What to do where a registry refuses a push. Docker's settings hold for podman and buildah as
    well (containers-auth.json(5))."""
    host = image.partition("/")[0]
    is_google = host.endswith(("-docker.pkg.dev", "gcr.io"))
    command = f"gcloud auth configure-docker {host}" if is_google else f"{builder} login {host}"
    return f"if the registry refuses: {command}"


def cloud_place(image: str, project: str | None, region: str | None) -> CloudPlace:
    """Where Cloud Build builds `image`: what is given, or else the project and the region of its
    registry. Raises UserError for a registry that it does not push to."""
    host, *path = image.split("/")
    place = host.removesuffix("-docker.pkg.dev")
    is_google = place != host or host == "gcr.io" or host.endswith(".gcr.io")
    if not is_google or len(path) < 2:
        raise UserError(
            f"{image}: Cloud Build pushes to Artifact Registry: --tag"
            " REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME; another registry takes --builder"
            " docker, podman or buildah"
        )
    # us, europe and asia are several regions together.
    own = place if "-" in place and place != host else "global"
    return CloudPlace(project or path[0], region or own)


def builder_hint(builder: str) -> str:
    """What to do where a builder fails before it begins."""
    return _PLUGIN_HINT if builder == "docker" else ""


def dockerfile_of(context: BuildContext, file: Path | None) -> str:
    """The path of the Dockerfile below the context. Raises UserError where git does not have it
    there."""
    if file is None:
        found = next((n for n in ("docker/Dockerfile", "Dockerfile") if n in context.files), None)
        if found is None:
            raise UserError(
                f"{context.directory}: git has neither docker/Dockerfile nor Dockerfile there;"
                " --file names another one, --context another directory"
            )
        return found
    try:
        name = file.resolve().relative_to(context.directory.resolve()).as_posix()
    except ValueError:
        raise UserError(
            f"{file}: is not below {context.directory}; --context names the directory of the build"
        ) from None
    if name not in context.files:
        reason = "is not in git: git add it" if file.is_file() else "there is no such file"
        raise UserError(f"{file}: {reason}; --file names another one")
    return name


def _pairs(flag: str, values: Mapping[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in (flag, f"{key}={value}")]
