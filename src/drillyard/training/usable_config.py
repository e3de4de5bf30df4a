"""Whether a config can be trained, whatever its run directory holds.

The ranks find these mistakes on their own, each where it matters. A refusal that compares the
config with what a run directory holds comes before that, and asks here first, so that a path with a
mistake in it is not reported as a different run. What is missing is said at once; the rest costs
the import of torch and the first rows of the data, which only a start that is refused anyway pays
for.
"""

from __future__ import annotations

from pathlib import Path

from drillyard.config.load import resolve_section_secrets
from drillyard.config.model_files import (
    read_adapter_config,
    require_model_directory,
    require_weight_files,
)
from drillyard.config.run import RunConfig
from drillyard.data.held_out_parts import held_out_sources
from drillyard.data.sources import resolve_sources
from drillyard.errors import UserError


def require_usable(config: RunConfig) -> None:
    """Raise UserError for a mistake in the model, adapter, tokenizer or data that `config` names.

    Reads headers and first rows. Nothing large is fetched: of a hub id only what describes it.
    """
    _require_paths(config)
    # Imported here: the mistakes above are said without a wait.
    from drillyard.data.first_rows import require_readable_data
    from drillyard.parallel.ranks import choose_device
    from drillyard.training.model_setup import require_trainable

    device = choose_device(config.training.device, 0)
    require_trainable(config, device, needs_weights=True, fetches_weights=False)
    require_readable_data(config)


def _require_paths(config: RunConfig) -> None:
    """Raise UserError for a model, an adapter, a tokenizer or a source that is not on this
    machine."""
    if config.model.id is not None:
        require_model_directory(config.model.id)
        require_weight_files(config.model)
    if config.model.lora is not None and config.model.lora.adapter is not None:
        read_adapter_config(config.model.lora.adapter)
    tokenizer = config.data.tokenizer
    is_path = isinstance(tokenizer, str) and tokenizer.startswith((".", "/", "~"))
    if is_path and not Path(str(tokenizer)).expanduser().is_dir():
        raise UserError(
            f"data.tokenizer: no directory {tokenizer}\ngive the path of the directory of a"
            " tokenizer or a Hugging Face id"
        )
    data = resolve_section_secrets(config, "data").data
    held_out_sources(data, resolve_sources(data.source))
