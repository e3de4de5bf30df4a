"""The checksum of a base model's weights: what a checkpoint of adapters, which does not hold them,
belongs to.

It covers every byte of the weight files, whatever their names. Cost: each start reads the files
once more, each by one rank.
"""

from __future__ import annotations

from drillyard.config.model_files import weight_files
from drillyard.errors import UserError
from drillyard.models.pretrained import model_directory
from drillyard.parallel.collectives import gather, rank_and_size
from drillyard.training.checkpoint.manifest import checksum, file_checksum


def base_checksum(source: str | None) -> str:
    """XXH3-128 over the checksums of the weight files of `source`, a directory or hub id.
    Collective.

    Raises UserError where there are none or one cannot be read.
    """
    assert source is not None, "adapters train on a pretrained model"
    rank, world_size = rank_and_size()
    files = weight_files(model_directory(source))
    own: dict[int, str] = {}
    problem = None
    try:
        own = {
            number: file_checksum(files[number]) for number in range(rank, len(files), world_size)
        }
    except OSError as error:
        problem = f"{error.filename or source}: cannot be read: {error.strerror}"
    found: dict[int, str] = {}
    for failed, part in gather((problem, own)):
        if failed is not None:
            raise UserError(failed)
        found |= part
    return checksum("".join(found[number] for number in sorted(found)).encode())
