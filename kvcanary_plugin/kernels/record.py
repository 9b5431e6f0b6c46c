"""Layout of the hot shadow record, 32 bytes a slot, and of one raw violation row. Numbers only; no behaviour.

A record is four int64: chain, digest, locator, identity. The identity word packs, from the low end, the token id
(32 bits), the position (28 bits) and the flags (4 bits), so that the word without its flags is exactly what ``mix``
takes for the chain.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

RECORD_WORDS: Final = 4
CHAIN: Final = 0
DIGEST: Final = 1
LOCATOR: Final = 2
IDENTITY: Final = 3

TOKEN_MASK: Final = (1 << 32) - 1
POSITION_BITS: Final = 28
POSITION_MASK: Final = (1 << POSITION_BITS) - 1
MIX_INPUT_MASK: Final = (1 << 60) - 1
LIVE: Final = 1 << POSITION_BITS  # within the upper half of the identity word
LIVE_BIT: Final = 1 << 60  # the same flag within the whole identity word

# A writer stamp is one int64 a slot: the step in the upper 40 bits, the request row in the lower 24.
WRITER_ROW_BITS: Final = 24
WRITER_ROW_MASK: Final = (1 << WRITER_ROW_BITS) - 1


class Kind(IntEnum):
    """What a raw violation row says. The check a user meets follows from it."""

    ROW_RANGE = 1  # a request row id outside the table; nothing behind it was followed
    SLOT_RANGE = 2  # a slot id that is to be read lies outside the pool; not followed
    DEAD_SLOT = 3  # the record belongs to no live token: never written, or freed since
    POSITION = 4  # the record was made for another position
    LINK = 5  # the record does not continue the one before it
    END_POINT = 6  # every link holds, and yet it is not this request's prefix
    WRITE_RANGE = 7  # a slot id that is to be written lies outside the pool; no record made
    CONTENT = 8  # the bytes are not the ones that were written
    DRAFT_PATH = 9  # the slot of an accepted token holds the record of another draft token

    NOT_STORED = 16  # a forward left a row of one of its own slots as it was

    # Ownership; see ledger.py for the columns.
    DOUBLE_ALLOC = 32  # the allocator gave out a slot that somebody holds
    DOUBLE_FREE = 33  # a free slot was freed
    FREE_IN_USE = 34  # a slot was freed that the row of a running request names
    FREE_IN_TREE = 35  # a slot was freed that a node of the radix tree holds
    FREE_IN_FLIGHT = 36  # a slot was freed that a transfer uses
    INSERT_NOT_OWNED = 37  # the radix tree took a slot that is free, another's, or in it already
    WRITE_NOT_OWNED = 38  # a forward is to store to a slot that its request does not own
    WRITE_TWICE = 39  # a forward is to store two tokens to one slot
    FOREIGN_SLOT = 40  # the row names a slot that another request owns
    FREED_SLOT = 41  # the row names a free slot
    QUARANTINED_SLOT = 42  # the row names a slot that was taken out of circulation
    TRIMMED_SLOT = 43  # the row names a slot within the window whose window part was freed
    DELTA_RANGE = 44  # the allocator or the tree handled a slot outside the pool
    REUSED_IN_FLIGHT = 45  # the allocator gave out a slot that a transfer between servers still uses

    # Order; see order_reference.py for the columns. One for each ticket.
    UNORDERED_FORWARD = 64  # the forward ahead of this one had not ended
    UNORDERED_BATCH = 65  # the scheduler's stream had not come to this forward yet


def is_ownership(kind: int) -> bool:
    """Whether a row of this kind has the columns of the ledger."""
    return Kind.DOUBLE_ALLOC <= kind < Kind.UNORDERED_FORWARD


class Header(IntEnum):
    """What stands in front of the fields that the host sends with a forward, one int64 each."""

    STEP = 0
    REQUESTS = 1
    WRITTEN = 2  # tokens the forward stores
    INPUT_IDS = 3  # where the forward's own tensors lie
    OUT_CACHE_LOC = 4
    REQ_POOL_INDICES = 5
    FORWARD_DUE = 6  # steps that both writers of tickets must have come to
    BATCH_DUE = 7
    SCRUB_STARTS = 8  # first slot of the rotating pass, one word for each slot space


MAX_SPACES: Final = 8
HEADER_WORDS: Final = Header.SCRUB_STARTS + MAX_SPACES

# Columns of a raw violation row, all int64.
ROW_KIND: Final = 0
ROW_REQUEST: Final = 1  # index of the request in its batch, -1 where there is none
ROW_POSITION: Final = 2  # position being read, -1 where there is none
ROW_SLOT: Final = 3
ROW_IDENTITY: Final = 4  # identity word of the record
ROW_CHAIN: Final = 5
ROW_DIGEST: Final = 6  # digest kept in the record
ROW_LOCATOR: Final = 7
ROW_FOUND_DIGEST: Final = 8  # digest of the bytes as they are now; 0 where not computed
ROW_FOUND_LOCATOR: Final = 9
# Of DRAFT_PATH rows, columns 8 and 9 are the chain and the identity word that belong there.
ROW_SOURCE: Final = 8  # where no digest was computed: index of the source
ROW_EDGES: Final = 9  # and which edges of its row were not stored, see poison_reference
ROW_WRITER: Final = 10
ROW_COLUMNS: Final = 11
