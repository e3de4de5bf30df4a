"""Model to estimate: from the run config, from a config.json that is given instead, or from counts
alone.

Nothing is downloaded: of a hub id the config.json must be in the local Hugging Face cache, or be
given as a file. A family whose shapes are not known is refused with what can be done, by
`modelspec`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drillyard.config.model_files import cached_config_path
from drillyard.config.run import RunConfig
from drillyard.config.run_data import TrainTokenizer
from drillyard.errors import UserError
from drillyard.modelspec import ModelSpec, model_spec, read_config, spec_from_counts

_INLINE: Final = "model.config"
BuildSpec = Callable[..., ModelSpec]
"""`models.meta_model.build_spec`, which needs torch: handed in by who may import it."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The user's config.json or numbers of parameters, in place of those of the run config."""

    config_file: Path | None = None
    parameters: int | None = None
    active_parameters: int | None = None

    def __post_init__(self) -> None:
        if self.active_parameters is not None and self.parameters is None:
            raise UserError(
                "--active-params says how many of the parameters a token uses: give --params too"
            )
        if self.parameters is not None and self.config_file is not None:
            raise UserError(
                "--params is for a model whose config is not known; give it or --config, not both"
            )


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model by its spec, the config.json it was read from (None: from counts), and where that
    was."""

    spec: ModelSpec
    config: Mapping[str, Any] | None
    source: str


def find_model(
    config: RunConfig, own: ModelOptions, *, build: BuildSpec | None = None
) -> ModelSource:
    """The model of a run. With `build` transformers builds it, for families that are not known.

    UserError where no config is here, it is not JSON, or its family or a field of it is not known.
    """
    if own.parameters is not None:
        return ModelSource(
            spec_from_counts(own.parameters, own.active_parameters), None, "--params"
        )
    content, source = _content(config, own)
    if build is not None:
        # transformers reads `model_type`; an inline config says `architecture`.
        named = (
            content
            if "model_type" in content
            else {**content, "model_type": content.get("architecture")}
        )
        return ModelSource(build(named, source=source), content, source)
    return ModelSource(
        model_spec(content, source=source, published=source != _INLINE), content, source
    )


def _content(config: RunConfig, own: ModelOptions) -> tuple[Mapping[str, Any], str]:
    """A config.json and what to call it in errors."""
    model = config.model
    if own.config_file is not None:
        return read_config(own.config_file), str(own.config_file)
    if model.config is not None:
        return _with_vocabulary(model.config, config), _INLINE
    if model.id is None:
        raise UserError(
            "model: no model is named: give model.id or model.config in the run config, or --config"
            " FILE"
        )
    directory = Path(model.id).expanduser()
    if directory.is_dir():
        return read_config(directory), f"model.id {model.id}"
    with contextlib.suppress(OSError):
        if (cached := cached_config_path(model.id)).is_file():
            return read_config(cached), f"model.id {model.id}"
    raise UserError(
        f"model.id {model.id}: no such directory, and its config.json is not in the local Hugging"
        " Face cache\nNothing is downloaded: give the file by --config FILE, or run `hf download"
        f" {model.id} config.json`."
    )


def _with_vocabulary(content: Mapping[str, Any], config: RunConfig) -> Mapping[str, Any]:
    """An inline config that leaves the vocabulary to the tokenizer gets that of a tokenizer which
    is to be trained."""
    tokenizer = config.data.tokenizer
    if "vocab_size" in content:
        return content
    if isinstance(tokenizer, TrainTokenizer):
        return {**content, "vocab_size": tokenizer.vocab_size}
    raise UserError(
        "model.config.vocab_size: missing: the tokenizer that has it is not read here\n"
        "give it by --set model.config.vocab_size=N"
    )
