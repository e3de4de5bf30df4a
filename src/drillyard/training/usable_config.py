"""Whether a config can be trained, whatever its run directory holds.

The ranks find these mistakes on their own, each where it matters. A refusal that compares the
config with what a run directory holds comes before that, and asks here first, so that a path with a
mistake in it is not reported as a different run. Costs the import of torch and the first rows of
the data: only a start that is refused anyway pays for it.
"""

from __future__ import annotations

from drillyard.config.run import RunConfig
from drillyard.data.first_rows import require_readable_data
from drillyard.parallel.ranks import choose_device
from drillyard.training.model_setup import require_trainable


def require_usable(config: RunConfig) -> None:
    """Raise UserError for a mistake in the model, adapter, tokenizer or data that `config` names.

    Reads headers and first rows. Nothing large is fetched: of a hub id only what describes it.
    """
    device = choose_device(config.training.device, 0)
    require_trainable(config, device, needs_weights=True, fetches_weights=False)
    require_readable_data(config)
