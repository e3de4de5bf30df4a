"""The files of a tokenizer, as its origin has them, for run directories and exports.

Training changes no tokenizer, so its files are copied, to the byte: transformers 5 would write them
under names of classes that transformers 4 does not know. Where transformers 5 wrote the origin, the
few entries of tokenizer_config.json that transformers 4 refuses are replaced by those that both
read alike. Before 4.43 transformers finds a chat template there alone, so one that lies in a file
of its own is written there too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from drillyard.data.tokenizer import TextTokenizer
from drillyard.errors import UserError
from drillyard.guarded_files import LARGEST_MODEL_DOCUMENT_BYTES, read_bytes
from drillyard.hub_access import require_cached_only
from drillyard.safe_files import describe_os_error, make_directory, replace_file

CONFIG = "tokenizer_config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
_FILES = (
    "tokenizer.json",
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "tokenizer.model.v*",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "tekken.json",
    _CHAT_TEMPLATE,
    f"{_MORE_TEMPLATES}/*.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What programs read of a tokenizer's directory; the last ones are those of models that also take
pictures."""


def tokenizer_files(tokenizer: TextTokenizer) -> dict[str, bytes]:
    """The content of the tokenizer's files by relative path. Raises UserError where they cannot be
    read."""
    directory = _directory_of(tokenizer.origin)
    try:
        files = {
            path.relative_to(directory).as_posix(): read_bytes(path, LARGEST_MODEL_DOCUMENT_BYTES)
            for pattern in _FILES
            for path in sorted(directory.glob(pattern))
            if path.is_file()
        }
        return _readable_everywhere(files, tokenizer)
    except (OSError, ValueError, RecursionError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        raise UserError(
            f"{directory}: the tokenizer cannot be read: {reason}. Set data.tokenizer to another"
            " one, or fetch this one again."
        ) from error


def save_tokenizer(files: Mapping[str, bytes], directory: Path) -> None:
    """Write the files of a tokenizer that are not in `directory` yet, each as a whole. Raises
    UserError."""
    try:
        for name, content in files.items():
            path = directory / name
            if not path.is_file() or read_bytes(path, LARGEST_MODEL_DOCUMENT_BYTES) != content:
                make_directory(path.parent, parents=True)
                replace_file(path, content, draft=directory / "tokenizer.incomplete", durable=True)
    except OSError as error:
        raise UserError(
            f"{error.filename or directory}: the tokenizer cannot be saved:"
            f" {describe_os_error(error)}"
        ) from error


def _directory_of(origin: str) -> Path:
    """The directory of a tokenizer that was loaded from `origin`: itself, or the hub's copy of it,
    with the files that loading did not need."""
    if Path(origin).is_dir():
        return Path(origin)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    cached_only = require_cached_only(origin, "data.tokenizer")
    try:
        return Path(
            snapshot_download(origin, allow_patterns=list(_FILES), local_files_only=cached_only)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        # Loading has put those that it needs into the cache.
        return Path(snapshot_download(origin, allow_patterns=list(_FILES), local_files_only=True))


def _readable_everywhere(files: dict[str, bytes], tokenizer: TextTokenizer) -> dict[str, bytes]:
    """The files with the tokenizer's own chat template, a tokenizer.json and a
    tokenizer_config.json that transformers 4 and 5 read alike. Raises ValueError where that is not
    a JSON object."""
    config = json.loads(files.get(CONFIG, b"{}"))
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is not a JSON object")
    wanted: dict[str, Any] = dict(config)
    # Code is not copied, so what names its files would name none.
    wanted.pop("auto_map", None)
    if wanted.get("tokenizer_class") == "TokenizersBackend":
        wanted["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(extra := wanted.get("extra_special_tokens"), list):
        del wanted["extra_special_tokens"]
        older = wanted.get("additional_special_tokens") or []
        wanted["additional_special_tokens"] = older + [each for each in extra if each not in older]
    templates = _template_files(files)
    own = tokenizer.chat_template
    if isinstance(own, str) and own != _default_template(templates, config):
        # One of the run's own takes the place of all that the origin has.
        templates = {"default": own}
        files = {n: each for n, each in files.items() if not n.startswith(f"{_MORE_TEMPLATES}/")}
        files[_CHAT_TEMPLATE] = own.encode()
        wanted.pop("chat_template", None)
    if templates and "chat_template" not in wanted:
        wanted["chat_template"] = (
            templates["default"]
            if list(templates) == ["default"]
            else [{"name": name, "template": text} for name, text in templates.items()]
        )
    if wanted != config:
        text = json.dumps(wanted, indent=2, ensure_ascii=False)
        files = {**files, CONFIG: f"{text}\n".encode()}
    return {"tokenizer.json": tokenizer.json.encode(), **files}


def _template_files(files: dict[str, bytes]) -> dict[str, str]:
    """The chat templates in files of their own, by name."""
    paths = {name: PurePosixPath(name) for name in files if name.endswith(".jinja")}
    return {
        "default" if name == _CHAT_TEMPLATE else path.stem: files[name].decode()
        for name, path in sorted(paths.items(), key=lambda each: each[0] != _CHAT_TEMPLATE)
    }


def _default_template(templates: dict[str, str], config: dict[str, Any]) -> str | None:
    """The chat template that transformers takes, as it reads it: a file before an entry."""
    if "default" in templates:
        return templates["default"].replace("\r\n", "\n").replace("\r", "\n")
    found = config.get("chat_template")
    return found if isinstance(found, str) else None
