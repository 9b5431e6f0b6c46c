"""Where things lie in a page file. Everything follows from three numbers: payload, records and slot count.

::

    0          header, copy A (4 KiB)
    64 KiB     header, copy B
    128 KiB    trailer blocks, copy A: one of 4 KiB for each segment of 63 slots
    ...        trailer blocks, copy B, at the next multiple of 64 KiB
    ...        slots, from the next multiple of the stride

The stride is payload plus records, rounded up to 4 KiB, and every slot starts at a multiple of it. The copies lie
64 KiB and more apart: on 3FS, whose chunks have at least that size, no chunk holds both unless chunks are larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .client import BLOCK_BYTES
from .geometry import Geometry

CHUNK_BYTES = 64 * 1024
HEADER_OFFSETS = (0, CHUNK_BYTES)
TABLE_OFFSET = 2 * CHUNK_BYTES
SLOTS_PER_SEGMENT = 63  # with the header of the block, 64 records of 64 bytes
MAX_SLOTS = 2**31


def round_up(size: int, multiple: int) -> int:
    """The next multiple that is not smaller."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Offsets, in bytes from the start of the file."""

    payload_bytes: int
    records_bytes: int
    slot_count: int

    @classmethod
    def fit(cls, geometry: Geometry, capacity_bytes: int) -> Layout:
        """The layout with the most slots within a capacity. Raises ``ValueError`` if not even one fits."""
        sizes = geometry.payload_bytes, geometry.records_bytes
        fits, too_many = 0, min(capacity_bytes // cls(*sizes, 1).stride, MAX_SLOTS) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if cls(*sizes, middle).file_bytes <= capacity_bytes:
                fits = middle
            else:
                too_many = middle
        if fits == 0:
            raise ValueError(
                f"a capacity of {capacity_bytes} bytes holds no page of {geometry.payload_bytes} bytes; "
                f"the smallest file takes {cls(*sizes, 1).file_bytes}"
            )
        return cls(*sizes, fits)

    @cached_property
    def stride(self) -> int:
        """Distance of two slots."""
        return round_up(self.payload_bytes + self.records_bytes, BLOCK_BYTES)

    @cached_property
    def tail_bytes(self) -> int:
        """From the end of the payload to the next slot: GPU records, then zeros."""
        return self.stride - self.payload_bytes

    @property
    def segment_count(self) -> int:
        """Segments, the last one perhaps with fewer slots."""
        return -(-self.slot_count // SLOTS_PER_SEGMENT)

    @property
    def table_bytes(self) -> int:
        """Size of one copy of all trailer blocks."""
        return self.segment_count * BLOCK_BYTES

    @property
    def table_offsets(self) -> tuple[int, int]:
        """Where the two copies of the trailer blocks start."""
        return TABLE_OFFSET, TABLE_OFFSET + round_up(self.table_bytes, CHUNK_BYTES)

    @cached_property
    def data_offset(self) -> int:
        """Where slot 0 starts."""
        return round_up(self.table_offsets[1] + self.table_bytes, self.stride)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.data_offset + self.slot_count * self.stride

    def slot_offset(self, slot: int) -> int:
        """Where a slot starts."""
        return self.data_offset + slot * self.stride
