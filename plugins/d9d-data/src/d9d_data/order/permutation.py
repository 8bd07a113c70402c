"""Random permutation of n items that is computed at any index, without a table of n entries.

A Feistel network permutes the numbers of 2h bits with any round function (Luby and Rackoff, How to Construct
Pseudorandom Permutations from Pseudorandom Functions). Applying the network repeatedly until the result is below n
gives a permutation of n items (Black and Rogaway, Ciphers with Arbitrary Finite Domains, section 3).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
# Multipliers of the splitmix64 finaliser.
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

Words = npt.NDArray[np.uint64]


class Permutation:
    """Permutation of 0, ..., size - 1, chosen by a key. The same on every machine and with every version of numpy.

    Args:
        size: number of items, from 1 to 2**62.
        key: any text.

    Raises:
        ValueError: the size is not from 1 to 2**62.
    """

    def __init__(self, size: int, key: str) -> None:
        if not 1 <= size <= 2**62:
            raise ValueError(f"a permutation cannot have {size} items; give a size from 1 to 2**62")
        self._size = np.uint64(size)
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half_bits)
        self._mask = np.uint64(2**half_bits - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys: Words = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Permuted values of ``indices``; same shape.

        Raises:
            IndexError: an index is not in 0, ..., size - 1.
        """
        flat = indices.reshape(-1).astype(np.uint64)
        if np.any(indices < 0) or np.any(flat >= self._size):
            raise IndexError(f"an index is not from 0 to {self._size - 1}, the indices of the permutation")
        values = self._shuffle(flat)
        # There are fewer than 4 * size numbers of 2h bits, so the cycle is followed for less than 4 steps on average.
        while (outside := np.flatnonzero(values >= self._size)).size:
            values[outside] = self._shuffle(values[outside])
        return values.astype(np.int64).reshape(indices.shape)

    def _shuffle(self, values: Words) -> Words:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(words: Words) -> Words:
    """Hash 64-bit words, so that each input bit affects all output bits; multiplication wraps around."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
