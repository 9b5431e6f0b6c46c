"""Digest and locator of chosen slots over all sources.

A program folds one slot over all sources, or over some of them where there are few slots: then the programs of a slot
add their sums up in scratch memory and the last one to arrive finishes it. What bounds it is memory bandwidth, or for
few slots the latency of dependent reads and additions.

Rows and words past the last one are loaded as zero with a zero key, and ``mix(0)`` is 0: they need no mask of their
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from . import record as r
from .launch import block_of, jit, launch
from .mixing_triton import (
    CHAIN,
    DIGEST,
    IDENTITY,
    LIVE_BIT,
    LOCATOR,
    POSITION_MASK,
    RECORD_WORDS,
    append_rows,
    mix,
)
from .pointers import offset_of, pointers_of
from .poison_reference import FIRST, LAST
from .poison_triton import poison_of
from .violations import ViolationBuffer

if TYPE_CHECKING:
    from ..pool_patcher.sources import SourceTable

# What becomes of the sums of a listed slot.
OUTPUT = 0  # stored in two vectors
SEAL = 1  # kept in the slot's record
COMPARE = 2  # compared with the slot's record, if that is live
_SEAL = tl.constexpr(SEAL)
_COMPARE = tl.constexpr(COMPARE)
_CONTENT = tl.constexpr(int(r.Kind.CONTENT))
_NOT_STORED = tl.constexpr(int(r.Kind.NOT_STORED))
_FIRST = tl.constexpr(FIRST)
_LAST = tl.constexpr(LAST)

_WRITER_ROW_BITS = tl.constexpr(r.WRITER_ROW_BITS)
_PLACE_WORDS = tl.constexpr(2)
_MANY_SLOTS = 4096  # from here on a warp for each slot keeps a large GPU busy
_FEW_SLOTS = 512  # up to here the programs of a slot share it, so many that there are about this many


@triton.jit
def _load_words(row, j, mask, READ_BYTES: tl.constexpr, UNIT: tl.constexpr):
    """Words j of rows that begin at byte addresses ``row``, from pieces of at most 8 bytes; zero past READ_BYTES."""
    if UNIT >= 8:
        rows = tl.multiple_of(row.to(tl.pointer_type(tl.uint64)), [UNIT])
        words = tl.load(rows[:, None] + j[None, :], mask=mask & (j < READ_BYTES // 8)[None, :], other=0)
    else:
        words = tl.zeros_like(mask & (j >= 0)[None, :]).to(tl.uint64)
        for piece in tl.static_range(8 // UNIT):
            if UNIT == 4:
                rows = row.to(tl.pointer_type(tl.uint32))
            elif UNIT == 2:
                rows = row.to(tl.pointer_type(tl.uint16))
            else:
                rows = row.to(tl.pointer_type(tl.uint8))
            at = j * (8 // UNIT) + piece
            part = tl.load(rows[:, None] + at[None, :], mask=mask & (at * UNIT < READ_BYTES)[None, :], other=0)
            words |= part.to(tl.uint64) << (piece * UNIT * 8)
    return words.to(tl.int64, bitcast=True)


@jit
def _fold(
    places_ptr, keys_ptr, sources: tl.int64, page_stride: tl.int64, slot_stride: tl.int64,
    slots_ptr, n: tl.int64, start_ptr, start: tl.int64, step_ptr, step: tl.int64,
    records_ptr, slot_count: tl.int64, digest_ptr, locator_ptr,
    sums_ptr, sums_stride: tl.int64, arrivals_ptr, parts: tl.int64, awaited: tl.int64,
    writers_ptr, request: tl.int64, violations_ptr, violation_count_ptr, violation_capacity: tl.int64,
    expects_ptr,
    MODE: tl.constexpr, LOADED: tl.constexpr, SHARED: tl.constexpr, FINDS_POISON: tl.constexpr,
    READ_BYTES: tl.constexpr, WORDS: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_STRIDE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) // parts
    part = tl.program_id(0).to(tl.int64) % parts
    listed = item < n
    if LOADED:
        start = tl.load(start_ptr)
        step = tl.load(step_ptr)
    slot = tl.load(slots_ptr + item, mask=listed, other=start + item - n)
    wanted = (slot >= 0) & (slot < slot_count)
    record = records_ptr + slot * RECORD_WORDS
    compares = ~listed
    if MODE == _COMPARE:
        compares = slot == slot
    identity = tl.load(record + IDENTITY, mask=wanted & compares, other=0)
    wanted = wanted & (((identity & LIVE_BIT) != 0) | ~compares)
    if MODE == _SEAL:  # what this forward stored is being sealed by other programs right now
        writer = tl.load(writers_ptr + slot, mask=wanted & compares, other=0)
        wanted = wanted & (((writer >> _WRITER_ROW_BITS) != step) | ~compares)

    # Sources of this part; none where the slot is not wanted, so that a dead slot costs next to nothing.
    first = sources * part // parts
    last = tl.where(wanted, sources * (part + 1) // parts, first)
    offset = offset_of(slot, page_stride, slot_stride, PAGE_SIZE, GROUP_SIZE, GROUP_STRIDE)
    digests = tl.zeros((ROWS, BLOCK), tl.int64)
    locators = tl.zeros((ROWS, BLOCK), tl.int64)
    for begin in range(first, last, ROWS):
        source = begin + tl.arange(0, ROWS)
        inside = source < last
        place = places_ptr + source * _PLACE_WORDS
        row = tl.load(place, mask=inside, other=0) + offset
        index = tl.load(place + 1, mask=inside, other=0)
        weight = 2 * index + 1
        if FINDS_POISON:
            poison = poison_of(slot, index)
            edges = tl.zeros((ROWS,), tl.int64)
        for column in tl.static_range(0, WORDS, BLOCK):
            j = column + tl.arange(0, BLOCK)
            words = _load_words(row, j, inside[:, None], READ_BYTES, UNIT)
            key = tl.multiple_of(keys_ptr + source * (WORDS + WORDS % 2), [16])[:, None] + j[None, :]
            hashes = mix(words ^ tl.load(key, mask=inside[:, None] & (j < WORDS)[None, :], other=0))
            digests += hashes
            locators += hashes * weight[:, None]
            if FINDS_POISON:
                edge = tl.where(j == 0, _FIRST, tl.where(j == READ_BYTES // 8 - 1, _LAST, 0))
                edges += tl.sum(tl.where(words == poison[:, None], edge[None, :], 0), 1)
        if FINDS_POISON:  # noqa: SIM102, because only as a condition of its own is it a constant to the compiler
            if tl.max(edges, 0) > 0:
                survived = inside & listed & (edges > 0)
                survived = survived & (tl.load(expects_ptr + index, mask=inside, other=0) != 0)
                word = tl.load(record + IDENTITY, mask=wanted, other=0)
                append_rows(
                    violations_ptr, violation_count_ptr, violation_capacity, survived, _NOT_STORED, -1,
                    (word >> 32) & POSITION_MASK, slot, word, tl.load(record + CHAIN, mask=wanted, other=0), 0, 0,
                    index, edges, tl.load(writers_ptr + slot, mask=wanted, other=0),
                )  # fmt: skip
    digest = tl.sum(tl.sum(digests, 1), 0)
    locator = tl.sum(tl.sum(locators, 1), 0)
    finishes = wanted
    if SHARED:
        tl.atomic_add(sums_ptr + item, digest, mask=wanted, sem="relaxed")
        tl.atomic_add(sums_ptr + sums_stride + item, locator, mask=wanted, sem="relaxed")
        tl.debug_barrier()  # the additions come before the arrival
        finishes = wanted & (tl.atomic_add(arrivals_ptr + item, 1, mask=wanted) == awaited - 1)
    if finishes:
        if SHARED:
            # Relaxed, so that they overlap: the arrival has already put every addition before them.
            digest = tl.atomic_xchg(sums_ptr + item, tl.zeros_like(digest), sem="relaxed")
            locator = tl.atomic_xchg(sums_ptr + sums_stride + item, tl.zeros_like(locator), sem="relaxed")
            tl.atomic_xchg(arrivals_ptr + item, 0, sem="relaxed")
        if compares:
            kept_digest = tl.load(record + DIGEST)
            kept_locator = tl.load(record + LOCATOR)
            bad = (kept_digest != digest) | (kept_locator != locator)
            if bad:
                append_rows(
                    violations_ptr, violation_count_ptr, violation_capacity, bad, _CONTENT,
                    tl.where(listed, request, -1), (identity >> 32) & POSITION_MASK, slot, identity,
                    tl.load(record + CHAIN), kept_digest, kept_locator, digest, locator, tl.load(writers_ptr + slot),
                )  # fmt: skip
        elif MODE == _SEAL:
            tl.store(record + DIGEST, digest)
            tl.store(record + LOCATOR, locator)
        else:
            tl.store(digest_ptr + item, digest)
            tl.store(locator_ptr + item, locator)


def launch_fold(
    mode: int,
    *,
    table: SourceTable,
    slots: torch.Tensor | None = None,
    start: int | torch.Tensor = 0,
    count: int = 0,
    step: int | torch.Tensor = 0,
    records: torch.Tensor,
    digest: torch.Tensor | None = None,
    locator: torch.Tensor | None = None,
    writers: torch.Tensor | None = None,
    request: int = -1,
    violations: ViolationBuffer | None = None,
    expects: torch.Tensor | None = None,
    tuning: tuple[int, int, int, int] | None = None,
) -> None:
    """Fold ``slots``, dealing with their sums as ``mode`` says, and compare the ``count`` slots from ``start`` on.

    Args:
        slots: int64 (n,), or None for none.
        start: a number, or an int64 tensor (1,) on the device.
        step: the same; where the mode is SEAL, the forward that stored ``slots``. What it stored is not compared.
        digest, locator: int64 (n,), out, where the mode is OUTPUT.
        records: int64 (slot_count, RECORD_WORDS).
        writers, violations: where anything is compared.
        request: said in violations of listed slots.
        expects: see :func:`fold_reference.seal_slots`.
        tuning: words of all rows that a program takes at once, words of one row, both powers of two, warps, and
            programs that share a slot; chosen by size if None.
    """
    n = 0 if slots is None else slots.shape[0]
    items = n + count
    if items <= 0 or not table.sources:
        return
    if items >= _MANY_SLOTS:
        shape = (128, 128, 1)
    elif items > _FEW_SLOTS:
        shape = (512, 128, 4)
    else:
        shape = (256, 128, 4)
    tile, widest, warps = shape if tuning is None else tuning[:3]
    parts = max(1, _FEW_SLOTS // items) if tuning is None else tuning[3]
    pointers = pointers_of(table)
    unused = records
    assert isinstance(start, int) == isinstance(step, int) or mode != SEAL, "both are numbers or both are tensors"
    wanted_parts = [min(parts, group.count) for group in pointers.groups]
    awaited = sum(wanted_parts)
    sums, arrivals = pointers.scratch(items) if awaited > 1 else (unused, unused)
    for group, group_parts in zip(pointers.groups, wanted_parts, strict=True):
        block = block_of(group.words, 2, widest)
        launch(
            _fold,
            items * group_parts,
            (
                group.places,
                group.keys,
                group.count,
                group.page_stride,
                group.slot_stride,
                unused if slots is None else slots,
                n,
                unused if isinstance(start, int) else start,
                start if isinstance(start, int) else 0,
                unused if isinstance(step, int) else step,
                step if isinstance(step, int) else 0,
                records,
                table.slot_count,
                unused if digest is None else digest,
                unused if locator is None else locator,
                sums,
                sums.shape[-1],
                arrivals,
                group_parts,
                awaited,
                unused if writers is None else writers,
                request,
                unused if violations is None else violations.rows,
                unused if violations is None else violations.count,
                0 if violations is None else violations.capacity,
                unused if expects is None else expects,
            ),
            (
                mode,
                not isinstance(start, int),
                awaited > 1,
                expects is not None and group.read_bytes >= 8,
                group.read_bytes,
                group.words,
                group.page_size,
                group.group_size,
                group.group_stride,
                group.unit,
                block_of(group.count, 1, tile // block),
                block,
            ),
            device=records.device,
            warps=warps,
        )


def fold_slots(table: SourceTable, slots: torch.Tensor, *, digest: torch.Tensor, locator: torch.Tensor) -> None:
    """See :func:`fold_reference.fold_slots`."""
    if not table.sources:
        digest.zero_()
        locator.zero_()
    launch_fold(OUTPUT, table=table, slots=slots, records=digest, digest=digest, locator=locator)


def seal_slots(
    *,
    records: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor,
    writers: torch.Tensor | None = None,
    expects: torch.Tensor | None = None,
    violations: ViolationBuffer | None = None,
) -> None:
    """See :func:`fold_reference.seal_slots`."""
    launch_fold(
        SEAL, table=table, slots=slots, records=records, writers=writers, expects=expects, violations=violations
    )
