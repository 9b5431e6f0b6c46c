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
from .poison_numpy import poison_array
from .poison_reference import FIRST, LAST, edges_of, report_survivors
from .violations import ViolationBuffer

Array = npt.NDArray[Any]


def fold_ids(table: SourceTable, ids: Array, survivors: Array | None = None) -> tuple[Array, Array]:
    """Digest and locator, int64 (n,) each, of slots (int64 (n,)) that lie within the table.

    Args:
        survivors: int64 (source_count, m), all 0, or None. Out: which edges of the first m slots hold their poison,
            see :func:`poison_reference.find_survivors`.
    """
    digest, locator = np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=np.int64)
    poisoned = 0 if survivors is None else survivors.shape[1]
    poison = poison_array(ids[:poisoned], len(table.sources))
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
                if survivors is not None and start < poisoned:
                    part = slice(start, min(start + slots_a_block, poisoned))
                    _find_edges(
                        words, table.sources[source].read_bytes, poison[source:stop, part], survivors[source:stop, part]
                    )
                words ^= keys[source:stop, None, :width]
                parts = mix_array_(words, spare).sum(2).view(np.int64)
                digest[start : start + slots_a_block] += parts.sum(0)
                locator[start : start + slots_a_block] += weights[source:stop] @ parts
    return digest, locator


def _find_edges(words: Array, read_bytes: int, poison: Array, survivors: Array) -> None:
    n = survivors.shape[1]
    for edge in edges_of(read_bytes):
        hit = words[:, :n, edge] == poison
        if hit.any():
            survivors |= np.where(hit, FIRST if edge == 0 else LAST, 0)


def _gather(table: SourceTable, index: int, ids: Array, out: Array) -> None:
    array = table.arrays[index]
    if array is not None:
        # The ids are in range already; with any other mode numpy would gather into a buffer first.
        array.take(ids, 0, out, "clip")
    else:
        table.sources[index].gather_words(torch.from_numpy(ids), out=torch.from_numpy(out.view(np.int64)))


def fold_slots(table: SourceTable, slots: torch.Tensor, *, digest: torch.Tensor, locator: torch.Tensor) -> None:
    """See :func:`.fold_reference.fold_slots`."""
    digest.numpy()[:], locator.numpy()[:] = fold_ids(table, slots.numpy())


def seal_slots(
    *,
    records: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor,
    writers: torch.Tensor | None = None,
    expects: torch.Tensor | None = None,
    violations: ViolationBuffer | None = None,
) -> None:
    """See :func:`.fold_reference.seal_slots`."""
    kept, ids = as_array(records), as_array(slots)
    ids = ids[(ids >= 0) & (ids < len(kept))]
    survivors = None if expects is None else np.zeros((len(table.sources), len(ids)), dtype=np.int64)
    kept[ids, r.DIGEST], kept[ids, r.LOCATOR] = fold_ids(table, ids, survivors)
    report_poison(records, writers, ids, survivors, expects, violations)


def report_poison(
    records: torch.Tensor,
    writers: torch.Tensor | None,
    ids: Array,
    survivors: Array | None,
    expects: torch.Tensor | None,
    violations: ViolationBuffer | None,
) -> None:
    """Append what :func:`fold_ids` found, if it found anything."""
    if survivors is None or expects is None or not survivors.any() or not survivors[as_array(expects) != 0].any():
        return
    assert writers is not None
    assert violations is not None
    report_survivors(
        records=records,
        writers=writers,
        slots=torch.from_numpy(ids),
        survivors=torch.from_numpy(survivors),
        expects=expects,
        violations=violations,
    )
