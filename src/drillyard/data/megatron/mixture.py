"""Training samples in the order in which Megatron-LM would take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from drillyard.data.mapped_sequences import Sequences
from drillyard.data.megatron.sample_order import blend
from drillyard.data.sampler import BatchShape, Mixture, SampleRef


class MegatronMixture(Mixture):
    """A stream of exactly `num_samples` samples, or a few more of a blend; sample i of a source is
    its i-th.

    Its sources have Megatron-LM's order already. An epoch, for those who count it, is the whole
    stream.
    """

    def __init__(
        self, sources: Sequence[Sequences], weights: Sequence[float], seed: int, num_samples: int
    ) -> None:
        super().__init__(sources, weights, seed)
        self._owners = (
            blend(weights, num_samples) if len(sources) > 1 else np.zeros(num_samples, np.int16)
        )
        self._rows = np.zeros(num_samples, np.int64)
        for number in range(len(sources)):
            mine = self._owners == number
            self._rows[mine] = np.arange(np.count_nonzero(mine))
        self.num_sequences = num_samples
        self.fingerprint = xxhash.xxh3_128_hexdigest(
            repr([self.fingerprint, "megatron", num_samples]).encode()
        )

    def indices(self, step: int, shape: BatchShape) -> list[SampleRef]:
        numbers = self.samples_of_step(step, shape)
        assert numbers.stop <= self.num_sequences, (
            f"step {step} is beyond the {self.num_sequences} samples"
        )
        chosen = slice(numbers.start, numbers.stop)
        return list(zip(self._owners[chosen].tolist(), self._rows[chosen].tolist(), strict=True))

    def drawn(self, samples: int) -> dict[str, tuple[int, int]]:
        counts = np.bincount(self._owners[:samples], minlength=len(self.sources)).tolist()
        return {
            source.name: (count, len(source))
            for source, count in zip(self.sources, counts, strict=True)
        }
