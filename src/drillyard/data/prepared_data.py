"""From a run config to sequences: `prepare`, which the trainer calls once per rank.

For each source: compute its content key, then open the cache under (content, tokenizer, format,
settings), or build it. With a warm cache this costs the hashing of changed files and one read of
the cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drillyard.config.fetch_limits import withheld_error
from drillyard.config.load import resolve_section_secrets
from drillyard.config.problems import shown_address
from drillyard.config.run import RunConfig
from drillyard.config.run_data import TrainTokenizer
from drillyard.data.data_changes import (
    CHANGED_DATA_ADVICE,
    DataRecord,
    describe_change,
    only_removed_files,
    refuse_change,
)
from drillyard.data.data_report import DataReport, first_place, overlap_warnings, too_few_sequences
from drillyard.data.encode_settings import (
    encode_settings,
    require_fitting_tokenizer,
    sources_with_text,
)
from drillyard.data.encoder import AT_FAULT, HELD_OUT, TRAIN, Encoded, EncodeSettings, HeldOutSplit
from drillyard.data.encoding_pool import encode_all
from drillyard.data.held_out_parts import (
    SPLIT_SUFFIX,
    held_out_sources,
    split_of,
    split_part_name,
    training_texts,
)
from drillyard.data.mapped_sequences import CachedSequences, Sequences
from drillyard.data.megatron.preparation import MegatronPreparation
from drillyard.data.raw_batches import json_digest
from drillyard.data.row_formats import row_format
from drillyard.data.sampler import Mixture
from drillyard.data.sources import DataSource, SourceContents, is_source_withheld, resolve_sources
from drillyard.data.token_cache import (
    ENCODING_VERSIONS,
    FORMAT_VERSION,
    PART_NAMES,
    DamagedCache,
    PartSettings,
    build_cache,
    cache_root,
    open_cache,
    remove_cache,
)
from drillyard.data.tokenizer import (
    TextTokenizer,
    configured_tokenizer,
    is_byte_level,
    start_ids_key,
    today,
    trained_tokenizer,
)
from drillyard.data.tokenizer_files import tokenizer_files
from drillyard.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OnProgress = Callable[[str, int, int | None], None]
"""Called with (activity, bytes done, bytes in all or None)."""


@dataclass
class PreparedData:
    """The data of training and evaluation."""

    train: Mixture
    held_out: dict[str, Sequences]
    report: DataReport
    text_tokenizer: TextTokenizer
    record: DataRecord
    paths: dict[str, str]
    """The path of each training source and held-out part, by name."""
    read_shares: dict[str, float | None] = field(default_factory=dict)
    """Of a sample: the share that was read of each source that has more rows; None where its size
    is not known."""

    def before_training(self, config: RunConfig, global_batch_size: int) -> list[str]:
        """Warnings before training: rows that held-out data share with it, too little data for a
        batch.

        Compares only held-out parts that a split of the documents does not separate. Costs a pass
        over the hashes of all documents (`data_report.py`).
        """
        training = [(self.paths[source.name], source) for source in self.train.sources]
        notes: list[str] = []
        for name, part in self.held_out.items():
            if config.data.held_out.source is not None or config.data.held_out.split_by is not None:
                notes += overlap_warnings(name, self.paths[name], part, training)
        documents = sum(source.counts.get("documents", 0) for source in self.train.sources)
        return [*notes, *too_few_sequences(self.train.num_sequences, documents, global_batch_size)]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer as an object of transformers."""
        return self.text_tokenizer.pretrained

    @cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The content of the tokenizer's files by path, as they were when this was first asked
        for. Raises UserError where they cannot be read."""
        return tokenizer_files(self.text_tokenizer)


def prepare(
    config: RunConfig,
    tokenizer_directory: Path | None = None,
    on_progress: OnProgress | None = None,
    *,
    known: DataRecord | None = None,
    if_changed: str = CHANGED_DATA_ADVICE,
    only_open: bool = False,
    num_workers: int | None = None,
    date: str | None = None,
) -> PreparedData:
    """Open the run's data; build the caches that are missing.

    Call it on one rank first, which builds and verifies, then on the others with `only_open=True`,
    which open without verifying checksums again and never build. `tokenizer_directory`: a saved
    tokenizer (of a checkpoint, say) that replaces the config's. `known`: the record of the data
    when this run began; changed data are refused before anything is tokenised, with `if_changed` as
    advice, and missing data are taken from the cache. `date`: the day that a chat template with a
    clock sees, unless `known` has one; default: today. Raises UserError for every mistake in data
    or config.
    """
    # The config of a finished run is read without its secrets; resolve those of its data here.
    config = resolve_section_secrets(config, "data")
    known = known or DataRecord("", "")
    return _Preparation(
        config, tokenizer_directory, on_progress, known, if_changed, only_open, num_workers, date
    ).run()


@contextmanager
def prepare_sample(config: RunConfig, num_sequences: int) -> Iterator[PreparedData]:
    """As `prepare`, of the first rows of each source: a megabyte, or what surely fills so many
    sequences. No cache is read or written; what was read is gone at the end of the context.

    A tokenizer that is trained from the data is trained from these rows. Held-out parts that have
    no row among them are left out.
    """
    config = resolve_section_secrets(config, "data")
    with tempfile.TemporaryDirectory(prefix="drillyard-sample-") as directory:
        data = config.data.model_copy(update={"cache_directory": directory})
        yield _Preparation(
            config.model_copy(update={"data": data}),
            None,
            None,
            DataRecord("", ""),
            CHANGED_DATA_ADVICE,
            False,
            None,
            None,
            max(1 << 20, _BYTES_PER_TOKEN * num_sequences * config.data.sequence_length),
        ).run()


def encoded_documents(
    config: RunConfig, on_progress: OnProgress | None = None
) -> tuple[TextTokenizer, dict[str, Callable[[], Iterator[Encoded]]]]:
    """The tokenizer, and for each training source its documents as tokens, uncut, in the source's
    order."""
    config = resolve_section_secrets(config, "data")
    preparation = _Preparation(
        config, None, on_progress, DataRecord("", ""), CHANGED_DATA_ADVICE, False, None, None
    )
    sources = preparation.open_sources()
    whole = replace(preparation.settings, sequence_length=_UNCUT)
    return preparation.tokenizer, {
        name: partial(preparation.encoded, source, contents, whole)
        for name, (source, contents) in sources.items()
    }


_UNCUT = 2**31 - 1
_BYTES_PER_TOKEN = 8
"""At most, of text that is not made of one word: 3 to 5 are usual."""


@dataclass
class _Preparation:
    """The state of one call of `prepare`."""

    config: RunConfig
    tokenizer_directory: Path | None
    on_progress: OnProgress | None
    known: DataRecord
    if_changed: str
    only_open: bool
    num_workers: int | None
    date: str | None
    sample_bytes: int | None = None

    def __post_init__(self) -> None:
        self.read_shares: dict[str, float | None] = {}
        self.data = self.config.data
        self.root, self.format, self.split = (
            cache_root(self.data),
            row_format(self.data),
            split_of(self.data),
        )
        self.report = DataReport()

    def open_sources(self) -> dict[str, tuple[DataSource, SourceContents]]:
        """The training sources by name; sets the tokenizer and how rows are encoded."""
        training = [
            self._usable(source, self.known.training.get(source.name), trains=True)
            for source in resolve_sources(self.data.source, self.known.training)
        ]
        self.tokenizer = self._tokenizer(training).on(self.known.date or self.date or today())
        if self.known.tokenizer not in ("", self.tokenizer.key):
            raise UserError(
                f"the tokenizer {self.tokenizer.origin} changed since this run began (its files,"
                " data.chat_template, the version of the tokenizers library, or what this version"
                " of drillyard puts before a text): the same text would give other tokens."
                f" {self.if_changed}"
            )
        self.vocab_size = require_fitting_tokenizer(self.config, self.tokenizer)
        self.settings = encode_settings(self.data, self.tokenizer)
        return {source.name: (source, found) for source, found in training}

    def run(self) -> PreparedData:
        training = self.open_sources()
        sources = [source for source, _ in training.values()]
        contents = {name: found for name, (_, found) in training.items()}
        self.megatron = MegatronPreparation(
            self.config, self.root, sources, self.tokenizer.pad_id, self.vocab_size
        )
        trained, held_out, held_out_contents = [], {}, {}
        paths = {source.name: source.config.path for source in sources}
        for source in sources:
            parts = self._sequences(source, contents[source.name], self.split)
            trained.append(self._not_empty(parts[TRAIN], source, "training"))
            self.report.add(source.name, source.config.path, parts[TRAIN])
            if HELD_OUT in parts and (len(parts[HELD_OUT]) or self.sample_bytes is None):
                name = split_part_name(source)
                held_out[name] = self._not_empty(parts[HELD_OUT], source, "held-out")
                paths[name] = source.config.path
        for name, listed in held_out_sources(self.data, sources, self.known.held_out).items():
            # The record has the source's name, not the part's.
            source, found = self._usable(listed, self.known.held_out.get(listed.name), trains=False)
            held_out_contents[listed.name] = found
            (part,) = self._sequences(source, found, HeldOutSplit()).values()
            held_out[name] = self._not_empty(part, source, "held-out")
            paths[name] = source.config.path
        for name, sequences in held_out.items():
            self.report.add(
                name if name.endswith(SPLIT_SUFFIX) else f"{name} (held out)",
                paths[name],
                sequences,
            )
        mixture = self.megatron.mixture(trained)
        key, date = self.tokenizer.key, self.tokenizer.date
        record = DataRecord(mixture.fingerprint, key, contents, held_out_contents, date)
        return PreparedData(
            mixture, held_out, self.report, self.tokenizer, record, paths, self.read_shares
        )

    def _usable(
        self, source: DataSource, then: SourceContents | None, *, trains: bool
    ) -> tuple[DataSource, SourceContents]:
        """The source with the contents that this run may use. UserError if they changed."""
        if self.sample_bytes is not None:
            source = replace(source, first_bytes=self.sample_bytes)
        now = source.contents(self.root / "hashes")
        if then is None or (now.key == then.key and source.missing is None):
            return source, now
        if source.missing is None and not only_removed_files(now, then):
            if trains:
                refuse_change(source, now, then, self.if_changed)
            self._note(
                f"the held-out data {source.name} changed since this run began"
                f" ({describe_change(now, then)}): its figures cannot be compared with earlier ones"
            )
            return source, now
        what = "it" if source.missing is not None else describe_change(now, then)
        needs_rows = any(metric != "loss" for metric in self.config.evaluation.metrics)
        address = shown_address(source.config.path)
        if is_source_withheld(source.config):
            if needs_rows:
                raise withheld_error(f"data.source: {address}", is_data=True)
            self._note(f"{address} ({source.name}): not fetched; its tokenised cache is used")
            return replace(source, files=(), missing=then), then
        if needs_rows:
            raise UserError(
                f"data.source {source.name} ({address}): {what} is missing. Training"
                " could continue from the tokenised cache, but evaluation.metrics needs the rows:"
                " restore it, or set `metrics: [loss]`"
            )
        self._note(
            f"{address} ({source.name}): {what} is missing; the run continues from its tokenised"
            " cache"
        )
        return replace(source, files=(), missing=then), then

    def _tokenizer(self, training: list[tuple[DataSource, SourceContents]]) -> TextTokenizer:
        setting = self.data.tokenizer
        if self.tokenizer_directory is not None or not isinstance(setting, TrainTokenizer):
            return configured_tokenizer(self.config, self.tokenizer_directory)
        contents = [found.key + source.kind_of_file for source, found in training]
        limits = [source.config.max_samples for source, _ in training]
        key = json_digest(
            [
                contents,
                self.split.__dict__,
                self.format.__dict__,
                *([limits] if any(limits) else []),
            ]
        )
        readable = sources_with_text([source for source, _ in training])
        texts = training_texts(readable, self.format, self.split, self.data.on_error)
        return trained_tokenizer(setting, key, texts, self.root, for_chats=self.format.is_chat)

    def _sequences(
        self, source: DataSource, contents: SourceContents, split: HeldOutSplit
    ) -> dict[int, Sequences]:
        """The parts of a source, cached or built now; Megatron data are read in place."""
        if source.is_megatron:
            return {TRAIN: self.megatron.sequences(source, contents)}
        settings = replace(self.settings, split=split)
        described = {
            **settings.__dict__,
            "tokenizer_json": self.tokenizer.key,
            "format": self.format.__dict__,
            "split": split.__dict__,
            "bos_id": start_ids_key(settings.start_ids),
        }
        for key in ("start_ids", "template_origin", "on_error", "date"):
            del described[key]
        if source.config.max_samples is not None:
            described["max_samples"] = source.config.max_samples
        kind = (
            self.format.name
            if self.format.is_chat
            else ""
            if settings.start_ids
            else "no start token"
        )
        version = ENCODING_VERSIONS.get(kind, 1)
        key = json_digest(
            [version, contents.key, described, self.data.packing, self.tokenizer.pad_id]
        )
        # The content key of one file depends neither on its name nor on its format.
        directory = self.root / "tokenized" / f"{key}-{FORMAT_VERSION}{source.kind_of_file}"
        parts = [TRAIN, HELD_OUT] if split.fraction else [TRAIN]
        manifest = self._open_or_build(source, contents, directory, settings, parts)
        return {
            part: CachedSequences(
                directory,
                PART_NAMES[part],
                manifest["parts"][PART_NAMES[part]],
                source.name,
                self.vocab_size,
            )
            for part in parts
        }

    def _open_or_build(
        self,
        source: DataSource,
        contents: SourceContents,
        directory: Path,
        settings: EncodeSettings,
        parts: list[int],
    ) -> dict[str, Any]:
        try:
            return open_cache(directory, "sizes" if self.only_open else "start")
        except FileNotFoundError:
            if self.only_open:
                raise UserError(
                    f"{directory}: missing, though another rank built it. "
                    "data.cache_directory must be on a disk that all hosts share."
                ) from None
        except DamagedCache as damage:
            if self.only_open:
                raise UserError(
                    f"{directory}: the tokenised cache is damaged ({damage}). Start again to"
                    " rebuild it."
                ) from None
            self._note(
                f"the tokenised cache of {source.name} was damaged ({damage}) and is rebuilt"
            )
            remove_cache(directory)
        part_settings = PartSettings(
            settings.sequence_length, self.data.packing, self.tokenizer.pad_id, settings.dtype,
            covers_text=self.format.name == "text"
            and (bool(settings.start_ids) or is_byte_level(settings.tokenizer_json)),
        )  # fmt: skip
        return build_cache(
            directory,
            lambda: self.encoded(source, contents, settings),
            parts,
            part_settings,
            self._note,
        )

    def encoded(
        self, source: DataSource, contents: SourceContents, settings: EncodeSettings
    ) -> Iterator[Encoded]:
        """The rows of a source, encoded, in order. UserError if the source changes meanwhile."""
        done, total = 0, source.nbytes
        try:
            for encoded in encode_all(source.batches(), settings, self.num_workers):
                encoded.origins = tuple(
                    (source.name_of(name), unit) for name, unit in encoded.origins
                )
                yield encoded
                done += encoded.nbytes
                if self.on_progress is not None:
                    self.on_progress(f"tokenising {source.name}", done, total)
            if self.sample_bytes is not None and done >= self.sample_bytes:
                self.read_shares[source.name] = done / total if total else None
        except UserError:
            # A row that is wrong because the source changed under the reader is not the user's to
            # fix.
            self._require_unchanged(source, contents)
            raise
        # The key of the cache is the content before reading: the content that was read must be the
        # same.
        self._require_unchanged(source, contents)

    def _require_unchanged(self, source: DataSource, contents: SourceContents) -> None:
        if source.files and (now := source.contents(self.root / "hashes")) != contents:
            raise UserError(
                f"data.source {source.name} ({shown_address(source.config.path)}) changed while it"
                f" was tokenised: {describe_change(now, contents)}. Start again when it is"
                " complete."
            )

    def _not_empty(self, sequences: Sequences, source: DataSource, kind: str) -> Sequences:
        """The sequences. UserError if there are none, or a row is at fault that costs more than
        itself."""
        counts = {key: value for key, value in sequences.counts.items() if value}
        rows, at_fault = counts.get("rows", 0), counts.get(AT_FAULT, 0)
        if at_fault and (self.data.on_error == "refuse" or at_fault == rows):
            place = first_place(AT_FAULT, source.config.path, sequences)
            more = f" ({at_fault:,} of {rows:,} rows are at fault)" if rows > 1 else ""
            raise UserError(f"{place}{sequences.first_fault}{more}")
        if len(sequences):
            return sequences
        name = source.name
        if not rows:
            advice = (
                "raise data.held_out.fraction"
                if kind == "held-out"
                else "check the source (and data.held_out.fraction)"
            )
            raise UserError(
                f"data.source {name}: the {kind} data set is empty (no rows); {advice}."
            )
        became = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in counts.items())
        if counts.get("without_assistant_turn") == rows:
            raise UserError(
                f"data.source {name}: no {kind} row has a message of the assistant ({became}). Give"
                " those messages the role assistant, or learn everything by data.loss_on: all."
            )
        raise UserError(
            f"data.source {name}: no {kind} document is left with a token that carries loss"
            f" ({became}). Check data.too_long, data.sequence_length and the columns."
        )

    def _note(self, text: str) -> None:
        self.report.notes.append(text)
