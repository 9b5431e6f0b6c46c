"""What every Triton kernel of the package shares: the arithmetic of ``mixing``, finding the request of a program,
and appending violation rows. Nothing here is specific to one vendor's GPUs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import mixing
from . import record as r

MULTIPLIER_1 = tl.constexpr(mixing.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(mixing.MULTIPLIER_2)

RECORD_WORDS = tl.constexpr(r.RECORD_WORDS)
CHAIN = tl.constexpr(r.CHAIN)
DIGEST = tl.constexpr(r.DIGEST)
LOCATOR = tl.constexpr(r.LOCATOR)
IDENTITY = tl.constexpr(r.IDENTITY)
LIVE_BIT = tl.constexpr(r.LIVE_BIT)
MIX_INPUT_MASK = tl.constexpr(r.MIX_INPUT_MASK)
POSITION_SHIFT = tl.constexpr(mixing.POSITION_SHIFT)
POSITION_MASK = tl.constexpr(r.POSITION_MASK)
TOKEN_MASK = tl.constexpr(r.TOKEN_MASK)

ROW_KIND = tl.constexpr(r.ROW_KIND)
ROW_REQUEST = tl.constexpr(r.ROW_REQUEST)
ROW_POSITION = tl.constexpr(r.ROW_POSITION)
ROW_SLOT = tl.constexpr(r.ROW_SLOT)
ROW_IDENTITY = tl.constexpr(r.ROW_IDENTITY)
ROW_CHAIN = tl.constexpr(r.ROW_CHAIN)
ROW_DIGEST = tl.constexpr(r.ROW_DIGEST)
ROW_LOCATOR = tl.constexpr(r.ROW_LOCATOR)
ROW_FOUND_DIGEST = tl.constexpr(r.ROW_FOUND_DIGEST)
ROW_FOUND_LOCATOR = tl.constexpr(r.ROW_FOUND_LOCATOR)
ROW_WRITER = tl.constexpr(r.ROW_WRITER)
ROW_COLUMNS = tl.constexpr(r.ROW_COLUMNS)


@triton.jit
def mix(words):
    """``mixing.mix`` of an int64 tensor. Unsigned in between, because only then is a right shift logical."""
    x = words.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * MULTIPLIER_1
    x = (x ^ (x >> 27)) * MULTIPLIER_2
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def find_owner(offsets_ptr, rows_ptr, bs, program, BLOCK: tl.constexpr, REQUESTS: tl.constexpr):
    """The request that a program works for, where request i has the programs from ``offsets[i] // BLOCK + i`` to
    ``offsets[i + 1] // BLOCK + i``. That is enough for BLOCK elements each, takes no sum over the requests before, and
    makes ``total // BLOCK + bs`` programs in all. The last one of a request may find nothing to do.

    Returns:
        int64 scalars: index of the request, within [0, bs); its row; where its elements begin and end; and the first
        element of this program.
    """
    low = tl.zeros((), tl.int64)
    high = low + bs
    while high - low > REQUESTS:
        middle = (low + high) >> 1
        behind = tl.load(offsets_ptr + middle) // BLOCK + middle <= program
        low = tl.where(behind, middle, low)
        high = tl.where(behind, high, middle)
    # The last steps of the search at once, and the rows with them: one trip to memory in place of several in a row.
    k = low + tl.arange(0, REQUESTS)
    begins = tl.load(offsets_ptr + k, mask=k < high, other=0)
    ends = tl.load(offsets_ptr + k + 1, mask=k < high, other=0)
    rows = tl.load(rows_ptr + k, mask=k < high, other=0)
    owns = (k < high) & (begins // BLOCK + k <= program) & (program <= ends // BLOCK + k)
    request = tl.minimum(tl.sum(tl.where(owns, k, 0), 0), bs - 1)
    row = tl.sum(tl.where(owns, rows, 0), 0)
    begin = tl.load(offsets_ptr + request)
    end = tl.load(offsets_ptr + request + 1)
    return request, row, begin, end, begin + (program - begin // BLOCK - request) * BLOCK


@triton.jit
def append_rows(
    rows_ptr, count_ptr, capacity, mask, kind, request, position, slot, identity, chain, digest, locator,
    found_digest, found_locator, writer,
):  # fmt: skip
    """Count every true element of ``mask`` and write a row for each while there is room. Columns may be scalars."""
    place = tl.atomic_add(count_ptr + mask.to(tl.int32) * 0, 1, mask=mask, sem="relaxed")
    kept = mask & (place < capacity)
    row = rows_ptr + place * ROW_COLUMNS
    tl.store(row + ROW_KIND, kind, mask=kept)
    tl.store(row + ROW_REQUEST, request, mask=kept)
    tl.store(row + ROW_POSITION, position, mask=kept)
    tl.store(row + ROW_SLOT, slot, mask=kept)
    tl.store(row + ROW_IDENTITY, identity, mask=kept)
    tl.store(row + ROW_CHAIN, chain, mask=kept)
    tl.store(row + ROW_DIGEST, digest, mask=kept)
    tl.store(row + ROW_LOCATOR, locator, mask=kept)
    tl.store(row + ROW_FOUND_DIGEST, found_digest, mask=kept)
    tl.store(row + ROW_FOUND_LOCATOR, found_locator, mask=kept)
    tl.store(row + ROW_WRITER, writer, mask=kept)
