"""Where the bytes of a table's sources lie, as numbers a kernel can follow. Built once per table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from .launch import is_compiling_only

if TYPE_CHECKING:
    from ..pool_patcher.sources import SourceTable

_WIDEST_UNIT = 16


@triton.jit
def offset_of(
    slot, page_stride, slot_stride, PAGE_SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_STRIDE: tl.constexpr
):
    """Bytes from slot 0 to ``slot``. Constants say how groups lie, so that sources without any have the same code."""
    at = slot % PAGE_SIZE
    offset = slot // PAGE_SIZE * page_stride
    if GROUP_SIZE < PAGE_SIZE:
        offset += at // GROUP_SIZE * GROUP_STRIDE + at % GROUP_SIZE * slot_stride
    else:
        offset += at * slot_stride
    return offset


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """Sources of one shape, which one launch can fold.

    Attributes:
        places: int64 (count, 2): address of slot 0, and index b.
        keys: int64 (count, words rounded up to even), the fold keys of these sources; even, so that pairs are loaded.
        read_bytes: bytes of a row.
        page_size: slots a page.
        page_stride, slot_stride: bytes from page to page, and from slot to slot within a page, or within a group.
        group_size: slots of a group; all of a page where they do not lie in groups.
        group_stride: bytes from group to group; 0 where there are none.
        unit: largest power of two, up to 16, that divides every address, stride and width; rows are loaded in such.
    """

    places: torch.Tensor
    keys: torch.Tensor
    read_bytes: int
    page_size: int
    page_stride: int
    slot_stride: int
    group_size: int
    group_stride: int
    unit: int

    @property
    def count(self) -> int:
        """Sources of the group."""
        return self.places.shape[0]

    @property
    def words(self) -> int:
        """64-bit words of a row, the last one padded."""
        return -(-self.read_bytes // 8)


class SourcePointers:
    """All groups of a table, and the scratch in which several programs add up the sums of one slot.

    The scratch is all zero between launches: whoever finishes a slot takes its sums out. Launches that use one table
    must therefore follow each other in stream order.
    """

    def __init__(self, table: SourceTable) -> None:
        device = table.keys.device
        shapes: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for index, source in enumerate(table.sources):
            address, (page_stride, *groups, slot_stride, _) = source.rows.data_ptr(), source.rows.stride()
            group_size, group_stride = (source.rows.shape[2], groups[0]) if groups else (source.page_size, 0)
            strides = page_stride, slot_stride, group_size, group_stride
            unit = math.gcd(_WIDEST_UNIT, source.read_bytes, address, page_stride, slot_stride, group_stride)
            shape = (source.read_bytes, source.page_size, *strides, unit)
            shapes.setdefault(shape, []).append((address, index))
        self.groups = tuple(
            SourceGroup(torch.tensor(places).to(device), _keys_of(table, [b for _, b in places], shape[0]), *shape)
            for shape, places in shapes.items()
        )
        self._outgrown: list[tuple[torch.Tensor, torch.Tensor]] = []  # captured launches go on using them
        self._scratch = (
            torch.zeros((2, 0), dtype=torch.int64, device=device),
            torch.zeros(0, dtype=torch.int32, device=device),
        )

    def scratch(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed sums, int64 (2, >= ``slots``), and zeroed arrival counts, int32 (>= ``slots``,)."""
        scratch = self._scratch
        if scratch[1].shape[0] < slots and not is_compiling_only():
            self._outgrown.append(scratch)
            self._scratch = scratch = scratch[0].new_zeros((2, 2 * slots)), scratch[1].new_zeros(2 * slots)
        return scratch


def _keys_of(table: SourceTable, sources: list[int], read_bytes: int) -> torch.Tensor:
    words = -(-read_bytes // 8)
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
