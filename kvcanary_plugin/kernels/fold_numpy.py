"""Digest and locator of chosen slots over all sources. The CPU backend, in numpy, block by block within the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..pool_patcher.sources import SourceTable
from . import record as r
from .fold_reference import BLOCK_WORDS
from .mixing import as_array, mix_array_

Array = npt.NDArray[Any]


def fold_ids(table: SourceTable, ids: Array) -> tuple[Array, Array]:
    """Digest and locator, int64 (n,) each, of slots (int64 (n,)) that lie within the table."""
    digest, locator = np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=np.int64)
    keys, weights = as_array(table.keys).view(np.uint64), as_array(table.weights)
    for first, last, width in table.runs:
        slots_a_block = max(1, min(len(ids), BLOCK_WORDS // width))
        sources_a_block = max(1, min(last - first, BLOCK_WORDS // (width * slots_a_block)))
        # Nothing of this stays resident: a block is small enough for the allocator to hand out the same memory again.
        scratch = np.empty((2, sources_a_block * slots_a_block * width), dtype=np.uint64)
        for start in range(0, len(ids), slots_a_block):
            chosen = ids[start : start + slots_a_block]
            for source in range(first, last, sources_a_block):
                stop = min(source + sources_a_block, last)
                shape = (stop - source, len(chosen), width)
                words, spare = (block[: shape[0] * shape[1] * shape[2]].reshape(shape) for block in scratch)
                for index in range(source, stop):
                    _gather(table, index, chosen, words[index - source])
                words ^= keys[source:stop, None, :width]
                parts = mix_array_(words, spare).sum(2).view(np.int64)
                digest[start : start + slots_a_block] += parts.sum(0)
                locator[start : start + slots_a_block] += weights[source:stop] @ parts
    return digest, locator


def _gather(table: SourceTable, index: int, ids: Array, out: Array) -> None:
    array = table.arrays[index]
    if array is not None:
        # The ids are in range already; with any other mode numpy would gather into a buffer first.
        array.take(ids, 0, out, "clip")
    else:
        table.sources[index].gather_words(torch.from_numpy(ids), out=torch.from_numpy(out.view(np.int64)))


def fold_slots(table: SourceTable, slots: torch.Tensor, *, digest: torch.Tensor, locator: torch.Tensor) -> None:
    """See :func:`.fold_reference.fold_slots`."""
    as_array(digest)[:], as_array(locator)[:] = fold_ids(table, as_array(slots))


def seal_slots(*, records: torch.Tensor, table: SourceTable, slots: torch.Tensor) -> None:
    """See :func:`.fold_reference.seal_slots`."""
    kept, ids = as_array(records), as_array(slots)
    ids = ids[(ids >= 0) & (ids < len(kept))]
    kept[ids, r.DIGEST], kept[ids, r.LOCATOR] = fold_ids(table, ids)
