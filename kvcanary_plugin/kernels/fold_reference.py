"""Digest and locator of chosen slots over all sources. Torch reference.

Works through blocks of bounded size, so that the scratch stays small beside the pool and within a core's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import record as r
from .mixing import mix_
from .poison_reference import find_survivors, report_survivors
from .violations import ViolationBuffer

BLOCK_WORDS = 1 << 14  # 128 KiB, and as much again for intermediate results: within the cache of one core

if TYPE_CHECKING:
    from ..pool_patcher.sources import SourceTable


def fold_slots(table: SourceTable, slots: torch.Tensor, *, digest: torch.Tensor, locator: torch.Tensor) -> None:
    """Fold every byte of every source of ``slots``.

    Args:
        table: the sources of one pool, with their keys.
        slots: int64 (n,), each within [0, table.slot_count).
        digest: int64 (n,), out. Sum over sources b and words j of ``mix(word XOR key(b, j))``.
        locator: int64 (n,), out. Sum over b of ``(2b + 1)`` times the part of source b in the digest.
    """
    digest.zero_()
    locator.zero_()
    n = slots.numel()
    for first, last, width in table.runs:
        slots_a_block = max(1, min(n, BLOCK_WORDS // width))
        sources_a_block = max(1, BLOCK_WORDS // (width * slots_a_block))
        for start in range(0, n, slots_a_block):
            chosen = slots[start : start + slots_a_block]
            for source in range(first, last, sources_a_block):
                stop = min(source + sources_a_block, last)
                words = torch.empty((stop - source, chosen.numel(), width), dtype=torch.int64, device=slots.device)
                for index in range(source, stop):
                    table.sources[index].gather_words(chosen, out=words[index - source])
                words.bitwise_xor_(table.keys[source:stop, None, :width])
                parts = mix_(words, torch.empty_like(words)).sum(2)
                digest[start : start + slots_a_block] += parts.sum(0)
                locator[start : start + slots_a_block] += parts.mul_(table.weights[source:stop, None]).sum(0)


def seal_slots(
    *,
    records: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor,
    writers: torch.Tensor | None = None,
    expects: torch.Tensor | None = None,
    violations: ViolationBuffer | None = None,
) -> None:
    """Fold ``slots``, keep digest and locator in their records, and report rows that still hold their poison.

    Args:
        records: int64 (slot_count, RECORD_WORDS), updated at ``slots``.
        table: the sources of the pool.
        slots: int64 (n,), none twice. One outside the pool is left out: it was reported when its chain was written.
        expects: int64 (source_count,), 1 for every source whose rows were poisoned and must have been stored since;
            None to look for no poison.
        writers, violations: needed where ``expects`` is given.
    """
    chosen = slots[(slots >= 0) & (slots < records.shape[0])]
    sums = torch.empty((2, chosen.numel()), dtype=torch.int64, device=records.device)
    fold_slots(table, chosen, digest=sums[0], locator=sums[1])
    records[:, r.DIGEST].index_copy_(0, chosen, sums[0])
    records[:, r.LOCATOR].index_copy_(0, chosen, sums[1])
    if expects is not None:
        assert writers is not None
        assert violations is not None
        report_survivors(
            records=records,
            writers=writers,
            slots=chosen,
            survivors=find_survivors(table, chosen),
            expects=expects,
            violations=violations,
        )
