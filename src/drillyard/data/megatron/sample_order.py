"""Megatron-LM's own sample order: the arithmetic of megatron-core 0.16, for runs that continue or
repeat one of its.

A data set's documents are shuffled (once for all epochs, or the last epoch apart if it is used by
less than 80 %), laid one after the other, and cut into samples at multiples of T; the samples are
shuffled again. A blend takes at each sample the data set that is furthest behind its weight. All of
it depends on the number of samples that the whole training asks for: another number is another
order, as it is in Megatron-LM.

Sources: `GPTDataset._build_document_sample_shuffle_indices` (module `gpt_dataset`),
`build_blending_indices` (`helpers.cpp`), `_get_size_per_split_per_dataset` (module
`blended_megatron_dataset_builder`). The random numbers are those of `numpy.random.RandomState`,
which numpy keeps as they are.

Cost: 4 bytes per document and epoch and 4 per sample for each rank; a blend takes about a
microsecond per sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SPLITS = ("train", "valid", "test")
SURPLUS = 0.005
"""Share of samples that each data set of a blend is drawn with in excess
(`mid_level_dataset_surplus`)."""
_SEPARATE_BELOW = 0.80


@dataclass(frozen=True)
class SampleOrder:
    """documents: int32, the documents of the stream in order. samples: sample i begins at token
    samples[i] * T."""

    documents: npt.NDArray[np.int32]
    samples: npt.NDArray[np.uint32 | np.int64]


def split_bounds(split: str, name: str, num_sequences: int) -> tuple[int, int]:
    """First sequence of a split such as `valid` of "969,30,1", and the first after it."""
    shares = [float(part) for part in split.split(",")]
    shares += [0.0] * (len(SPLITS) - len(shares))
    total = float(np.sum(np.array(shares, np.float64)))
    shares = (np.array(shares, np.float64) / total).tolist()
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    at = SPLITS.index(name)
    return round(ends[at] * float(num_sequences)), round(ends[at + 1] * float(num_sequences))


def sample_order(
    lengths: npt.NDArray[np.int32],
    first: int,
    last: int,
    sequence_length: int,
    num_samples: int,
    seed: int,
) -> SampleOrder:
    """The order of the first `num_samples` samples, at least, of documents [first, last) with these
    lengths."""
    per_epoch = int(lengths[first:last].sum(dtype=np.int64))
    epochs = max(1, -(-(num_samples * sequence_length + 1) // per_epoch))
    before_last = ((epochs - 1) * per_epoch - 1) // sequence_length
    separate = epochs > 1 and num_samples - before_last < int(
        _SEPARATE_BELOW * ((per_epoch - 1) // sequence_length)
    )
    random = np.random.RandomState(seed)
    chosen = np.arange(first, last, dtype=np.int32)
    documents = np.concatenate(
        [
            _shuffled(np.tile(chosen, count), random)
            for count in ((epochs - 1, 1) if separate else (epochs,))
        ]
    )
    total = (epochs * per_epoch - 1) // sequence_length
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    cuts = [0, before_last, total] if separate else [0, total]
    samples = np.concatenate(
        [
            _shuffled(np.arange(begin, end, dtype=dtype), random)
            for begin, end in itertools.pairwise(cuts)
        ]
    )
    return SampleOrder(documents, samples)


def _shuffled(values: npt.NDArray[Any], random: np.random.RandomState) -> npt.NDArray[Any]:
    random.shuffle(values)
    return values


def samples_of_sources(weights: Sequence[float], num_samples: int) -> list[tuple[int, int]]:
    """For each source: samples that the blend takes from it, and samples that its own order is made
    for."""
    if len(weights) == 1:
        return [(num_samples, num_samples)]
    taken = [math.ceil(num_samples * weight) for weight in normalized(weights)]
    return [(count, math.ceil(count * (1 + SURPLUS))) for count in taken]


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights with the sum 1, in numpy's rounding."""
    values = np.array(weights, np.float64)
    return [float(weight) for weight in values / np.sum(values)]


def blend(weights: Sequence[float], num_samples: int) -> npt.NDArray[np.int16]:
    """The source of each sample. Ties go to the source that is listed first."""
    # Twice, as the blend's builder and the blend itself do: the second may change the last bit.
    shares = normalized(normalized(weights))
    taken = [0] * len(shares)
    sources = np.zeros(num_samples, np.int16)
    numbers = range(len(shares))
    for sample in range(num_samples):
        position = float(max(sample, 1))
        errors = [shares[number] * position - taken[number] for number in numbers]
        source = errors.index(max(errors))
        sources[sample] = source
        taken[source] += 1
    return sources
