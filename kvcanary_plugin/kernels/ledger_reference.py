"""Keep the ledger of slots and check what a forward reads and stores against it. Torch reference.

Slots named twice in one call are treated in order: the second sees what the first has left.
"""

from __future__ import annotations

import torch

from . import ledger as g
from . import record as r
from .mixing import POSITION_SHIFT
from .plan_reference import expand_offsets
from .violations import ViolationBuffer

Columns = dict[int, torch.Tensor | int]


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
) -> None:
    """Bring the ledger up to date with one call of the allocator or the radix tree, and report what it breaks.

    Args:
        op: what was done.
        actor: owner bits of the request for which it was done, ``TREE`` for the radix tree, 0 if not known. Frees by
            ``TREE`` may take what the tree holds.
        slots: int64 (n,). One outside [first_slot, slot_count) is reported and not followed; slot 0, which SGLang uses
            for "none", only where the allocator gives it out.
        words: int64 (slot_count,), the ledger, updated.
        seats: int64 (row_count,), owner bits of the request that sits on each row, 0 for nobody.
        records: int64 (slot_count, RECORD_WORDS), read for the position a slot was last stored for.
        writers: int64 (slot_count,), only copied into violation rows.
        req_to_token: int32 (row_count, context), rows contiguous.
        page_size: slots a page.
        first_slot: slots below it are padding.
    """
    if slots.numel() == 0:
        return
    outside = (slots < first_slot) | (slots >= words.shape[0])
    common: Columns = {r.ROW_REQUEST: -1, r.ROW_POSITION: -1, g.ROW_ACTOR: actor, g.ROW_OP: int(op)}
    if op in (g.Op.ALLOC, g.Op.FREE, g.Op.INSERT):
        shown = outside if op is g.Op.ALLOC else outside & (slots != 0)
        violations.append(shown, {r.ROW_KIND: int(r.Kind.DELTA_RANGE), r.ROW_SLOT: slots, **common})
    slots = slots[~outside]
    old = words[slots]
    state, owner = old & g.STATE_MASK, old & g.OWNER_MASK
    held = (state == g.State.OWNED) | (state == g.State.CACHED)
    _, later = find_earlier(slots)

    def report(kind: r.Kind, mask: torch.Tensor, found: torch.Tensor) -> None:
        columns: Columns = {r.ROW_SLOT: slots, r.ROW_WRITER: writers[slots], g.ROW_WORD: found}
        violations.append(mask, {r.ROW_KIND: int(kind), **columns, **common})

    if op is g.Op.ALLOC:
        free = (state == g.State.FREE) & ((old & g.IN_FLIGHT) == 0)
        given = free & ~later
        report(r.Kind.DOUBLE_ALLOC, ~given, torch.where(free, g.UNCLAIMED, old & ~g.CONTESTED))
        report(r.Kind.REUSED_IN_FLIGHT, given & ((old & g.AIMED) != 0), old)
        words[slots[given]] = g.UNCLAIMED
        words[slots[~given]] |= g.CONTESTED
    elif op is g.Op.FREE:
        freed = owner | old & g.AIMED | int(g.State.FREE)
        done = held & ~later
        report(r.Kind.DOUBLE_FREE, (state == g.State.FREE) | (held & later), torch.where(held, freed, old))
        flies = (old & g.IN_FLIGHT) != 0
        report(r.Kind.FREE_IN_FLIGHT, done & flies, old)
        cached = state == g.State.CACHED
        report(r.Kind.FREE_IN_TREE, done & ~flies & cached & (actor != g.TREE), old)
        named = is_named(slots, owner, seats, records, req_to_token)
        report(r.Kind.FREE_IN_USE, done & ~flies & ~cached & named, old)
        words[slots[done]] = freed[done]
    elif op is g.Op.INSERT:
        stays = (state == g.State.CACHED) | (state == g.State.QUARANTINED)
        taken = old & ~g.STATE_MASK | int(g.State.CACHED)
        by = actor & g.OWNER_MASK
        sound = (state == g.State.OWNED) & ~later & ((owner == 0) | (owner == by) | (by == 0))
        bad = ~sound & (state != g.State.QUARANTINED)
        report(r.Kind.INSERT_NOT_OWNED, bad, torch.where(later & ~stays, taken, old))
        words[slots] = torch.where(stays, old, taken)
    elif op is g.Op.QUARANTINE:
        words[slots] = owner | int(g.State.QUARANTINED)
    elif op is g.Op.HOLD:
        words[slots] = old | g.IN_FLIGHT
    elif op is g.Op.LAND:
        words[slots] = old & ~(g.IN_FLIGHT | g.AIMED)
    elif op is g.Op.AIM:
        words[slots] = old | g.AIMED
    elif op is g.Op.TRIM:
        words[slots] = torch.where(held, old | g.TRIMMED, old)
    elif op is g.Op.UNTRIM:
        words[slots] = old & ~g.TRIMMED
    else:
        pages = torch.unique(slots // page_size)
        whole = (pages[:, None] * page_size + torch.arange(page_size, device=slots.device)).view(-1)
        whole = whole[whole < words.shape[0]]
        rest = words[whole]
        held = ((rest & g.STATE_MASK) == g.State.OWNED) | ((rest & g.STATE_MASK) == g.State.CACHED)
        words[whole] = torch.where(held, rest & (g.OWNER_MASK | g.AIMED), rest)


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
    step: int,
    first_slot: int,
    violations: ViolationBuffer,
) -> None:
    """Give every slot that a forward is to store to its owner, and report those that are not the request's to store to.

    The request of a token must own the slot, or be the first to store to it since it was given out. Its row is its seat
    from now on.

    Args:
        words: int64 (slot_count,), the ledger, updated.
        seats: int64 (row_count,), updated for the rows of the batch.
        writers: int64 (slot_count,), only copied into violation rows.
        slots: int64 (n,). One outside [first_slot, slot_count) is reported and not followed.
        rows, owners, prefix_lens: int64 (bs,). ``owners`` are owner bits.
        offsets: int64 (bs + 1,), CSR over the n tokens.
        step: number of the forward.
        first_slot: slots below it are padding.
    """
    lengths = offsets[1:] - offsets[:-1]
    seated = (rows > 0) & (rows < seats.shape[0]) & (lengths > 0)
    seats[rows[seated]] = owners[seated]
    n = slots.numel()
    if n == 0:
        return
    request = expand_offsets(offsets, n)
    position = torch.arange(n, device=slots.device) + (prefix_lens - offsets[:-1])[request]
    outside = (slots < first_slot) | (slots >= words.shape[0])
    inside = torch.where(outside, 0, slots)
    stamp = step << g.STAMP_SHIFT & g.STAMP_MASK
    owner = owners[request]
    wanted = owner | stamp | int(g.State.OWNED)
    first, later = find_earlier(slots)

    def takes(word: torch.Tensor) -> torch.Tensor:
        return (word == g.UNCLAIMED) | is_contested(word)

    old = words[inside]
    found = torch.where(later & takes(old), wanted[first], old)
    contested = is_contested(found)
    is_owned = (found & g.STATE_MASK) == g.State.OWNED
    just_now = is_owned & ~contested & ((found & g.STAMP_MASK) == stamp) & ((found & g.OWNER_MASK) != 0)
    mine = is_owned & ~contested & ((found & g.OWNER_MASK) == owner)
    kind = torch.where(just_now, int(r.Kind.WRITE_TWICE), int(r.Kind.WRITE_NOT_OWNED))
    kind = torch.where(contested, int(r.Kind.DOUBLE_ALLOC), kind)
    bad = outside | ~((found == g.UNCLAIMED) | (mine & ~just_now))
    violations.append(
        bad,
        {
            r.ROW_KIND: torch.where(outside, int(r.Kind.WRITE_NOT_OWNED), kind),
            r.ROW_REQUEST: request,
            r.ROW_POSITION: position,
            r.ROW_SLOT: slots,
            r.ROW_WRITER: torch.where(outside, 0, writers[inside]),
            g.ROW_WORD: torch.where(outside, 0, found),
            g.ROW_ACTOR: owner,
        },
    )
    claimed = takes(old) & ~later & ~outside
    words[slots[claimed]] = wanted[claimed]


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
) -> None:
    """Check that every slot a forward is to read is its request's, or held in the radix tree.

    Slots outside the pool, rows outside the table and positions past a row are not followed, and slots that nobody has
    stored to since they were given out are not reported: ``verify_prefixes`` does both.

    Args:
        words: int64 (slot_count,), the ledger.
        writers: int64 (slot_count,), only copied into violation rows.
        req_to_token: int32 (row_count, context), rows contiguous.
        rows, owners: int64 (bs,). ``owners`` are owner bits.
        offsets: int64 (bs + 1,), CSR over the positions to be read.
        total: ``offsets[-1]``, known to the host.
        window: of the last so many positions the window part must be there, 0 if there is none.
        may_share: another request's slot is no violation: nobody says which slots the radix tree holds.
        first_slot: slots below it are padding.
    """
    if total == 0:
        return
    lengths = offsets[1:] - offsets[:-1]
    request = expand_offsets(offsets, total)
    position = torch.arange(total, device=words.device) - offsets[:-1][request]
    followed = ((rows >= 1) & (rows < req_to_token.shape[0]))[request] & (position < req_to_token.shape[1])
    slots = req_to_token[torch.where(followed, rows[request], 0), torch.where(followed, position, 0)].to(torch.int64)
    followed = followed & (slots >= first_slot) & (slots < words.shape[0])
    inside = torch.where(followed, slots, 0)
    found, owner = words[inside], owners[request]
    state = found & g.STATE_MASK
    is_owned, has_owner = state == g.State.OWNED, (found & g.OWNER_MASK) != 0
    mine = (found & g.OWNER_MASK) == owner
    kind = torch.zeros_like(found)
    if window:
        trimmed = ((found & g.TRIMMED) != 0) & (position >= lengths[request] - window)
        kind = torch.where(trimmed, int(r.Kind.TRIMMED_SLOT), kind)
    if not may_share:
        kind = torch.where(is_owned & has_owner & ~mine, int(r.Kind.FOREIGN_SLOT), kind)
    kind = torch.where((state == g.State.QUARANTINED) & ~mine, int(r.Kind.QUARANTINED_SLOT), kind)
    kind = torch.where(state == g.State.FREE, int(r.Kind.FREED_SLOT), kind)
    violations.append(
        followed & (kind != 0),
        {
            r.ROW_KIND: kind,
            r.ROW_REQUEST: request,
            r.ROW_POSITION: position,
            r.ROW_SLOT: slots,
            r.ROW_WRITER: writers[inside],
            g.ROW_WORD: found,
            g.ROW_ACTOR: owner,
        },
    )


