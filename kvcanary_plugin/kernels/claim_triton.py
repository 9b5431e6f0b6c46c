"""Check what a forward is to store and read against the ledger, on a GPU."""

from __future__ import annotations

import torch
import triton.language as tl

from . import ledger as g
from . import record as r
from .launch import block_of, jit, launch
from .ledger_triton import NEVER, is_held
from .mixing_triton import append_rows, find_owner
from .violations import ViolationBuffer

_FREE = tl.constexpr(int(g.State.FREE))
_OWNED = tl.constexpr(int(g.State.OWNED))
_QUARANTINED = tl.constexpr(int(g.State.QUARANTINED))
_STATE_MASK = tl.constexpr(g.STATE_MASK)
_CONTESTED = tl.constexpr(g.CONTESTED)
_TRIMMED = tl.constexpr(g.TRIMMED)
_STAMP_SHIFT = tl.constexpr(g.STAMP_SHIFT)
_STAMP_MASK = tl.constexpr(g.STAMP_MASK)
_OWNER_MASK = tl.constexpr(g.OWNER_MASK)
_UNCLAIMED = tl.constexpr(g.UNCLAIMED)
_DOUBLE_ALLOC = tl.constexpr(int(r.Kind.DOUBLE_ALLOC))
_WRITE_NOT_OWNED = tl.constexpr(int(r.Kind.WRITE_NOT_OWNED))
_WRITE_TWICE = tl.constexpr(int(r.Kind.WRITE_TWICE))
_FOREIGN_SLOT = tl.constexpr(int(r.Kind.FOREIGN_SLOT))
_FREED_SLOT = tl.constexpr(int(r.Kind.FREED_SLOT))
_QUARANTINED_SLOT = tl.constexpr(int(r.Kind.QUARANTINED_SLOT))
_TRIMMED_SLOT = tl.constexpr(int(r.Kind.TRIMMED_SLOT))


@jit
def _claim_writes(
    words_ptr, seats_ptr, writers_ptr, slots_ptr, rows_ptr, owners_ptr, prefix_lens_ptr, offsets_ptr, violations_ptr,
    violation_count_ptr, n: tl.int64, bs: tl.int64, slot_count: tl.int64, row_count: tl.int64, first_slot: tl.int64,
    step_ptr, step: tl.int64, violation_capacity: tl.int64,
    STEP_LOADED: tl.constexpr, BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    request, row, begin, end, first = find_owner(
        offsets_ptr, rows_ptr, bs, tl.program_id(0).to(tl.int64), BLOCK, REQUESTS
    )
    begin = tl.maximum(begin, 0)
    t = first + tl.arange(0, BLOCK)
    listed = (t >= begin) & (t < tl.minimum(end, n))
    owner = tl.load(owners_ptr + request)
    position = t - begin + tl.load(prefix_lens_ptr + request)
    if STEP_LOADED:
        step = tl.load(step_ptr)
    if (first == begin) & (end > begin) & (row > 0) & (row < row_count):
        tl.store(seats_ptr + row, owner)

    slot = tl.load(slots_ptr + t, mask=listed, other=0)
    inside = listed & (slot >= first_slot) & (slot < slot_count)
    stamp = (step << _STAMP_SHIFT) & _STAMP_MASK
    wanted = tl.zeros((BLOCK,), tl.int64) + (owner | stamp | _OWNED)
    word_ptr = words_ptr + tl.where(inside, slot, 0)
    got = tl.atomic_cas(word_ptr, tl.where(inside, _UNCLAIMED, NEVER).to(tl.int64), wanted)
    contested = inside & is_held(got) & ((got & _CONTESTED) != 0)
    if tl.max((inside & (got != _UNCLAIMED)).to(tl.int32), 0) > 0:
        again = tl.atomic_cas(word_ptr, tl.where(contested, got, NEVER), wanted)
        found = tl.where(contested, again, got)
        won = contested & (again == got)
        is_owned = ((found & _STATE_MASK) == _OWNED) & ~won
        just_now = is_owned & ((found & _STAMP_MASK) == stamp) & ((found & _OWNER_MASK) != 0)
        mine = is_owned & ((found & _OWNER_MASK) == owner)
        kind = tl.where(won, _DOUBLE_ALLOC, tl.where(just_now, _WRITE_TWICE, _WRITE_NOT_OWNED))
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity,
            inside & (got != _UNCLAIMED) & ~(mine & ~just_now),
            kind, request, position, slot, 0, found, owner, 0, 0, 0, tl.load(writers_ptr + slot, mask=inside, other=0),
        )  # fmt: skip
    outside = listed & ~inside
    if tl.max(outside.to(tl.int32), 0) > 0:
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, outside,
            _WRITE_NOT_OWNED, request, position, slot, 0, 0, owner, 0, 0, 0, 0,
        )  # fmt: skip


