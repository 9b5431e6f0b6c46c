"""The ledger of slots on a GPU. Of slots named twice in one launch, compare-and-swap lets one be the first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import ledger as g
from . import record as r
from .launch import block_of, jit, launch
from .mixing_triton import IDENTITY, POSITION_MASK, POSITION_SHIFT, RECORD_WORDS, append_rows
from .violations import ViolationBuffer

_FREE = tl.constexpr(int(g.State.FREE))
_OWNED = tl.constexpr(int(g.State.OWNED))
_CACHED = tl.constexpr(int(g.State.CACHED))
_QUARANTINED = tl.constexpr(int(g.State.QUARANTINED))
_OP_ALLOC = tl.constexpr(int(g.Op.ALLOC))
_OP_FREE = tl.constexpr(int(g.Op.FREE))
_OP_INSERT = tl.constexpr(int(g.Op.INSERT))
_OP_QUARANTINE = tl.constexpr(int(g.Op.QUARANTINE))
_OP_HOLD = tl.constexpr(int(g.Op.HOLD))
_OP_LAND = tl.constexpr(int(g.Op.LAND))
_OP_TRIM = tl.constexpr(int(g.Op.TRIM))
_OP_UNTRIM = tl.constexpr(int(g.Op.UNTRIM))
_OP_AIM = tl.constexpr(int(g.Op.AIM))
_STATE_MASK = tl.constexpr(g.STATE_MASK)
_IN_FLIGHT = tl.constexpr(g.IN_FLIGHT)
_CONTESTED = tl.constexpr(g.CONTESTED)
_TRIMMED = tl.constexpr(g.TRIMMED)
_AIMED = tl.constexpr(g.AIMED)
_ROW_SHIFT = tl.constexpr(g.ROW_SHIFT)
_ROW_MASK = tl.constexpr((1 << g.ROW_BITS) - 1)
_OWNER_MASK = tl.constexpr(g.OWNER_MASK)
_UNCLAIMED = tl.constexpr(g.UNCLAIMED)
_TREE = tl.constexpr(g.TREE)
NEVER = tl.constexpr(-1)  # no word is negative, so nothing is swapped where this is expected
_DOUBLE_ALLOC = tl.constexpr(int(r.Kind.DOUBLE_ALLOC))
_DOUBLE_FREE = tl.constexpr(int(r.Kind.DOUBLE_FREE))
_FREE_IN_USE = tl.constexpr(int(r.Kind.FREE_IN_USE))
_FREE_IN_TREE = tl.constexpr(int(r.Kind.FREE_IN_TREE))
_FREE_IN_FLIGHT = tl.constexpr(int(r.Kind.FREE_IN_FLIGHT))
_INSERT_NOT_OWNED = tl.constexpr(int(r.Kind.INSERT_NOT_OWNED))
_DELTA_RANGE = tl.constexpr(int(r.Kind.DELTA_RANGE))
_REUSED_IN_FLIGHT = tl.constexpr(int(r.Kind.REUSED_IN_FLIGHT))


@triton.jit
def is_held(word):
    """Whether somebody has the slot."""
    state = word & _STATE_MASK
    return (state == _OWNED) | (state == _CACHED)


@jit
def _apply_delta(
    words_ptr, seats_ptr, records_ptr, writers_ptr, req_to_token_ptr, slots_ptr, violations_ptr, violation_count_ptr,
    n: tl.int64, actor: tl.int64, slot_count: tl.int64, row_count: tl.int64, context: tl.int64, row_stride: tl.int64,
    page_size: tl.int64, first_slot: tl.int64, violation_capacity: tl.int64, OP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    listed = i < n
    slot = tl.load(slots_ptr + i, mask=listed, other=0)
    outside = listed & ((slot < first_slot) | (slot >= slot_count))
    inside = listed & ~outside
    slot = tl.where(listed, slot, 0)
    word_ptr = words_ptr + tl.where(inside, slot, 0)
    old = tl.load(word_ptr)
    state = old & _STATE_MASK
    owner = old & _OWNER_MASK
    kind = tl.zeros((BLOCK,), tl.int64)
    who = kind + actor
    found = old

    if OP == _OP_ALLOC:
        free = inside & (state == _FREE) & ((old & _IN_FLIGHT) == 0)
        got = tl.atomic_cas(word_ptr, tl.where(free, old, NEVER), tl.full((BLOCK,), _UNCLAIMED, tl.int64))
        given = free & (got == old)
        lost = inside & ~given
        tl.atomic_or(word_ptr, tl.full((BLOCK,), _CONTESTED, tl.int64), mask=lost)
        reused = given & ((old & _AIMED) != 0)
        found = tl.where(reused, old, tl.where(free, _UNCLAIMED, old & ~_CONTESTED))
        kind = tl.where(lost, _DOUBLE_ALLOC, kind)
        kind = tl.where(reused, _REUSED_IN_FLIGHT, kind)
        kind = tl.where(outside, _DELTA_RANGE, kind)
    elif OP == _OP_FREE:
        held = inside & is_held(old)
        freed = owner | (old & _AIMED)
        got = tl.atomic_cas(word_ptr, tl.where(held, old, NEVER), freed)
        done = held & (got == old)
        flies = (old & _IN_FLIGHT) != 0
        row = (owner >> _ROW_SHIFT) & _ROW_MASK
        position = tl.load(records_ptr + tl.where(inside, slot, 0) * RECORD_WORDS + IDENTITY)
        position = (position >> POSITION_SHIFT) & POSITION_MASK
        near = done & (owner != 0) & (row < row_count) & (position < context)
        seat = tl.load(seats_ptr + row, mask=near, other=0)
        entry = tl.load(req_to_token_ptr + row * row_stride + position, mask=near, other=-1).to(tl.int64)
        named = near & (seat == owner) & (entry == slot)
        kind = tl.where(done & (state == _OWNED) & named, _FREE_IN_USE, kind)
        kind = tl.where(done & (state == _CACHED) & (actor != _TREE), _FREE_IN_TREE, kind)
        kind = tl.where(done & flies, _FREE_IN_FLIGHT, kind)
        again = (held & ~done) | (inside & (state == _FREE))
        found = tl.where(held & ~done, freed, old)
        kind = tl.where(again, _DOUBLE_FREE, kind)
        kind = tl.where(outside & (slot != 0), _DELTA_RANGE, kind)
    elif OP == _OP_INSERT:
        moves = inside & ((state == _FREE) | (state == _OWNED))
        taken = (old & ~_STATE_MASK) | _CACHED
        got = tl.atomic_cas(word_ptr, tl.where(moves, old, NEVER), taken)
        lost = moves & (got != old)
        by = who & _OWNER_MASK
        sound = moves & ~lost & (state == _OWNED) & ((owner == 0) | (owner == by) | (by == 0))
        found = tl.where(lost, taken, old)
        kind = tl.where(inside & ~sound & (state != _QUARANTINED), _INSERT_NOT_OWNED, kind)
        kind = tl.where(outside & (slot != 0), _DELTA_RANGE, kind)
    elif OP == _OP_QUARANTINE:
        tl.store(word_ptr, owner | _QUARANTINED, mask=inside)
    elif OP == _OP_HOLD:
        tl.store(word_ptr, old | _IN_FLIGHT, mask=inside)
    elif OP == _OP_LAND:
        tl.store(word_ptr, old & ~(_IN_FLIGHT | _AIMED), mask=inside)
    elif OP == _OP_AIM:
        tl.store(word_ptr, old | _AIMED, mask=inside)
    elif OP == _OP_TRIM:
        tl.store(word_ptr, old | _TRIMMED, mask=inside & is_held(old))
    elif OP == _OP_UNTRIM:
        tl.store(word_ptr, old & ~_TRIMMED, mask=inside)
    else:
        head = slot // page_size * page_size
        for k in range(page_size):
            near = inside & (head + k < slot_count)
            rest = tl.load(words_ptr + head + k, mask=near, other=0)
            tl.store(words_ptr + head + k, rest & (_OWNER_MASK | _AIMED), mask=near & is_held(rest))

    bad = kind != 0
    if tl.max(bad.to(tl.int32), 0) > 0:
        in_pool = bad & inside
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, bad, kind, -1, -1, slot, 0,
            tl.where(in_pool, found, 0), who, OP, 0, 0,
            tl.load(writers_ptr + slot, mask=in_pool, other=0),
        )  # fmt: skip


def apply_delta(
    *,
    op: g.Op,
    actor: int,
    slots: torch.Tensor,
    words: torch.Tensor,
    seats: torch.Tensor,
    records: torch.Tensor,
    writers: torch.Tensor,
    req_to_token: torch.Tensor,
    page_size: int,
    first_slot: int,
    violations: ViolationBuffer,
    block: int | None = None,
) -> None:
    """See :func:`ledger_reference.apply_delta`. ``block``: slots a program, a power of two."""
    n = slots.shape[0]
    if n == 0:
        return
    if block is None:
        block = block_of(n, 32, 256)
    launch(
        _apply_delta,
        -(-n // block),
        (
            words,
            seats,
            records,
            writers,
            req_to_token,
            slots,
            violations.rows,
            violations.count,
            n,
            actor,
            words.shape[0],
            seats.shape[0],
            req_to_token.shape[1],
            req_to_token.stride(0),
            page_size,
            first_slot,
            violations.capacity,
        ),
        (int(op), block),
        device=words.device,
        warps=max(1, min(4, block // 64)),
    )
