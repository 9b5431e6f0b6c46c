"""What every Triton kernel of the package shares: the arithmetic of ``mixing``, finding a request in CSR offsets, and
appending violation rows. Nothing here is specific to one vendor's GPUs.
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
_FURTHEST = tl.constexpr((1 << 63) - 1)


@triton.jit
def mix(words):
    """``mixing.mix`` of an int64 tensor. Unsigned in between, because only then is a right shift logical."""
    x = words.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * MULTIPLIER_1
    x = (x ^ (x >> 27)) * MULTIPLIER_2
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def span_requests(offsets_ptr, bs, first, last, REQUESTS: tl.constexpr):
    """The requests that own the CSR elements ``first`` and ``last``: two scalars within [0, bs).

    All offsets are counted, REQUESTS at a time: that is one trip to memory where a search would take several in a row.
    """
    low = tl.zeros((), tl.int64)
    high = tl.zeros((), tl.int64)
    for start in range(0, bs, REQUESTS):
        k = start + tl.arange(0, REQUESTS)
        ends = tl.load(offsets_ptr + 1 + k, mask=k < bs, other=_FURTHEST)
        low += tl.sum((ends <= first).to(tl.int64), 0)
        high += tl.sum((ends <= last).to(tl.int64), 0)
    return tl.minimum(low, bs - 1), tl.minimum(high, bs - 1)


@triton.jit
def find_request(offsets_ptr, elements, low, high):
    """Owner of each CSR element, given that it lies within [low, high]; no loads where a block lies in one request."""
    lows = tl.zeros_like(elements) + low
    highs = tl.zeros_like(elements) + high
    span = high - low
    while span > 0:
        middle = (lows + highs) >> 1
        behind = tl.load(offsets_ptr + 1 + middle) <= elements
        lows = tl.where(behind, tl.minimum(middle + 1, high), lows)
        highs = tl.where(behind, highs, tl.maximum(middle, low))
        span = span >> 1
    return lows


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
