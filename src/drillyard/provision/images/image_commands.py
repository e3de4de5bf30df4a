"""Executes plans of images: builds, pushes, follows a build of Cloud Build, and returns digests.

What the builders print goes to standard error as it comes; standard output is for the result.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drillyard.errors import UserError
from drillyard.programs import Programs, require_success
from drillyard.provision.images.build_context import context_archive, write_context
from drillyard.provision.images.image_plan import (
    ARCHIVE,
    CLOUD_BUILD,
    CONTEXT,
    DIGEST_FILE,
    LOCAL_BUILDERS,
    CloudPlace,
    ImagePlan,
    builder_hint,
    login_hint,
    push_commands,
    repository,
)


def find_builder(programs: Programs) -> str:
    """The builder of this machine: docker with buildx, podman or buildah. Raises UserError where
    there is none."""
    for builder in LOCAL_BUILDERS:
        asked = [builder, *(["buildx"] if builder == "docker" else []), "version"]
        with contextlib.suppress(UserError):
            if programs.run(asked).returncode == 0:
                return builder
    raise UserError(
        "no builder of images is on this machine: install docker with buildx, podman or buildah, or"
        f" let Google build: --builder {CLOUD_BUILD}"
    )


def build_image(plan: ImagePlan, programs: Programs) -> str | None:
    """Build. Returns the build's id where Cloud Build builds, which goes on then. Raises UserError
    where the builder fails."""
    with _directory() as directory:
        for name, content in plan.files.items():
            (directory / name).write_text(content, encoding="utf-8")
        (command,) = plan.commands
        if plan.builder == CLOUD_BUILD:
            (directory / ARCHIVE).write_bytes(context_archive(plan.context))
            done = require_success(programs.run(command, directory=directory), plan.image)
            return _text(done.printed_json(), "id", command)
        write_context(plan.context, directory / CONTEXT)
        _show(programs, command, directory, builder_hint(plan.builder))
    return None


def push_image(image: str, builder: str, further: Sequence[str], programs: Programs) -> str:
    """Push an image that `builder` has built. Returns it by its digest, NAME@sha256:... Raises
    UserError."""
    with _directory() as directory:
        push, *shown = push_commands(image, builder, further)
        _show(programs, push, directory, login_hint(image, builder))
        if not shown:
            return f"{repository(image)}@{(directory / DIGEST_FILE).read_text('utf-8').strip()}"
        done = require_success(programs.run(shown[0]), image)
    # docker names the image once for each repository that it was pushed to.
    names = [str(each) for each in done.printed_json() or []]
    wanted = repository(image).removeprefix("docker.io/").removeprefix("library/")
    for name in names:
        if name.partition("@")[0] == wanted or repository(name) == repository(image):
            return name
    raise UserError(f"{image}: docker has no digest of it after the push: {', '.join(names)}")


def follow_build(build: str, place: CloudPlace, programs: Programs) -> str:
    """Show the log of a build of Cloud Build until it ends. Returns the image by its digest. Raises
    UserError where the build failed."""
    follow = ["gcloud", "builds", "log", build, "--stream", *place.flags]
    _show(programs, follow)
    describe = ["gcloud", "builds", "describe", build, *place.flags, "--format=json"]
    found = require_success(programs.run(describe), f"build {build}").printed_json()
    status = _text(found, "status", describe)
    if status != "SUCCESS":
        detail = (found.get("failureInfo") or {}).get("detail") or found.get("statusDetail") or ""
        raise UserError(
            f"build {build}: ended with {status}{f': {detail}' if detail else ''}"
            f"\nits log: {shlex.join(follow)}"
        )
    try:
        (image,) = found["results"]["images"]
        return f"{repository(image['name'])}@{image['digest']}"
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"build {build}: has pushed no image; its cloudbuild.yaml lists none under `images`"
        ) from None


def _text(document: Any, key: str, command: Sequence[str]) -> str:
    value = document.get(key) if isinstance(document, dict) else None
    if not isinstance(value, str) or not value:
        shown = json.dumps(document)[:200]
        raise UserError(f"{shlex.join(command)}: the answer has no {key}: {shown}")
    return value


def _show(
    programs: Programs, command: Sequence[str], directory: Path | None = None, hint: str = ""
) -> None:
    code = programs.show(command, directory=directory)
    if code != 0:
        lines = [f"{command[0]}: failed with exit code {code}; what it printed is above"]
        lines += [f"command: {shlex.join(command)}", *([hint] if hint else [])]
        raise UserError("\n".join(lines))


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="drillyard-image-") as name:
        yield Path(name)
