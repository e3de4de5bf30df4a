"""The training documents of a run as Megatron data."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from drillyard.config.run import RunConfig
from drillyard.config.run_data import TrainTokenizer
from drillyard.data.encoder import AT_FAULT, HELD_OUT, TRAIN, Encoded
from drillyard.data.megatron.indexed_file import IndexedFileWriter
from drillyard.data.prepared_data import OnProgress, encoded_documents
from drillyard.data.raw_batches import NUMBER_BITS, format_location
from drillyard.data.tokenizer import TextTokenizer
from drillyard.data.tokenizer_files import tokenizer_files
from drillyard.errors import UserError
from drillyard.export_directory import locked
from drillyard.safe_files import describe_os_error, make_directory, replace_file

TOKENIZER = "tokenizer"
_PARTS = {TRAIN: "", HELD_OUT: ".held_out"}


def write_megatron(
    config: RunConfig, directory: Path, on_progress: OnProgress | None = None
) -> list[str]:
    """Write `NAME.bin` and `NAME.idx` of each training source, and `NAME.held_out` of a held-out
    fraction.

    A tokenizer that is trained from the documents goes to `tokenizer`: without it the files cannot
    be read. Returns a line on each of these. UserError if a file exists, or if the format learns
    from part of a document only, which these files cannot say.
    """
    if config.data.format != "text":
        raise UserError(
            f"data.format: {config.data.format} learns from part of a document, and Megatron files"
            " cannot say from which. Write format: text only."
        )
    tokenizer, sources = encoded_documents(config, on_progress)
    for name in sources:
        if Path(name).name != name:
            raise UserError(
                f"data.source {name}: its name cannot be that of a file. Give it another: name:"
                " NAME."
            )
    is_trained = isinstance(config.data.tokenizer, TrainTokenizer)
    parts = [TRAIN, HELD_OUT] if config.data.held_out.fraction else [TRAIN]
    lines = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            if is_trained:
                _require_absent(directory / TOKENIZER)
            for name, documents in sources.items():
                writers = {
                    part: IndexedFileWriter(
                        directory / f"{name}{_PARTS[part]}", tokenizer.vocab_size
                    )
                    for part in parts
                }
                for path in (path for writer in writers.values() for path in writer.paths):
                    _require_absent(path)
                with contextlib.ExitStack() as stack:
                    for writer in writers.values():
                        stack.enter_context(writer)
                    faults = _Faults(name)
                    for encoded in documents():
                        faults.add(encoded)
                        for part, writer in writers.items():
                            if (pieces := encoded.parts[part].pieces) is not None:
                                writer.add(pieces.tokens, pieces.lengths)
                    faults.require_some_rows()
                lines += faults.lines()
                lines += [
                    f"{writer.paths[0]}: {writer.num_documents:,} documents, {writer.num_tokens:,}"
                    " tokens"
                    for writer in writers.values()
                ]
            if is_trained:
                _write_tokenizer(tokenizer, directory / TOKENIZER)
                lines.append(
                    f"{directory / TOKENIZER}: the tokenizer that was trained from them, for"
                    " data.tokenizer"
                )
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({describe_os_error(error)}).") from None
    return lines


@dataclass
class _Faults:
    """The rows of a source that are at fault and left out."""

    name: str
    rows: int = 0
    at_fault: int = 0
    first: str = ""

    def add(self, encoded: Encoded) -> None:
        for part in encoded.parts.values():
            self.rows += part.counts["rows"]
            self.at_fault += part.counts[AT_FAULT]
            if part.first_fault and not self.first:
                number, line = divmod(part.firsts[AT_FAULT], 1 << NUMBER_BITS)
                file, unit = encoded.origins[number]
                self.first = format_location((file or self.name, unit), line) + part.first_fault

    def require_some_rows(self) -> None:
        if self.at_fault and self.at_fault == self.rows:
            raise UserError(f"data.source {self.name}: every row is at fault; {self.first}")

    def lines(self) -> list[str]:
        if not self.at_fault:
            return []
        return [
            f"{self.name}: {self.at_fault:,} of {self.rows:,} rows are at fault and left out; the"
            f" first is {self.first}"
        ]


def _write_tokenizer(tokenizer: TextTokenizer, directory: Path) -> None:
    try:
        for name, content in tokenizer_files(tokenizer).items():
            make_directory((directory / name).parent, parents=True)
            replace_file(directory / name, content)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _require_absent(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path}: exists and is not replaced. Name another --output, or delete it.")
