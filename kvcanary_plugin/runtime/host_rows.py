"""The rows of a host slot as they are now, for reports: whether what came back wrong was wrong in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.mixing import mix_
from ..pool_patcher.sources import SourceTable
from .cause import ROUND_TRIP, TO_DEVICE, TO_HOST
from .violation import Violation

HALVES = ("K", "V")


def locate_hop(pool: Any, slot: int, table: SourceTable, violation: Violation) -> str:
    """On which way the bytes went wrong that came from host slot ``slot``, which has not been filled anew since."""
    now = fold_host_slot(pool, slot, table)
    if now is None:
        return ROUND_TRIP
    return {violation.stored_hash: TO_HOST, violation.expected_hash: TO_DEVICE}.get(now, ROUND_TRIP)


def fold_host_slot(pool: Any, slot: int, table: SourceTable) -> int | None:
    """Digest of host slot ``slot`` of SGLang's host ``pool`` in the arithmetic of ``table``, unsigned 64 bit.

    None if the layout of the pool is not known. A digest that is neither the expected nor the found one says nothing.
    """
    rows = read_rows(pool, slot, table.names)
    if rows is None:
        return None
    digest = 0
    for source, row, key in zip(table.sources, rows, table.keys.cpu(), strict=True):
        words = torch.zeros(source.word_count, dtype=torch.int64)
        words.view(torch.uint8)[: source.read_bytes] = row[: source.read_bytes]
        words ^= key[: source.word_count]
        digest += int(mix_(words, torch.empty_like(words)).sum())
    return digest & ((1 << 64) - 1)


def read_rows(pool: Any, slot: int, names: Sequence[tuple[int, str]]) -> list[torch.Tensor] | None:
    """The row of each source, uint8 (row bytes,); ``names`` are layer and half of each. None: layout not known."""
    rows = find_rows(pool, slot, names)
    return None if rows is None else [row.contiguous().view(torch.uint8).flatten() for row in rows]


def find_rows(pool: Any, slot: int, names: Sequence[tuple[int, str]]) -> list[torch.Tensor] | None:
    """The row of each source where it lies in host memory, a view; see :func:`read_rows`."""
    buffer, layout, page_size = getattr(pool, "kv_buffer", None), getattr(pool, "layout", None), pool.page_size
    if not isinstance(buffer, torch.Tensor) or len(set(names)) != len(names):
        return None
    layers = {layer: index for index, layer in enumerate(sorted({layer for layer, _ in names}))}
    page, offset = divmod(slot, page_size)
    has_halves = {half for _, half in names} == set(HALVES)
    rows = []
    for layer, half in names:
        index = layers[layer]
        places: dict[object, tuple[Any, ...]] = {
            "layer_first": (index, slot),
            "page_first": (slot, index),
            "page_first_direct": (page, index, offset),
            "page_head": (page, slice(None), offset, index),
        }
        if layout not in places:
            return None
        place = (HALVES.index(half), *places[layout]) if has_halves else places[layout]
        try:
            rows.append(buffer[place])
        except (IndexError, RuntimeError):
            return None
    return rows
