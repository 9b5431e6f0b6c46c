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
ROW_WRITER: Final = 10
ROW_COLUMNS: Final = 11
