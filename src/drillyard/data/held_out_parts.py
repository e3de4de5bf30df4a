"""Choice of the documents that are held out, and of rows (not tokens) of them for metrics that
generate text.

Held-out data are `data.held_out.source` if set; otherwise a share (`fraction`) of each source's
documents by hash, and the held-out parts of built-in sets. A separate source is named like that
source, a share of a training source (or a separate source with the name of one) `source/held_out`,
a built-in part `source/part`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import xxhash

from drillyard.config.run import RunConfig
from drillyard.config.run_data import DataConfig
from drillyard.data.encoder import HELD_OUT, TRAIN, HeldOutSplit
from drillyard.data.raw_batches import Row, RowOrError, decoded_row
from drillyard.data.row_formats import RowFormat, row_format
from drillyard.data.sources import DataSource, SourceContents, resolve_sources
from drillyard.data.tokenizer import TRAINING_BYTES
from drillyard.errors import UserError

SPLIT_SUFFIX = "/held_out"
"""A training source's name with this suffix names its held-out share."""


def split_part_name(source: DataSource) -> str:
    """Name of the held-out share of a training source."""
    return source.name + SPLIT_SUFFIX


def find_part(name: str, parts: Collection[str]) -> str | None:
    """The held-out part that a setting names; a share may be named by its source alone, as in old
    configs."""
    return next((part for part in (name, name + SPLIT_SUFFIX) if part in parts), None)


def split_of(data: DataConfig) -> HeldOutSplit:
    """The split of the training sources' documents."""
    held_out = data.held_out
    if held_out.split_by is not None and held_out.fraction == 0.0:
        raise UserError(
            "data.held_out.split_by needs data.held_out.fraction: the share of its values that is"
            " held out."
        )
    if held_out.source is not None and held_out.fraction:
        raise UserError("data.held_out: give either a source or a fraction, not both.")
    return HeldOutSplit(held_out.fraction, held_out.split_by)


def held_out_sources(
    data: DataConfig,
    sources: list[DataSource],
    recorded: Mapping[str, SourceContents] | None = None,
) -> dict[str, DataSource]:
    """Held-out sets that are read whole: those of `held_out.source`, else the parts of built-in
    training sets.

    `recorded` as in `resolve_source`.
    """
    found: dict[str, DataSource] = {}
    configured = data.held_out.source
    for source in sources if configured is None else resolve_sources(configured, recorded):
        if source.builtin is not None:
            from drillyard.data import builtin

            for part in builtin.held_out_parts(source.builtin, source.config.options):
                name = f"{source.name}/{part}"
                found[name] = DataSource(name, 1.0, source.config, builtin_part=part)
        elif configured is not None:
            trained = next(
                (other.config.path for other in sources if other.name == source.name),
                source.config.path,
            )
            found[source.name if trained == source.config.path else split_part_name(source)] = (
                source
            )
    return found


def held_out_names(config: RunConfig) -> list[str]:
    """Names of the run's held-out sets, in the order of `PreparedData.held_out`."""
    sources = resolve_sources(config.data.source)
    shares = (
        [split_part_name(source) for source in sources] if split_of(config.data).fraction else []
    )
    return [*shares, *held_out_sources(config.data, sources)]


@dataclass
class RowsAtFault:
    """Rows that could not be read: how many, and what is wrong with the first, with its place."""

    count: int = 0
    first: str = ""

    def add(self, error: UserError) -> None:
        self.count += 1
        self.first = self.first or str(error)


def evaluation_rows(
    config: RunConfig, part_name: str, limit: int, at_fault: RowsAtFault | None = None
) -> list[Row]:
    """At most `limit` held-out rows with the format's own column names, for metrics that generate
    text. Rows that cannot be read are left out and counted in `at_fault`; UserError if all are.

    The choice is pseudo-random but fixed: the rows with the smallest hashes, in that order. It
    depends only on the rows, not on their order, and a smaller limit gives a prefix of a larger
    one's.
    """
    sources = resolve_sources(config.data.source)
    form, split = row_format(config.data), split_of(config.data)
    whole, on_error = held_out_sources(config.data, sources), config.data.on_error
    shares = {split_part_name(source): source for source in sources} if split.fraction else {}
    name = find_part(part_name, {**whole, **shares})
    at_fault = at_fault if at_fault is not None else RowsAtFault()
    if name in whole:
        rows = canonical_rows(whole[name], form, HeldOutSplit(), TRAIN, on_error, at_fault)
    elif name in shares:
        rows = canonical_rows(shares[name], form, split, HELD_OUT, on_error, at_fault)
    else:
        raise UserError(
            f"no held-out set is named {part_name!r}; the names are:"
            f" {', '.join(held_out_names(config)) or '(none)'}."
        )
    chosen = heapq.nsmallest(
        limit,
        ((_row_hash(form, row, where), number, row) for number, (row, where) in enumerate(rows)),
    )
    if not chosen and at_fault.count:
        raise UserError(at_fault.first)
    if not chosen:
        raise UserError(f"held-out set {part_name!r} has no rows. Raise data.held_out.fraction.")
    return [row for _, _, row in chosen]


def _row_hash(form: RowFormat, row: Row, where: str) -> int:
    return xxhash.xxh3_64_intdigest(
        b"evaluation" + form.identity(row, where).encode("utf-8", "surrogatepass")
    )


def canonical_rows(
    source: DataSource,
    form: RowFormat,
    split: HeldOutSplit,
    part: int,
    on_error: str,
    at_fault: RowsAtFault | None = None,
) -> Iterator[tuple[Row, str]]:
    """Canonical rows of one part of a source and their places. A row at fault is a UserError where
    `on_error` is `refuse`; otherwise it is left out, and counted in `at_fault`."""
    for batch in source.batches():
        for number, item in batch.rows():
            where = batch.where(number)
            try:
                canonical, found = canonical_row(item, form, split, where)
            except UserError as error:
                if on_error == "refuse":
                    raise
                if at_fault is not None:
                    at_fault.add(error)
                continue
            if found == part:
                yield canonical, where


def canonical_row(
    item: RowOrError, form: RowFormat, split: HeldOutSplit, where: str
) -> tuple[Row, int]:
    """The canonical row and its part. UserError if it is at fault."""
    row = decoded_row(item)
    canonical = form.canonical(row, where)
    part = split.part_of(row, form.identity(canonical, where), where)
    if not form.is_chat:
        form.segments(canonical, where)
    return canonical, part


def training_texts(
    sources: list[DataSource], form: RowFormat, split: HeldOutSplit, on_error: str
) -> Iterator[str]:
    """Texts of training documents (never held-out ones) to train a tokenizer from; equal shares up
    to a limit. `on_error` as for `canonical_rows`."""
    if form.is_chat:
        from drillyard.data.chat_template import trained_template_texts

        texts_of = trained_template_texts(form)
    else:

        def texts_of(row: Row, where: str) -> Iterator[str]:
            return (text for text, _ in form.segments(row, where))

    for source in sources:
        room = TRAINING_BYTES // len(sources)
        for row, where in canonical_rows(source, form, split, TRAIN, on_error):
            try:
                texts = list(texts_of(row, where))
            except UserError:
                if on_error == "refuse":
                    raise
                continue
            for text in texts:
                yield text
                room -= len(text)
            if room <= 0:
                break
