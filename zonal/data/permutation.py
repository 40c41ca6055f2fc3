"""Pseudo-random permutations of 0 … n-1 that are evaluated point by point, in O(1) memory.

A balanced Feistel network permutes the smallest power of four that holds n; points that land outside 0 … n-1 are sent
through again until they land inside (cycle walking), which keeps it a bijection (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002). A data order that is a function of (key, position) needs no state to resume and no
table for a large corpus.
"""

import numpy as np

from zonal.errors import ArgumentError

_ROUNDS = 6


def mix(x: np.ndarray) -> np.ndarray:
    """The 64-bit finaliser of SplitMix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(positions: np.ndarray, count: int, key: tuple[int, ...]) -> np.ndarray:
    """The images of ``positions`` under the permutation of 0 … count-1 named by ``key``.

    positions: integers in [0, count), any shape. key: non-negative integers, e.g. (seed, epoch).
    Returns int64 of the same shape; over all positions every number below ``count`` comes exactly once.
    Raises: ArgumentError when count < 1, a position is outside, or the key has a negative number.
    """
    if count < 1:
        raise ArgumentError(f"permuted: count must be at least 1, got {count}.")
    if any(part < 0 for part in key):
        raise ArgumentError(f"permuted: the parts of key must not be negative, got {key}.")
    points = np.atleast_1d(np.asarray(positions, dtype=np.int64))
    if points.size and (points.min() < 0 or points.max() >= count):
        raise ArgumentError(f"permuted: positions must lie in [0, {count}), got [{points.min()}, {points.max()}].")
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def encipher(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        return (left << half) | right

    image = encipher(points.astype(np.uint64))
    outside = image >= count
    while outside.any():
        image[outside] = encipher(image[outside])
        outside = image >= count
    return image.astype(np.int64).reshape(np.shape(positions))


def shuffled_rows(numbers: np.ndarray, count: int, seed: int, *key: int) -> np.ndarray:
    """The rows of a table of ``count`` rows that examples with these numbers see, when each pass over the table is in
    an order of its own, named by (seed, pass, *key). numbers: from 0 on, (N,). Returns int64 (N,).
    """
    passes, places = np.divmod(numbers, count)
    rows = np.empty_like(places)
    for number in np.unique(passes).tolist():
        rows[passes == number] = permuted(places[passes == number], count, (seed, number, *key))
    return rows
