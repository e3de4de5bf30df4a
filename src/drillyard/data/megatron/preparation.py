"""From a run config to the sequences of its Megatron data, and to the mixture that training draws
from.

Before a model is built, the files are checked against each other and every token against the
vocabulary. The second reads `.bin` once; the smallest and largest token are kept with the file
hashes, so that a restart does not.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drillyard.config.run import RunConfig
from drillyard.config.run_data import MegatronConfig
from drillyard.data.mapped_sequences import Sequences
from drillyard.data.megatron.indexed_file import IndexedFile, open_indexed
from drillyard.data.megatron.mixture import MegatronMixture
from drillyard.data.megatron.sample_order import (
    SPLITS,
    sample_order,
    samples_of_sources,
    split_bounds,
)
from drillyard.data.megatron.sequences import CutSettings, MegatronSequences
from drillyard.data.raw_batches import json_digest
from drillyard.data.sampler import Mixture
from drillyard.errors import UserError
from drillyard.guarded_files import read_json
from drillyard.safe_files import replace_file

if TYPE_CHECKING:
    from drillyard.data.sources import DataSource, SourceContents


class MegatronPreparation:
    """The Megatron data of a run. Raises UserError for settings that do not fit them."""

    def __init__(
        self,
        config: RunConfig,
        root: Path,
        training: Sequence[DataSource],
        pad_id: int,
        vocab_size: int,
    ) -> None:
        data = config.data
        self._config, self._hashes, self._training, self._vocab_size = (
            config,
            root / "hashes",
            training,
            vocab_size,
        )
        self._settings = settings = data.megatron or MegatronConfig()
        self._cut = CutSettings(data.sequence_length, settings.isolation == "documents", pad_id)
        own = [source for source in training if source.is_megatron]
        others = [source for source in training if not source.is_megatron]
        if data.megatron is not None and not own:
            raise UserError(
                "data.megatron: no source is Megatron data (a .bin with its .idx). Remove it."
            )
        if settings.samples is not None and others:
            raise UserError(
                "data.megatron.samples: Megatron-LM's order is for Megatron data only, and"
                f" {others[0].name} is none. Write it with `drillyard data build --to megatron`, or"
                " set data.megatron.samples: null."
            )
        if own and data.held_out.fraction:
            raise UserError(
                f"data.held_out.fraction: {own[0].name} is Megatron data, which have no rows to"
                ' hold out. Set data.megatron.split: "99,1", and data.held_out.source: {path:'
                f" {own[0].config.path}, split: valid}}."
            )
        if own and data.format != "text":
            raise UserError(
                f"data.format: {own[0].name} is Megatron data, which are plain text. Set"
                " data.format: text."
            )
        limited = next((source for source in own if source.config.max_samples is not None), None)
        if limited is not None:
            raise UserError(
                f"data.source {limited.name}: max_samples counts rows, and Megatron data have none."
                ' Set data.megatron.split: "10,90", which takes a part of them.'
            )
        if own and not others and (data.too_long or data.columns or not data.packing):
            key = "too_long" if data.too_long else "columns" if data.columns else "packing"
            raise UserError(
                f"data.{key} has no effect on Megatron data, whose documents are cut as they are."
                " Remove it."
            )

    def sequences(self, source: DataSource, contents: SourceContents) -> MegatronSequences:
        """The samples of a source: in Megatron-LM's order if it is asked for and the source
        trains."""
        file = open_indexed(*(Path(str(path)) for path in source.files))
        self._require_vocabulary(source, contents, file)
        settings, length = self._settings, self._cut.sequence_length
        place = next((number for number, each in enumerate(self._training) if each is source), None)
        in_own_order = settings.samples is not None and place is not None
        # Megatron-LM counts sequences where documents have several; the files that GPT is trained
        # on have one each.
        number = len(file.lengths) if in_own_order else len(file.bounds) - 1
        documents = (0, number)
        if settings.split is not None:
            if source.config.split not in SPLITS:
                raise UserError(
                    f"data.source {source.name}: no split {source.config.split!r}; set one of"
                    f" {SPLITS}."
                )
            documents = split_bounds(settings.split, source.config.split, number)
        elif source.config.split != "train":
            raise UserError(
                f"data.source {source.name}: split {source.config.split!r} needs the shares. Set"
                ' data.megatron.split, such as "969,30,1".'
            )
        order = None
        if settings.samples is not None and place is not None:
            _, wanted = samples_of_sources(
                [each.weight for each in self._training], settings.samples
            )[place]
            if int(file.lengths[slice(*documents)].sum()) <= 1:
                raise UserError(
                    f"data.source {source.name}: {source.config.path} has no tokens to train on."
                )
            order = sample_order(file.lengths, *documents, length, wanted, settings.seed)
        key = json_digest(
            [contents.key, documents, length, settings.isolation, in_own_order and settings.seed]
        )
        return MegatronSequences(
            source.name, f"{key}/{source.config.split}", file, documents, self._cut, order
        )

    def mixture(self, trained: Sequence[Sequences]) -> Mixture:
        """The training sources as one stream."""
        weights, seed = [source.weight for source in self._training], self._config.training.seed
        if self._settings.samples is not None:
            return MegatronMixture(trained, weights, seed, self._settings.samples)
        return Mixture(trained, weights, seed)

    def _require_vocabulary(
        self, source: DataSource, contents: SourceContents, file: IndexedFile
    ) -> None:
        """Raise UserError if a token is not in the vocabulary."""
        memo = self._hashes / f"{json_digest(contents.key)}.tokens.json"
        smallest, largest = 0, -1
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            smallest, largest = map(int, read_json(memo))
        if largest < 0:
            smallest, largest = file.token_range()
            # On a full or read-only disk, the next start reads the file again.
            with contextlib.suppress(OSError):
                replace_file(memo, json.dumps([smallest, largest]).encode())
        if smallest < 0 or largest >= self._vocab_size:
            raise UserError(
                f"{file.path}: has token {smallest if smallest < 0 else largest}, and the"
                f" vocabulary has {self._vocab_size} entries. Set data.tokenizer and the model to"
                " those the file was made for."
            )
