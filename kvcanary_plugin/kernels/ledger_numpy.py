"""The ledger of slots on a CPU, in numpy: does what is in order and leaves whatever is not to the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import ledger as g
from . import ledger_reference
from .mixing import as_array
from .violations import ViolationBuffer

Array = npt.NDArray[Any]

_FREE_OR_FLYING = g.STATE_MASK | g.IN_FLIGHT | g.AIMED
_PLAIN = g.STATE_MASK | g.IN_FLIGHT | g.CONTESTED | g.AIMED
_KEPT_BY_INSERT = ~g.STATE_MASK
_FEW = 128  # up to here a set of Python numbers is faster than arrays


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
    """See :func:`.ledger_reference.apply_delta`, which also reports once there is something to report."""
    kept, ids = as_array(words), slots.numpy()
    if len(ids) == 0:
        return
    if op <= g.Op.INSERT and (few := _are_few_and_sound(ids, first_slot, len(kept))) is not False:
        found = kept.take(ids)
        new: Array | int | None
        if op is g.Op.ALLOC:
            new = _given(found)
        elif op is g.Op.FREE:
            new = _freed(found, actor, as_array(seats))
        else:
            new = _inserted(found, actor)
        if new is not None and (few or _are_distinct(kept, ids, found)):
            kept[ids] = new
            return
    ledger_reference.apply_delta(
        op=op,
        actor=actor,
        slots=slots,
        words=words,
        seats=seats,
        records=records,
        writers=writers,
        req_to_token=req_to_token,
        page_size=page_size,
        first_slot=first_slot,
        violations=violations,
    )


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
    """See :func:`.ledger_reference.claim_writes`, which also reports once there is something to report."""
    kept, ids, sat, row, who, starts = (as_array(t) for t in (words, slots, seats, rows, owners, offsets))
    count = len(who)
    # Of as many tokens as requests, sound offsets give each request one.
    spread = starts[1:] - starts[:-1] if len(ids) != count else None
    steady = starts[-1] == count and (starts[1:] > starts[:-1]).all() if spread is None else spread.min() > 0
    if len(ids) and steady and _are_inside(row, 1, len(sat)):
        few = _are_few_and_sound(ids, first_slot, len(kept))
        found = kept.take(ids) if few is not False else None
        if found is not None and (found == g.UNCLAIMED).all() and (few or _are_distinct(kept, ids, found)):
            sat[row] = who
            wanted = who | ((step << g.STAMP_SHIFT & g.STAMP_MASK) | g.UNCLAIMED)
            kept[ids] = wanted if spread is None else np.repeat(wanted, spread)
            return
    ledger_reference.claim_writes(
        words=words,
        seats=seats,
        writers=writers,
        slots=slots,
        rows=rows,
        owners=owners,
        prefix_lens=prefix_lens,
        offsets=offsets,
        step=step,
        first_slot=first_slot,
        violations=violations,
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
) -> None:
    """See :func:`.ledger_reference.check_reads`, which also reports once there is something to report."""
    if total == 0:
        return
    if not window and _are_sound(
        as_array(words), as_array(req_to_token), as_array(rows), as_array(owners), as_array(offsets), may_share
    ):
        return
    ledger_reference.check_reads(
        words=words,
        writers=writers,
        req_to_token=req_to_token,
        rows=rows,
        owners=owners,
        offsets=offsets,
        total=total,
        window=window,
        may_share=may_share,
        first_slot=first_slot,
        violations=violations,
    )


def _are_inside(ids: Array, first: int, count: int) -> bool:
    """Whether all ids lie within [first, count). Seen as unsigned, one below the first lies far above the last."""
    return bool((ids.view(np.uint64) - np.uint64(first)).max() < count - first)


def _are_few_and_sound(ids: Array, first: int, count: int) -> bool | None:
    """False if an id is outside [first, count), or few ids are not distinct; None if there are too many to tell."""
    if len(ids) > _FEW:
        return None if _are_inside(ids, first, count) else False
    chosen = set(ids.tolist())
    return len(chosen) == len(ids) and min(chosen) >= first and max(chosen) < count


def _are_distinct(kept: Array, ids: Array, found: Array) -> bool:
    """Whether no slot is named twice. Their words are used to find out; if so they hold garbage afterwards."""
    index = np.arange(len(ids))
    kept[ids] = index
    if (kept.take(ids) == index).all():
        return True
    kept[ids] = found
    return False


def _given(found: Array) -> int | None:
    return None if (found & _FREE_OR_FLYING).any() else g.UNCLAIMED


def _freed(found: Array, actor: int, seats: Array) -> Array | None:
    plain = found & _PLAIN
    cached = plain == g.State.CACHED
    if not (cached | (plain == g.State.OWNED)).all():
        return None
    owner: Array = found & g.OWNER_MASK
    if not cached.all():
        rows = (owner >> g.ROW_SHIFT) & ((1 << g.ROW_BITS) - 1)
        sits = (seats.take(rows, mode="clip") == owner) & (owner != 0) & ~cached
        if sits.any():
            return None
    return None if actor != g.TREE and cached.any() else owner


def _inserted(found: Array, actor: int) -> Array | None:
    if ((found & _PLAIN) != g.State.OWNED).any():
        return None
    owner, by = found & g.OWNER_MASK, actor & g.OWNER_MASK
    if by and ((owner != by) & (owner != 0)).any():
        return None
    taken: Array = found & _KEPT_BY_INSERT | int(g.State.CACHED)
    return taken


def _are_sound(kept: Array, table: Array, rows: Array, owners: Array, offsets: Array, may_share: bool) -> bool:
    """Whether it is certain that nothing is wrong."""
    lengths = offsets[1:] - offsets[:-1]
    if not _are_inside(rows, 1, len(table)) or lengths.max() > table.shape[1]:
        return False
    # Seen as unsigned, a negative id is too large as well. Padding is free in the ledger.
    entries = [table[row, :length] for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)]
    try:
        found = kept.take(np.concatenate(entries).view(np.uint32))
    except IndexError:
        return False
    # What the tree holds is most of it, and sound whoever reads it.
    rest = np.flatnonzero((found & g.STATE_MASK) != g.State.CACHED)
    if not len(rest):
        return True
    found = found[rest]
    if ((found & g.STATE_MASK) != g.State.OWNED).any():
        return False
    if may_share:
        return True
    theirs = np.repeat(owners, lengths)[rest]
    return bool((((found & g.OWNER_MASK) == theirs) | (found < g.OWNER_BIT)).all())
