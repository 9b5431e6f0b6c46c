"""Digest and locator of chosen slots over all sources. The CPU backend, in numpy, block by block within the cache."""

from __future__ import annotations

import numpy as np
import torch

from ..pool_patcher.sources import SourceTable
from . import record as r
from .fold_reference import BLOCK_WORDS
from .mixing import as_array, mix_array_


def fold_slots(table: SourceTable, slots: torch.Tensor, *, digest: torch.Tensor, locator: torch.Tensor) -> None:
    """See :func:`.fold_reference.fold_slots`."""
    chosen, digests, locators = as_array(slots), as_array(digest), as_array(locator)
    keys = as_array(table.keys).view(np.uint64)
    digests[:] = 0
    locators[:] = 0
    for first, last, width in table.runs:
        slots_a_block = max(1, min(len(chosen), BLOCK_WORDS // width))
        sources_a_block = max(1, min(last - first, BLOCK_WORDS // (width * slots_a_block)))
        # Nothing of this stays resident: a block is small enough for the allocator to hand out the same memory again.
        scratch = np.empty((2, sources_a_block * slots_a_block * width), dtype=np.uint64)
        for start in range(0, len(chosen), slots_a_block):
            picked = chosen[start : start + slots_a_block]
            for source in range(first, last, sources_a_block):
                stop = min(source + sources_a_block, last)
                shape = (stop - source, len(picked), width)
                words, spare = (block[: shape[0] * shape[1] * shape[2]].reshape(shape) for block in scratch)
                for index in range(source, stop):
                    _gather(table, index, picked, slots, start, words[index - source])
                words ^= keys[source:stop, None, :width]
                parts = mix_array_(words, spare).sum(2).view(np.int64)
                digests[start : start + slots_a_block] += parts.sum(0)
                parts *= np.arange(2 * source + 1, 2 * stop, 2)[:, None]
                locators[start : start + slots_a_block] += parts.sum(0)


def _gather(
    table: SourceTable, index: int, picked: np.ndarray, slots: torch.Tensor, start: int, out: np.ndarray
) -> None:
    words = table.arrays[index]
    if words is not None:
        words.take(
            picked, axis=0, out=out, mode="clip"
        )  # clip: in range already, and numpy then writes without a buffer
    else:
        table.sources[index].gather_words(slots[start : start + len(picked)], out=torch.from_numpy(out.view(np.int64)))


def seal_slots(*, records: torch.Tensor, table: SourceTable, slots: torch.Tensor) -> None:
    """See :func:`.fold_reference.seal_slots`."""
    inside = torch.where((slots < 0) | (slots >= records.shape[0]), 0, slots)
    sums = torch.empty((2, slots.numel()), dtype=torch.int64)
    fold_slots(table, inside, digest=sums[0], locator=sums[1])
    as_array(records)[as_array(inside), r.DIGEST : r.LOCATOR + 1] = as_array(sums).T
