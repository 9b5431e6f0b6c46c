"""Where the bytes of a table's sources lie, as numbers a kernel can follow. Built once per table and kept as long as it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from ..pool_patcher.sources import SourceTable

_WIDEST_UNIT = 16


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """Sources of one shape, which one launch can fold.

    Attributes:
        places: int64 (count, 4): address of slot 0, bytes from page to page, bytes from slot to slot, index b.
        keys: int64 (count, words, rounded up to even), the fold keys of these sources; even, so that pairs can be loaded.
        count: sources.
        words: 64-bit words of a row, the last one padded.
        read_bytes: bytes of a row.
        page_size: slots a page.
        unit: largest power of two, up to 16, that divides every address, stride and width; rows are loaded in such units.
    """

    places: torch.Tensor
    keys: torch.Tensor
    count: int
    words: int
    read_bytes: int
    page_size: int
    unit: int


class SourcePointers:
    """All groups of a table, and the scratch in which several programs add up the sums of one slot.

    The scratch is all zero between launches: whoever finishes a slot takes its sums out. Launches that use one table
    must therefore follow each other in stream order.
    """

    def __init__(self, table: SourceTable) -> None:
        device = table.keys.device
        places: dict[tuple[int, int, int], list[list[int]]] = {}
        for index, source in enumerate(table.sources):
            page_stride, slot_stride, _ = source.rows.stride()
            place = [source.rows.data_ptr(), page_stride, slot_stride, index]
            unit = math.gcd(_WIDEST_UNIT, source.read_bytes, place[0], page_stride, slot_stride)
            places.setdefault((source.read_bytes, source.page_size, unit), []).append(place)
        self.groups = tuple(
            SourceGroup(
                places=torch.tensor(rows, dtype=torch.int64).to(device),
                keys=_keys_of(table, [row[-1] for row in rows], -(-read_bytes // 8)),
                count=len(rows),
                words=-(-read_bytes // 8),
                read_bytes=read_bytes,
                page_size=page_size,
                unit=unit,
            )
            for (read_bytes, page_size, unit), rows in places.items()
        )
        self._sums = torch.zeros((2, 0), dtype=torch.int64, device=device)
        self._arrivals = torch.zeros(0, dtype=torch.int32, device=device)

    def scratch(self, slots: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed sums, int64 (2, >= ``slots``), and zeroed arrival counts, int32 (>= ``blocks``,)."""
        if self._sums.shape[1] < slots:
            self._sums = self._sums.new_zeros((2, 2 * slots))
        if self._arrivals.shape[0] < blocks:
            self._arrivals = self._arrivals.new_zeros(2 * blocks)
        return self._sums, self._arrivals


def _keys_of(table: SourceTable, sources: list[int], words: int) -> torch.Tensor:
    keys = table.keys.new_zeros((len(sources), words + words % 2))
    keys[:, :words] = table.keys[sources, :words]
    return keys


_known: WeakKeyDictionary[SourceTable, SourcePointers] = WeakKeyDictionary()


def pointers_of(table: SourceTable) -> SourcePointers:
    """The pointers of ``table``, made at the first call. The table's views keep the memory they point to alive."""
    pointers = _known.get(table)
    if pointers is None:
        pointers = _known[table] = SourcePointers(table)
    return pointers
