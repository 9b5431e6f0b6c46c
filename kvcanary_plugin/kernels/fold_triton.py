"""Digest and locator of chosen slots over all sources.

A program folds a few slots over all sources, or over some of them where there are few slots: then the programs of a slot
add their sums up in scratch memory and the last one to arrive finishes it. What bounds it is memory bandwidth, or for few
slots the latency of three dependent reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from . import record as r
from .launch import block_of, jit, launch
from .mixing_triton import DIGEST, IDENTITY, LIVE_BIT, LOCATOR, POSITION_MASK, RECORD_WORDS, append_rows, mix
from .mixing_triton import CHAIN as _CHAIN
from .pointers import pointers_of
from .violations import ViolationBuffer

if TYPE_CHECKING:
    from ..pool_patcher.sources import SourceTable

# What a kernel does with the sums of a slot.
OUTPUT = 0  # stores them in two vectors
SEAL = 1  # keeps them in the slot's record
COMPARE = 2  # compares them with the slot's record, if that is live
_SEAL = tl.constexpr(SEAL)
_COMPARE = tl.constexpr(COMPARE)
_CONTENT = tl.constexpr(int(r.Kind.CONTENT))

_PLACE_WORDS = tl.constexpr(4)
_ENOUGH_PROGRAMS = 1024  # keep any current GPU busy; more only cost additions in scratch


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
    places_ptr, keys_ptr, sources: tl.int64, slots_ptr, start: tl.int64, n: tl.int64,
    records_ptr, slot_count: tl.int64, digest_ptr, locator_ptr, sums_ptr, sums_stride: tl.int64, arrivals_ptr,
    parts: tl.int64, awaited: tl.int64, writers_ptr, request: tl.int64, violations_ptr, violation_count_ptr,
    violation_capacity: tl.int64, survivors_ptr, poison: tl.int64,
    MODE: tl.constexpr, LISTED: tl.constexpr, SHARED: tl.constexpr, FINDS_POISON: tl.constexpr,
    READ_BYTES: tl.constexpr, WORDS: tl.constexpr, PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) // parts
    part = tl.program_id(0).to(tl.int64) % parts
    i = block * SLOTS + tl.arange(0, SLOTS)
    if LISTED:
        slot = tl.load(slots_ptr + i, mask=i < n, other=-1)
    else:
        slot = start + i
    wanted = (i < n) & (slot >= 0) & (slot < slot_count)
    record = records_ptr + slot * RECORD_WORDS
    if MODE == _COMPARE:
        identity = tl.load(record + IDENTITY, mask=wanted, other=0)
        wanted = wanted & ((identity & LIVE_BIT) != 0)

    # Sources of this part; none where no slot is wanted, so that a dead stretch of the pool costs next to nothing.
    first = sources * part // parts
    last = tl.where(tl.max(wanted.to(tl.int32), 0) > 0, sources * (part + 1) // parts, first)
    page = slot // PAGE_SIZE
    within = slot % PAGE_SIZE
    digests = tl.zeros((SLOTS, BLOCK), tl.int64)
    locators = tl.zeros((SLOTS, BLOCK), tl.int64)
    for source in tl.range(first, last, num_stages=STAGES):
        place = places_ptr + source * _PLACE_WORDS
        row = tl.load(place) + page * tl.load(place + 1) + within * tl.load(place + 2)
        b = tl.load(place + 3)
        for begin in tl.static_range(0, WORDS, BLOCK):
            j = begin + tl.arange(0, BLOCK)
            words = _load_words(row, j, wanted[:, None], READ_BYTES, UNIT)
            key = tl.multiple_of(keys_ptr + source * (WORDS + WORDS % 2), 16) + j
            keys = tl.load(key, mask=j < WORDS, other=0)
            hashes = mix(words ^ keys[None, :])
            if WORDS % BLOCK:
                hashes = tl.where((j < WORDS)[None, :], hashes, 0)
            digests += hashes
            locators += hashes * (2 * b + 1)
            if FINDS_POISON:
                edge = (j == 0) | (j == WORDS - 1)
                left = tl.sum(((words == poison) & edge[None, :]).to(tl.int32), 1)
                tl.atomic_add(survivors_ptr + i, left.to(tl.int64), mask=wanted & (left > 0), sem="relaxed")
    digest = tl.sum(digests, 1)
    locator = tl.sum(locators, 1)

    finishes = True
    if SHARED:
        tl.atomic_add(sums_ptr + i, digest, mask=wanted, sem="relaxed")
        tl.atomic_add(sums_ptr + sums_stride + i, locator, mask=wanted, sem="relaxed")
        tl.debug_barrier()  # the additions of all threads come before the arrival
        finishes = tl.atomic_add(arrivals_ptr + block, 1) == awaited - 1
    if finishes:
        if SHARED:
            digest = tl.atomic_xchg(sums_ptr + i, tl.zeros_like(digest), mask=wanted)
            locator = tl.atomic_xchg(sums_ptr + sums_stride + i, tl.zeros_like(locator), mask=wanted)
            tl.atomic_xchg(arrivals_ptr + block, 0)
        if MODE == _COMPARE:
            kept_digest = tl.load(record + DIGEST, mask=wanted, other=0)
            kept_locator = tl.load(record + LOCATOR, mask=wanted, other=0)
            bad = wanted & ((kept_digest != digest) | (kept_locator != locator))
            if tl.max(bad.to(tl.int32), 0) > 0:
                identity = tl.load(record + IDENTITY, mask=wanted, other=0)
                chain = tl.load(record + _CHAIN, mask=wanted, other=0)
                writer = tl.load(writers_ptr + slot, mask=wanted, other=0)
                append_rows(
                    violations_ptr, violation_count_ptr, violation_capacity, bad, _CONTENT, request,
                    (identity >> 32) & POSITION_MASK, slot, identity, chain, kept_digest, kept_locator,
                    digest, locator, writer,
                )  # fmt: skip
        elif MODE == _SEAL:
            tl.store(record + DIGEST, digest, mask=wanted)
            tl.store(record + LOCATOR, locator, mask=wanted)
        else:
            tl.store(digest_ptr + i, digest, mask=wanted)
            tl.store(locator_ptr + i, locator, mask=wanted)


def launch_fold(
    *,
    mode: int,
    table: SourceTable,
    slots: torch.Tensor | None,
    start: int,
    n: int,
    records: torch.Tensor,
    digest: torch.Tensor,
    locator: torch.Tensor,
    writers: torch.Tensor,
    request: int,
    violations: ViolationBuffer | None,
    survivors: torch.Tensor | None,
    poison: int,
    slots_a_program: int | None = None,
    parts: int | None = None,
    block: int | None = None,
    stages: int = 1,
    warps: int = 4,
) -> None:
    """Fold ``slots``, or the ``n`` slots from ``start`` on, and deal with the sums as ``mode`` says.

    Args:
        slots_a_program, parts, block: slots that one program folds, programs that share the sources of a group, and words
            of a row taken at once (powers of two, but for ``parts``); chosen by size if None.
        warps: per program.
    """
    pointers = pointers_of(table)
    device = records.device
    per_program = slots_a_program or (4 if n >= 4 else block_of(n, 1, 4))
    blocks = triton.cdiv(n, per_program)
    wanted_parts = [min(parts or max(1, _ENOUGH_PROGRAMS // blocks), group.count) for group in pointers.groups]
    awaited = sum(wanted_parts)
    shared = awaited > 1
    sums, arrivals = pointers.scratch(n, blocks) if shared else (digest, digest)
    for group, group_parts in zip(pointers.groups, wanted_parts, strict=True):
        launch(
            _fold,
            blocks * group_parts,
            (
                group.places,
                group.keys,
                group.count,
                records if slots is None else slots,
                start,
                n,
                records,
                table.slot_count,
                digest,
                locator,
                sums,
                sums.stride(0),
                arrivals,
                group_parts,
                awaited,
                writers,
                request,
                records if violations is None else violations.rows,
                records if violations is None else violations.count,
                0 if violations is None else violations.capacity,
                records if survivors is None else survivors,
                poison,
            ),
            (
                mode,
                slots is not None,
                shared,
                survivors is not None,
                group.read_bytes,
                group.words,
                group.page_size,
                group.unit,
                per_program,
                block or block_of(group.words, 2, 256),
                stages,
            ),
            device=device,
            warps=warps,
        )


def fold_slots(table: SourceTable, slots: torch.Tensor, *, digest: torch.Tensor, locator: torch.Tensor) -> None:
    """See :func:`fold_reference.fold_slots`."""
    if not table.sources:
        digest.zero_()
        locator.zero_()
    elif slots.shape[0]:
        launch_fold(
            mode=OUTPUT,
            table=table,
            slots=slots,
            start=0,
            n=slots.shape[0],
            records=digest,
            digest=digest,
            locator=locator,
            writers=digest,
            request=-1,
            violations=None,
            survivors=None,
            poison=0,
        )


def seal_slots(
    *,
    records: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor,
    poison: int = 0,
    survivors: torch.Tensor | None = None,
) -> None:
    """See :func:`fold_reference.seal_slots`."""
    if slots.shape[0] and table.sources:
        launch_fold(
            mode=SEAL,
            table=table,
            slots=slots,
            start=0,
            n=slots.shape[0],
            records=records,
            digest=records,
            locator=records,
            writers=records,
            request=-1,
            violations=None,
            survivors=survivors,
            poison=poison,
        )
