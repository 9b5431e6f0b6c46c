"""The integer arithmetic every backend agrees on, bit for bit. All of it is modulo 2^64.

``mix`` is the finalizer of splitmix64, a bijection on 64-bit words. torch has no unsigned 64-bit arithmetic worth
using, so words are int64 with wrap-around and every right shift is masked to make it logical.

- ``chain[p] = anchor + sum over i <= p of mix(token_i + 2^32 * i)``
- ``digest = sum over (source b, word j) of mix(word XOR key(b, j))``, ``key(b, j) = mix(SEED + b * 2^32 + j)``
- ``locator = sum over b of (2b + 1) * d_b``, ``d_b`` being the part of source b in the digest
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

SEED: Final = 0x6B7663616E617279  # "kvcanary"; the key of (0, 0) is therefore not zero
MULTIPLIER_1: Final = 0xBF58476D1CE4E5B9
MULTIPLIER_2: Final = 0x94D049BB133111EB
POSITION_SHIFT: Final = 32

_U64: Final = (1 << 64) - 1
_ARRAY: Final = "kvcanary_array"
# A logical right shift by s is an arithmetic one whose s copies of the sign are masked away.
_STEPS: Final = ((30, (1 << 34) - 1), (27, (1 << 37) - 1), (31, (1 << 33) - 1))
_ARRAY_STEPS: Final = (
    (np.uint64(30), np.uint64(MULTIPLIER_1)),
    (np.uint64(27), np.uint64(MULTIPLIER_2)),
    (np.uint64(31), None),
)


def as_int64(value: int) -> int:
    """The signed number that has the same 64 bits as ``value``."""
    value &= _U64
    return value - (1 << 64) if value >> 63 else value


def mix_int(value: int) -> int:
    """``mix`` of one Python integer, as an unsigned 64-bit number. The definition; slow."""
    value &= _U64
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & _U64
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & _U64
    return value ^ (value >> 31)


def mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``mix`` of a numpy uint64 array of any shape, into a new array. What the host uses for true prefix hashes."""
    mixed = values.copy()
    return mix_array_(mixed, np.empty_like(mixed))


def mix_array_(words: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``mix`` of a numpy uint64 array, in place. ``scratch`` has the same shape. Returns ``words``."""
    for shift, multiplier in _ARRAY_STEPS:
        np.right_shift(words, shift, scratch)
        np.bitwise_xor(words, scratch, words)
        if multiplier is not None:
            np.multiply(words, multiplier, words)
    return words


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A CPU tensor as a numpy array over the same memory, which is kept with the tensor.

    Small operations cost a third in numpy of what they cost in torch, and there are some fifty of them in a decode
    step. So on a CPU the references are the definition and numpy does the work; the tests hold the two equal. Making
    the array costs as much as what is done with it, so this is for tensors that live long.
    """
    kept: npt.NDArray[Any] | None = tensor.__dict__.get(_ARRAY)
    if kept is None:
        kept = tensor.__dict__[_ARRAY] = tensor.detach().numpy()  # detached: an array holds on to its tensor
    return kept


def mix_(words: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """``mix`` of an int64 tensor, in place. ``scratch`` has the same shape and is overwritten. Returns ``words``."""
    for (shift, mask), multiplier in zip(_STEPS, (MULTIPLIER_1, MULTIPLIER_2, None), strict=True):
        torch.bitwise_right_shift(words, shift, out=scratch)
        scratch.bitwise_and_(mask)
        words.bitwise_xor_(scratch)
        if multiplier is not None:
            words.mul_(as_int64(multiplier))
    return words


def mix(words: torch.Tensor) -> torch.Tensor:
    """``mix`` of an int64 tensor of any shape, into a new tensor."""
    mixed = words.clone()
    return mix_(mixed, torch.empty_like(mixed))


def make_keys(source_count: int, word_count: int, device: torch.device | str) -> torch.Tensor:
    """``key(b, j)`` for b < ``source_count`` and j < ``word_count``: int64 of shape (source_count, word_count)."""
    b = np.arange(source_count, dtype=np.uint64)[:, None] << np.uint64(32)
    keys = mix_array(np.uint64(SEED) + b + np.arange(word_count, dtype=np.uint64)[None, :])
    return torch.from_numpy(keys.view(np.int64)).to(device)


def locate_source(digest: int, locator: int, found_digest: int, found_locator: int, source_count: int) -> int | None:
    """Index of the one source whose bytes changed, or None if several did. Arguments are 64-bit words of either sign.

    The sum of one source enters the locator ``2b + 1`` times, so for a single damaged source b the locator moved by
    ``2b + 1`` times what the digest moved. Searching is needed: half of all differences are even and have no inverse.
    """
    moved = found_digest - digest
    target = as_int64(found_locator - locator)
    candidates = [b for b in range(source_count) if as_int64(moved * (2 * b + 1)) == target]
    return candidates[0] if len(candidates) == 1 else None
