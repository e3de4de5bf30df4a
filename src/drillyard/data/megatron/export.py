"""The training documents of a run as Megatron data."""

from __future__ import annotations

import contextlib
from pathlib import Path

from drillyard.config.run import RunConfig
from drillyard.data.encoder import HELD_OUT, TRAIN
from drillyard.data.megatron.indexed_file import IndexedFileWriter
from drillyard.data.prepared_data import OnProgress, encoded_documents
from drillyard.errors import UserError
from drillyard.safe_files import describe_os_error

_PARTS = {TRAIN: "", HELD_OUT: ".held_out"}


def write_megatron(config: RunConfig, directory: Path, on_progress: OnProgress | None = None) -> list[str]:
    """Write `NAME.bin` and `NAME.idx` of each training source, and `NAME.held_out` of a held-out fraction.

    Returns a line on each pair. UserError if a file exists, or if the format learns from part of a document only, which
    these files cannot say.
    """
    if config.data.format != "text":
        raise UserError(
            f"data.format: {config.data.format} learns from part of a document, and Megatron files cannot say from "
            "which. Write format: text only."
        )
    vocab_size, sources = encoded_documents(config, on_progress)
    parts = [TRAIN, HELD_OUT] if config.data.held_out.fraction else [TRAIN]
    lines = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, documents in sources.items():
            writers = {part: IndexedFileWriter(directory / f"{name}{_PARTS[part]}", vocab_size) for part in parts}
            for path in (path for writer in writers.values() for path in writer.paths):
                if path.exists():
                    raise UserError(f"{path}: exists and is not replaced. Name another --output, or delete it.")
            with contextlib.ExitStack() as stack:
                for writer in writers.values():
                    stack.enter_context(writer)
                for encoded in documents():
                    for part, writer in writers.items():
                        if (pieces := encoded.parts[part].pieces) is not None:
                            writer.add(pieces.tokens, pieces.lengths)
            lines += [
                f"{writer.paths[0]}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens"
                for writer in writers.values()
            ]
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({describe_os_error(error)}).") from None
    return lines
