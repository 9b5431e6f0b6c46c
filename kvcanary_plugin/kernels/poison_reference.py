"""Put a word that no forward stores into the edges of rows that a forward is to store, and look for it afterwards.

The edges of a row are its first and its last whole 8-byte word. Rows of less than 8 bytes have none: a few bytes alone
would survive by chance too often. Torch reference.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from . import record as r
from .mixing import as_int64, mix
from .violations import ViolationBuffer

if TYPE_CHECKING:
    from ..pool_patcher.sources import SourceTable

POISON_SEED = 0x706F69736F6E0000  # above any slot and source, so that no poison is a fold key
SOURCE_SHIFT = 40
# Without the top exponent bit of any lane of 8, 16, 32 or 64 bits the word is a finite number in every dtype.
FINITE_MASK = as_int64(0xBFBFBFBFBFBFBFBF)
FIRST, LAST = 1, 2  # bits that say which edge survived


def poison_words(slots: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """The poison of slots (int64 (n,)) in sources (int64 (m,)): int64 (m, n), distinct and finite in every dtype."""
    return mix((sources[:, None] << SOURCE_SHIFT) + slots[None, :] + POISON_SEED) & FINITE_MASK


@cache
def edges_of(read_bytes: int) -> tuple[int, ...]:
    """Indices of the first and the last whole word of a row of ``read_bytes``; one where they are the same."""
    return tuple(sorted({0, read_bytes // 8 - 1})) if read_bytes >= 8 else ()


def poison_slots(*, table: SourceTable, slots: torch.Tensor, chosen: torch.Tensor) -> None:
    """Overwrite the edges of the rows of ``slots``.

    Args:
        table: the sources of a pool; their rows are written to.
        slots: int64 (n,). Ids outside the pool are left out.
        chosen: int64 (source_count,), 1 for the sources to poison.
    """
    slots = slots[(slots >= 0) & (slots < table.slot_count)]
    words = poison_words(slots, torch.arange(len(table.sources), device=slots.device))
    for index, source in enumerate(table.sources):
        if not int(chosen[index]):
            continue
        place = source.place(slots)
        for edge in edges_of(source.read_bytes):
            source.rows[..., edge * 8 : edge * 8 + 8][place] = words[index].view(torch.uint8).view(-1, 8)


def find_survivors(table: SourceTable, slots: torch.Tensor) -> torch.Tensor:
    """Which edges of ``slots`` (within the pool) still hold their poison: int64 (source_count, n), FIRST + LAST."""
    survivors = torch.zeros((len(table.sources), slots.numel()), dtype=torch.int64, device=slots.device)
    expected = poison_words(slots, torch.arange(len(table.sources), device=slots.device))
    for index, source in enumerate(table.sources):
        words = torch.empty((slots.numel(), source.word_count), dtype=torch.int64, device=slots.device)
        source.gather_words(slots, out=words)
        for edge in edges_of(source.read_bytes):
            hit = words[:, edge] == expected[index]
            survivors[index] |= hit * (FIRST if edge == 0 else LAST)
    return survivors


def report_survivors(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    slots: torch.Tensor,
    survivors: torch.Tensor,
    expects: torch.Tensor,
    violations: ViolationBuffer,
) -> None:
    """Append a row for every source that ``expects`` to be stored and holds poison in one of ``slots``.

    Args:
        records, writers: int64 (slot_count, RECORD_WORDS) and (slot_count,).
        slots: int64 (n,), within the pool.
        survivors: int64 (source_count, n), see :func:`find_survivors`.
        expects: int64 (source_count,), 1 where every forward stores.
    """
    for index in range(survivors.shape[0]):
        edges = survivors[index] * expects[index]
        if records.device.type == "cpu" and not bool(edges.any()):
            continue
        kept = records.index_select(0, slots)
        violations.append(
            edges > 0,
            {
                r.ROW_KIND: int(r.Kind.NOT_STORED),
                r.ROW_REQUEST: -1,
                r.ROW_POSITION: (kept[:, r.IDENTITY] >> 32) & r.POSITION_MASK,
                r.ROW_SLOT: slots,
                r.ROW_IDENTITY: kept[:, r.IDENTITY],
                r.ROW_CHAIN: kept[:, r.CHAIN],
                r.ROW_SOURCE: index,
                r.ROW_EDGES: edges,
                r.ROW_WRITER: writers[slots],
            },
        )