@jit
def _check_reads(
    words_ptr, writers_ptr, req_to_token_ptr, rows_ptr, owners_ptr, offsets_ptr, violations_ptr, violation_count_ptr,
    bs: tl.int64, slot_count: tl.int64, first_slot: tl.int64, row_count: tl.int64, context: tl.int64,
    row_stride: tl.int64, window: tl.int64, may_share: tl.int64, violation_capacity: tl.int64,
    BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    request, row, begin, end, first = find_owner(
        offsets_ptr, rows_ptr, bs, tl.program_id(0).to(tl.int64), BLOCK, REQUESTS
    )
    owner = tl.load(owners_ptr + request)
    length = end - begin
    position = first - begin + tl.arange(0, BLOCK)
    listed = (position < tl.minimum(length, context)) & (row >= 1) & (row < row_count)
    slot = tl.load(req_to_token_ptr + row * row_stride + position, mask=listed, other=-1).to(tl.int64)
    inside = listed & (slot >= first_slot) & (slot < slot_count)
    found = tl.load(words_ptr + slot, mask=inside, other=_UNCLAIMED)
    state = found & _STATE_MASK
    whose = found & _OWNER_MASK
    mine = whose == owner
    foreign = (state == _OWNED) & (whose != 0) & ~mine & (may_share == 0)
    trimmed = ((found & _TRIMMED) != 0) & (position >= length - window) & (window > 0)
    quarantined = (state == _QUARANTINED) & ~mine
    bad = inside & (foreign | trimmed | quarantined | (state == _FREE))
    if tl.max(bad.to(tl.int32), 0) > 0:
        kind = tl.where(foreign, _FOREIGN_SLOT, _TRIMMED_SLOT)
        kind = tl.where(quarantined, _QUARANTINED_SLOT, kind)
        kind = tl.where(state == _FREE, _FREED_SLOT, kind)
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, bad, kind, request, position, slot, 0, found,
            owner, 0, 0, 0, tl.load(writers_ptr + slot, mask=bad, other=0),
        )  # fmt: skip


def claim_writes(
    *,
    words: torch.Tensor,
    seats: torch.Tensor,
    writers: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    owners: torch.Tensor,
    prefix_lens: torch.Tensor,
    offsets: torch.Tensor,
    step: int | torch.Tensor,
    first_slot: int,
    violations: ViolationBuffer,
    block: int | None = None,
) -> None:
    """See :func:`ledger_reference.claim_writes`.

    ``step`` may be an int64 tensor (1,) on the device, and tokens past the offsets are padding, so that a captured
    launch serves every step.
    """
    n, bs = slots.shape[0], rows.shape[0]
    if bs == 0:
        return
    if block is None:
        block = 32 if n <= bs else 256
    launch(
        _claim_writes,
        n // block + bs,
        (
            words,
            seats,
            writers,
            slots,
            rows,
            owners,
            prefix_lens,
            offsets,
            violations.rows,
            violations.count,
            n,
            bs,
            words.shape[0],
            seats.shape[0],
            first_slot,
            offsets if isinstance(step, int) else step,
            step if isinstance(step, int) else 0,
            violations.capacity,
        ),
        (not isinstance(step, int), block, block_of(bs, 16, 256)),
        device=words.device,
        warps=1 if n <= bs else 4,
    )


def check_reads(
    *,
    words: torch.Tensor,
    writers: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    owners: torch.Tensor,
    offsets: torch.Tensor,
    total: int,
    window: int,
    may_share: bool,
    first_slot: int,
    violations: ViolationBuffer,
    block: int | None = None,
    warps: int = 2,
) -> None:
    """See :func:`ledger_reference.check_reads`. ``total`` may be an upper bound."""
    if total == 0:
        return
    bs = rows.shape[0]
    if block is None:
        block = 256
    launch(
        _check_reads,
        total // block + bs,
        (
            words,
            writers,
            req_to_token,
            rows,
            owners,
            offsets,
            violations.rows,
            violations.count,
            bs,
            words.shape[0],
            first_slot,
            *req_to_token.shape,
            req_to_token.stride(0),
            window,
            int(may_share),
            violations.capacity,
        ),
        (block, block_of(bs, 16, 256)),
        device=words.device,
        warps=warps,
    )
