"""Trailer blocks: what is in each slot of a segment, apart from the slots themselves.

A block is a header of 64 bytes and 63 records of 64 bytes. There are two copies of each, written in turn: the older one
is overwritten and becomes the newer one, so a torn write loses one update and never the neighbours.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .client import BLOCK_BYTES
from .header import Header
from .layout import SLOTS_PER_SEGMENT

FREE, WRITING, COMMITTED, QUARANTINED = range(4)
STATE_NAMES = ("free", "writing", "committed", "quarantined")
RECORD_BYTES = 64
BLOCK_MAGIC = b"KVCTRAIL"
CRC = struct.Struct("<I")
WITHOUT_CRC = struct.Struct(f"{RECORD_BYTES - CRC.size}s{CRC.size}x")
RECORD = np.dtype(
    [
        *(("key", "<u8", 2), ("digest", "<u8", 2), ("generation", "<u8"), ("slot", "<u4"), ("geometry", "<u4")),
        *(("salt", "<u4"), ("records_bytes", "<u4"), ("state", "<u2"), ("zero", "<u2"), ("crc", "<u4")),
    ]
)
BLOCK_FIELDS = struct.Struct("<8sHHIQQ16sI")  # magic, copy, 0, segment, sequence, epoch, uuid, salt
BLOCK_HEADER = np.dtype(
    [
        *(("magic", "S8"), ("copy", "<u2"), ("zero", "<u2"), ("segment", "<u4"), ("sequence", "<u8")),
        *(("epoch", "<u8"), ("uuid", "V16"), ("salt", "<u4"), ("pad", "V8"), ("crc", "<u4")),
    ]
)


def stamp_crcs(records: NDArray[np.void]) -> None:
    """Give each record its CRC."""
    records["crc"] = find_crcs(records)


def find_crcs(records: NDArray[np.void]) -> list[int]:
    """The CRC that each record should have."""
    return [zlib.crc32(fields) for (fields,) in WITHOUT_CRC.iter_unpack(records.tobytes())]


def encode_block(header: Header, segment: int, copy: int, sequence: int, records: bytes) -> bytes:
    """One block of 4 KiB around 63 records."""
    fields = BLOCK_FIELDS.pack(BLOCK_MAGIC, copy, 0, segment, sequence, header.epoch, header.uuid, header.salt)
    fields = fields.ljust(RECORD_BYTES - CRC.size, b"\0")
    return fields + CRC.pack(zlib.crc32(records, zlib.crc32(fields))) + records


@dataclass
class Trailers:
    """What the two copies of all trailer blocks say together.

    ``records`` has one record a slot, all zero where nothing valid is known. ``sequence`` is the highest of a segment,
    ``current`` the copy (0 or 1) that holds it. ``faults`` are messages about damaged blocks and records, and
    ``damaged`` the segments concerned.
    """

    records: NDArray[np.void]
    sequence: NDArray[np.uint64]
    current: NDArray[np.uint8]
    faults: list[str] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)


def parse_trailers(header: Header, tables: tuple[bytearray, bytearray], first_segment: int = 0) -> Trailers:
    """Merge both copies of some consecutive blocks."""
    blocks = [np.frombuffer(table, np.uint8).reshape(-1, BLOCK_BYTES) for table in tables]
    count = len(blocks[0])
    faults: list[str] = []
    sequences = np.zeros((2, count), np.uint64)
    damaged: list[tuple[int, int]] = []
    for copy in (0, 1):
        fields = blocks[copy][:, :RECORD_BYTES].copy().view(BLOCK_HEADER)[:, 0]
        used = np.asarray(blocks[copy].any(axis=1), np.bool_)
        fits = np.asarray(
            (fields["magic"] == BLOCK_MAGIC)
            & (fields["copy"] == copy)
            & (fields["segment"] == np.arange(first_segment, first_segment + count))
            & (fields["uuid"] == np.void(header.uuid))
        )
        crcs = np.array([_block_crc(tables[copy], index) if used[index] else 0 for index in range(count)], np.uint32)
        whole = used & fits & (fields["crc"] == crcs)
        # A block of an earlier life of the file is whole and says nothing.
        sequences[copy] = np.where(whole & (fields["salt"] == header.salt), fields["sequence"], 0)
        for index in np.flatnonzero(used & ~whole):
            damaged.append((copy, int(index)))
            fault = "belongs elsewhere" if not fits[index] and fields["magic"][index] == BLOCK_MAGIC else "is damaged"
            faults.append(f"segment {first_segment + index}: trailer block {'AB'[copy]} {fault}")
    current = (sequences[1] > sequences[0]).astype(np.uint8)
    sequence = sequences.max(axis=0)
    bodies = np.stack([block[:, RECORD_BYTES:] for block in blocks])
    chosen = bodies[current, np.arange(count)]
    chosen[sequence == 0] = 0
    records = np.ascontiguousarray(chosen).reshape(-1).view(RECORD)
    misplaced = _drop_misplaced(header, records, first_segment)
    faults += [f"slot {slot}: the record is damaged or belongs elsewhere" for slot in misplaced]
    for copy, index in damaged:
        _salvage(header, records, bodies[copy, index], index, first_segment)
    segments = {first_segment + index for _, index in damaged} | {slot // SLOTS_PER_SEGMENT for slot in misplaced}
    return Trailers(records, sequence, current, faults, sorted(segments))


def _block_crc(table: bytearray, index: int) -> int:
    view = memoryview(table)[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
    return zlib.crc32(view[RECORD_BYTES:], zlib.crc32(view[: RECORD_BYTES - CRC.size]))


def _fitting(header: Header, records: NDArray[np.void], first_slot: int) -> NDArray[np.bool_]:
    slots = np.arange(first_slot, first_slot + len(records))
    return np.asarray(
        (records["slot"] == slots)
        & (slots < header.slot_count)
        & (records["salt"] == header.salt)
        & (records["geometry"] == geometry_word(header))
        & (records["state"] > FREE)
        & (records["state"] <= QUARANTINED)
        & (records["records_bytes"] <= header.geometry.records_bytes)
    )


def geometry_word(header: Header) -> int:
    """The part of the geometry digest that each record carries."""
    return int.from_bytes(header.geometry.digest[:4], "little")


def _drop_misplaced(header: Header, records: NDArray[np.void], first_segment: int) -> list[int]:
    """Clear the records of intact blocks that are not about this slot, file life and geometry. Returns their slots."""
    first_slot = first_segment * SLOTS_PER_SEGMENT
    # Of a slot that was being written, the record says nothing but that.
    used = np.flatnonzero((records["state"] != FREE) & (records["state"] != WRITING))
    good = _fitting(header, records, first_slot)[used] & (find_crcs(records[used]) == records["crc"][used])
    writing = np.flatnonzero(records["state"] == WRITING)
    kept = records[used[good]]
    records[:] = np.zeros((), RECORD)
    records["state"][writing] = WRITING
    records[used[good]] = kept
    misplaced: list[int] = (first_slot + used[~good]).tolist()
    return misplaced


def _salvage(
    header: Header, records: NDArray[np.void], body: NDArray[np.uint8], index: int, first_segment: int
) -> None:
    """Take from a damaged block those records that are whole by their own CRC and newer than what is known."""
    first = index * SLOTS_PER_SEGMENT
    candidates = body.copy().view(RECORD)
    fitting = _fitting(header, candidates, first_segment * SLOTS_PER_SEGMENT + first)
    fitting &= find_crcs(candidates) == candidates["crc"]
    for number in np.flatnonzero(fitting):
        candidate, known = candidates[number], records[first + number]
        if (int(candidate["generation"]), int(candidate["state"])) > (int(known["generation"]), int(known["state"])):
            records[first + number] = candidate
