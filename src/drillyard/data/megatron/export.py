"""The training documents of a run as Megatron data."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from drillyard.config.run import RunConfig, TrainTokenizer
from drillyard.data.encoder import HELD_OUT, TRAIN
from drillyard.data.megatron.indexed_file import IndexedFileWriter
from drillyard.data.prepared_data import OnProgress, encoded_documents
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
                    for encoded in documents():
                        for part, writer in writers.items():
                            if (pieces := encoded.parts[part].pieces) is not None:
                                writer.add(pieces.tokens, pieces.lengths)
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
