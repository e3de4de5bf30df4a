"""The first rows of each source, read as training reads them.

They show most mistakes in `data:` within a second (a path, a column, a format, a tokenizer that
does not fit), while `prepared_data.prepare` hashes and tokenises all rows. A mistake further down
in a file is not seen here, nor one of some of these rows, unless it ends the run (`data.on_error`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drillyard.config.load import resolve_section_secrets
from drillyard.config.run import RunConfig
from drillyard.config.run_data import TrainTokenizer
from drillyard.data.encode_settings import (
    encode_settings,
    require_fitting_tokenizer,
    sources_with_text,
)
from drillyard.data.encoder import AT_FAULT, Encoder, HeldOutSplit
from drillyard.data.held_out_parts import canonical_row, held_out_sources, split_of
from drillyard.data.megatron.indexed_file import open_indexed
from drillyard.data.megatron.preparation import MegatronPreparation
from drillyard.data.raw_batches import first_rows
from drillyard.data.row_formats import row_format
from drillyard.data.sources import DataSource, resolve_sources
from drillyard.data.token_cache import cache_root
from drillyard.data.tokenizer import configured_tokenizer
from drillyard.errors import UserError

ROWS = 100


def require_readable_data(config: RunConfig) -> None:
    """Raise UserError for a mistake in `data:` that the first rows of each source show.

    Reads at most `ROWS` rows of each, about a megabyte. Of a data set of the Hugging Face hub only
    its description is fetched.
    """
    config = resolve_section_secrets(config, "data")
    data, root = config.data, cache_root(config.data)
    training = resolve_sources(data.source)
    held_out = held_out_sources(data, training)
    encoder, pad_id, vocab_size = None, 0, 0
    if isinstance(data.tokenizer, TrainTokenizer):
        sources_with_text(training)
    else:
        tokenizer = configured_tokenizer(config, None)
        pad_id, vocab_size = tokenizer.pad_id, require_fitting_tokenizer(config, tokenizer)
        encoder = Encoder(encode_settings(data, tokenizer))
    MegatronPreparation(config, root, training, pad_id, vocab_size)
    for source in [*training, *held_out.values()]:
        if source.is_megatron:
            open_indexed(*(Path(str(file)) for file in source.files))
        elif not source.files and source.builtin is None and not Path(source.config.path).is_dir():
            source.contents(root / "hashes")
        else:
            split = split_of(data) if source in training else HeldOutSplit()
            _require_readable(source, config, split, encoder)


def _require_readable(
    source: DataSource, config: RunConfig, split: HeldOutSplit, encoder: Encoder | None
) -> None:
    batch = next(first_rows(source.batches(), ROWS), None)
    if batch is None:
        raise UserError(f"data.source {source.name}: {source.config.path} has no rows.")
    if encoder is not None:
        parts = encoder.encode(batch).parts.values()
        rows = sum(part.counts["rows"] for part in parts)
        if rows and rows == sum(part.counts[AT_FAULT] for part in parts):
            # Encoded once more, the first of them raises its error.
            Encoder(replace(encoder.settings, on_error="refuse")).encode(batch)
        return
    form = row_format(config.data)
    failure: UserError | None = None
    has_good_row = False
    for number, item in batch.rows():
        try:
            canonical_row(item, form, split, batch.where(number))
        except UserError as error:
            failure = failure or error
            if config.data.on_error == "refuse":
                raise
        else:
            has_good_row = True
    if failure is not None and not has_good_row:
        raise failure