def find_earlier(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the first element equal to each (int64 (n,)), and whether that is an earlier one (bool (n,))."""
    order = torch.argsort(slots, stable=True)
    ordered = slots[order]
    starts = torch.ones_like(slots, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    heads = order[starts]
    first = torch.empty_like(slots)
    first[order] = heads[torch.cumsum(starts, 0) - 1]
    return first, first != torch.arange(slots.numel(), device=slots.device)


def is_contested(word: torch.Tensor) -> torch.Tensor:
    """Given out while somebody had it, who may still have it."""
    state = word & g.STATE_MASK
    return ((word & g.CONTESTED) != 0) & ((state == g.State.OWNED) | (state == g.State.CACHED))


def is_named(
    slots: torch.Tensor, owner: torch.Tensor, seats: torch.Tensor, records: torch.Tensor, req_to_token: torch.Tensor
) -> torch.Tensor:
    """Whether the owner of each slot still sits on its row and the row names the slot where it was stored for."""
    row = (owner >> g.ROW_SHIFT) & ((1 << g.ROW_BITS) - 1)
    position = (records[slots, r.IDENTITY] >> POSITION_SHIFT) & r.POSITION_MASK
    near = (owner != 0) & (row < seats.shape[0]) & (position < req_to_token.shape[1])
    row, position = torch.where(near, row, 0), torch.where(near, position, 0)
    return near & (seats[row] == owner) & (req_to_token[row, position] == slots)
