"""Writes a pushed image into a cluster config: its key `image`, and nothing else of the file."""

from __future__ import annotations

from pathlib import Path

from drillyard.config.yaml_document import parse_document
from drillyard.errors import ConfigError, UserError
from drillyard.guarded_files import read_text
from drillyard.provision.images.image_plan import repository
from drillyard.provision.launch_file import with_values
from drillyard.safe_files import describe_os_error, rewrite_file


def require_writable(file: Path, image: str) -> None:
    """Raise UserError where `write_image` would: before anything is built."""
    _written(file, f"{repository(image)}@sha256:{'0' * 64}")


def write_image(file: Path, image: str) -> None:
    """Set `image` of the cluster config. Comments and all else stay as they are. Raises UserError
    where the file is not a cluster config, or has an image of another repository."""
    text = _written(file, image)
    try:
        rewrite_file(file, text.encode())
    except OSError as error:
        raise UserError(f"{file}: {describe_os_error(error)}\n{_paste(image)}") from None


def _written(file: Path, image: str) -> str:
    try:
        text = read_text(file)
    except FileNotFoundError:
        raise UserError(f"{file}: there is no such file; --write names a cluster config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
    document = parse_document(text, str(file))
    values = document.value
    if document.problems or not isinstance(values, dict) or "platform" not in values:
        raise ConfigError(f"{file}: is not a cluster config: it has no `platform`; {_paste(image)}")
    own = values.get("image")
    if own is not None and repository(str(own)) != repository(image):
        place = document.places.get(("image",))
        raise ConfigError(
            f"{place.label if place else file}: image: is {own}, of another repository, and is"
            f" kept; remove the line, or change it yourself: {_paste(image)}"
        )
    made = with_values(text, {**values, "image": image})
    if made is None:
        raise ConfigError(
            f"{file}: cannot be changed in place (an alias, `*name`); {_paste(image)}"
        )
    return made


def _paste(image: str) -> str:
    return f"image: {image}"
