"""Poison the edges of rows. The CPU backend, in numpy."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..pool_patcher.sources import SourceTable
from .mixing import as_array, mix_array_
from .poison_reference import FINITE_MASK, POISON_SEED, SOURCE_SHIFT, edges_of
from .poison_reference import poison_slots as poison_rows

Array = npt.NDArray[Any]

_FEW = 128  # slots whose poison is remembered
_FINITE = np.uint64(FINITE_MASK & (1 << 64) - 1)


def poison_array(slots: Array, source_count: int) -> Array:
    """See :func:`poison_reference.poison_words`, of all sources: uint64 (source_count, n)."""
    if len(slots) <= _FEW:  # behind a forward the same is asked again
        return _poison_of(slots.tobytes(), source_count)
    return _make_poison(slots.view(np.uint64), source_count)


@lru_cache(maxsize=4)
def _poison_of(slots: bytes, source_count: int) -> Array:
    return _make_poison(np.frombuffer(slots, dtype=np.uint64), source_count)


def _make_poison(slots: Array, source_count: int) -> Array:
    words: Array = _seeds_of(source_count) + slots
    mix_array_(words, np.empty_like(words))
    words &= _FINITE
    words.flags.writeable = False
    return words


@cache
def _seeds_of(source_count: int) -> Array:
    sources = np.arange(source_count, dtype=np.uint64)[:, None] << np.uint64(SOURCE_SHIFT)
    return sources + np.uint64(POISON_SEED)


def poison_slots(*, table: SourceTable, slots: torch.Tensor, chosen: torch.Tensor) -> None:
    """See :func:`poison_reference.poison_slots`."""
    ids = as_array(slots)
    if len(ids) and ids.view(np.uint64).max() >= table.slot_count:
        ids = ids[(ids >= 0) & (ids < table.slot_count)]
    wanted = as_array(chosen)
    words = poison_array(ids, len(table.sources))
    for index, array in enumerate(table.arrays):
        if not wanted[index]:
            continue
        if array is None:
            only = torch.zeros_like(chosen)
            only[index] = 1
            poison_rows(table=table, slots=slots, chosen=only)
            continue
        for edge in edges_of(table.sources[index].read_bytes):
            array[ids, edge] = words[index]
