"""Layout of a ledger word, 8 bytes a slot: who may use the slot now. Numbers only; no behaviour.

From the low end: state (2 bits), four flags, the stamp of the step in which the owner first stored to the slot
(6 bits), the owner's request row (20 bits) and the owner's serial number (31 bits). A serial number stands for one stay
of a request on a row; 0 is nobody. A word is never negative.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class State(IntEnum):
    """Where a slot is in its life."""

    FREE = 0  # with the allocator; the owner named is the last one
    OWNED = 1  # given out; without an owner, nothing was stored to it yet
    CACHED = 2  # held by the radix tree, for every request whose prefix it is; the owner named is who stored it
    QUARANTINED = 3  # out of circulation until the pool is flushed


class Op(IntEnum):
    """What a delta does to its slots."""

    ALLOC = 1
    FREE = 2
    INSERT = 3  # the radix tree takes them
    QUARANTINE = 4
    HOLD = 5  # a transfer on another stream uses them
    LAND = 6  # that transfer is over
    TRIM = 7  # the part of the slot that layers with a sliding window keep was freed
    UNTRIM = 8  # and given back
    SWEEP = 9  # what a paged allocator frees beside the slots it was told: the rest of their pages
    AIM = 10  # a transfer from or to another server uses them, also when they are freed; over with LAND


STATE_MASK: Final = 3
IN_FLIGHT: Final = 1 << 2  # set by HOLD, cleared by LAND
CONTESTED: Final = 1 << 3  # given out again while somebody had it
TRIMMED: Final = 1 << 4
AIMED: Final = 1 << 5  # set by AIM, cleared by LAND; stays when the slot is freed
STAMP_SHIFT: Final = 6
STAMP_BITS: Final = 6
STAMP_MASK: Final = ((1 << STAMP_BITS) - 1) << STAMP_SHIFT
ROW_SHIFT: Final = 12
ROW_BITS: Final = 20
SERIAL_SHIFT: Final = 32
SERIAL_BITS: Final = 31
OWNER_MASK: Final = ((1 << 63) - 1) & ~((1 << ROW_SHIFT) - 1)  # row and serial number
OWNER_BIT: Final = 1 << ROW_SHIFT  # a word below it has no owner

UNCLAIMED: Final = int(State.OWNED)  # the word of a slot that was given out and not stored to yet
TREE: Final = int(State.CACHED)  # as the actor of a delta: the radix tree, not a request

# What ownership puts into the columns of a raw violation row that other checks use for the record.
ROW_WORD: Final = 5  # ledger word of the slot as it was found
ROW_ACTOR: Final = 6  # owner bits of whoever reads, stores, frees or inserts; TREE; or 0
ROW_OP: Final = 7  # the delta, 0 for a check of a forward


def make_owner(serial: int, row: int) -> int:
    """Owner bits of a word."""
    return serial << SERIAL_SHIFT | row << ROW_SHIFT


def serial_of(word: int) -> int:
    """Serial number of the owner a word names, 0 for nobody."""
    return word >> SERIAL_SHIFT


def row_of(word: int) -> int:
    """Request row of the owner a word names."""
    return (word >> ROW_SHIFT) & ((1 << ROW_BITS) - 1)


def state_of(word: int) -> State:
    """State of a slot."""
    return State(word & STATE_MASK)
