"""A seeded random order of 0..n-1 that needs no memory: position -> item in O(1).

A Feistel network is a bijection of w-bit numbers whatever its round function is. Items beyond n are walked through
("cycle walking": apply the network until the result is below n), which leaves a bijection of 0..n-1. With 2**(w-1) <
n <= 2**w a walk takes fewer than two steps on average. Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(2002).

Used for the order of an epoch: resuming at any sample costs the same as starting, and no rank stores or agrees on a
list.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

ROUNDS = 8
CHUNK = 4096
"""Positions that are computed together: numpy's cost per call is then spread over many batches."""


def permute(positions: npt.NDArray[np.uint64], n: int, key: int) -> npt.NDArray[np.int64]:
    """Images of `positions` (each below n) under the permutation of 0..n-1 named by `key`."""
    values = positions.astype(np.uint64)
    if n <= 1:
        return values.astype(np.int64)
    width = (n - 1).bit_length()
    walking = np.arange(len(values))
    while len(walking):
        stepped = _feistel(values[walking], width, key)
        values[walking] = stepped
        walking = walking[stepped >= n]
    return values.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], width: int, key: int) -> npt.NDArray[np.uint64]:
    """One bijection of `width`-bit numbers: rounds in which one half, mixed, is xored into the other."""
    low_bits = width // 2
    high_bits = width - low_bits
    for number in range(ROUNDS):
        # The halves swap sizes each round, so that odd widths work: (high, low) -> (low, high ^ f(low)).
        high, low = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
        mixed = _mix(low, xxhash.xxh3_64_intdigest(f"{key}/{number}".encode())) & np.uint64((1 << high_bits) - 1)
        values = (low << np.uint64(high_bits)) | (high ^ mixed)
        low_bits, high_bits = high_bits, low_bits
    return values


def _mix(values: npt.NDArray[np.uint64], round_key: int) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser of value + round key (Steele, Lea and Flood, 2014), modulo 2**64."""
    mixed = values + np.uint64(round_key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@lru_cache(maxsize=64)
def order_chunk(n: int, key: int, chunk: int) -> npt.NDArray[np.int64]:
    """Items at positions [chunk * CHUNK, ...) of the order of n items named by `key`. Shared: do not write to it."""
    first = chunk * CHUNK
    return permute(np.arange(first, min(n, first + CHUNK), dtype=np.uint64), n, key)
