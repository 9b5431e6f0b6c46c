"""Faults in the bookkeeping of slots. Each is for one forward: what it did to the allocator's books and to the ledger
is undone behind it, so that a server under drill keeps serving.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..kernels import ledger as g
from ..kernels import record as r
from ..kernels.mixing import POSITION_SHIFT
from ..report.reporter import MAX_REPORTED_A_STEP
from .books import (
    claim,
    give_next,
    heard_of,
    is_owned,
    is_staying,
    keep,
    pick_entry,
    pick_free,
    settle,
    slots_in_page,
    to_tensor,
)
from .library import Fault, Injected

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step

_MOST = 16  # slots that one fault concerns: more would not be listed one by one


def free_running(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Give back a slot that a running request owns, as a release that counts one token too many does."""
    return _free_one(guard, step, rng, is_owned)


def free_cached(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Give back a slot that the radix tree holds."""
    return _free_one(guard, step, rng, lambda word, owner: g.state_of(word) is g.State.CACHED)


def free_twice(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Give back a slot that is free."""
    settle(guard, step)
    slot = pick_free(guard, rng)
    if slot is None:
        return None
    restore, allocator = keep(guard, [slot])
    allocator.free(to_tensor(guard, [slot]))
    return Injected("ownership", (slot,), (), {}, restore)


def alloc_taken(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Let the allocator give out a slot that a running request owns, from a free list that names it."""
    settle(guard, step)
    found = pick_entry(guard, step, rng, is_owned)
    if found is None or guard.ledger is None:
        return None
    index, position, slot = found
    size = guard.pool.page_size
    page = range(slot // size * size, (slot // size + 1) * size)
    taken = [each for each in page if g.state_of(int(guard.ledger.words[each])) is not g.State.FREE]
    restore, allocator = keep(guard, [slot])
    give_next(guard, slot)
    allocator.alloc(size)
    fields = {"request": step.requests[index].rid, "position": position}
    return Injected("ownership", tuple(taken[:MAX_REPORTED_A_STEP]), (), fields, restore)


def release_early(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Release a decoding request whose next forward still reads and stores, as if its end had been noted too early."""
    settle(guard, step)
    if guard.ledger is None or step.write_total != len(step.requests):
        return None
    found = pick_entry(guard, step, rng, is_owned)
    if found is None:
        return None
    index, slot = found[0], found[2]
    row, length = step.rows[index], step.prefix_lens[index]
    new = int(guard.pool.req_to_token[row, length])
    named = [*(each for each in slots_in_page(guard, row, length, slot)[:_MOST] if each != new), new]
    restore, allocator = keep(guard, named)
    guard.ledger.act_for_row(row)
    allocator.free(to_tensor(guard, named))
    guard.ledger.stop_acting()

    def put_back() -> None:
        restore()
        claim(guard, step, index, new)

    heard = {*heard_of(guard, named), new}
    return Injected("ownership", tuple(sorted(heard)), (), {"request": step.requests[index].rid}, put_back)


def abort_chunk(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Release the end of a chunk of a prompt that the radix tree has taken, as an abort between two chunks does."""
    settle(guard, step)
    ledger = guard.ledger
    if ledger is None:
        return None
    found = []
    for index, (row, length) in enumerate(zip(step.rows, step.prefix_lens, strict=True)):
        if not 0 < length < len(step.requests[index].origin_input_ids):
            continue
        slots = guard.pool.req_to_token[row, :length].long()
        words = ledger.words[slots]
        theirs = (words & g.OWNER_MASK == ledger.tenants.owner_of(row)) & (words & g.STATE_MASK == int(g.State.CACHED))
        if len(inserted := slots[theirs].tolist()):
            found.append((index, inserted[-_MOST:]))
    if not found:
        return None
    index, inserted = rng.choice(found)
    restore, allocator = keep(guard, inserted)
    ledger.act_for_row(step.rows[index])
    allocator.free(to_tensor(guard, inserted))
    ledger.stop_acting()
    return Injected("ownership", tuple(heard_of(guard, inserted)), (), {"request": step.requests[index].rid}, restore)


def foreign_entry(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Point one entry of a running request's row at a slot that another one owns."""
    settle(guard, step)
    other = pick_entry(guard, step, rng, is_owned)
    victims = [i for i in _list_victims(step) if other is not None and i != other[0]]
    if other is None or not victims:
        return None
    victim, slot = rng.choice(victims), other[2]
    position = rng.randrange(step.prefix_lens[victim])
    fields = {"request": step.requests[victim].rid, "other": step.requests[other[0]].rid}
    return Injected("ownership", (slot,), (position,), fields, _point(guard, step, victim, position, [slot]))


def stale_entry(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Point one entry of a running request's row at a free slot."""
    victims = _list_victims(step)
    slot = pick_free(guard, rng)
    if not victims or slot is None:
        return None
    victim = rng.choice(victims)
    position = rng.randrange(step.prefix_lens[victim])
    fields = {"request": step.requests[victim].rid}
    return Injected("ownership", (slot,), (position,), fields, _point(guard, step, victim, position, [slot]))


def stale_row(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Put entries of a request that has left back into the row of a running one, at the positions that they had."""
    settle(guard, step)
    ledger, records = guard.ledger, guard.records
    victims = _list_victims(step)
    if ledger is None or not victims:
        return None
    victim = rng.choice(victims)
    identities, length = records.hot[:, r.IDENTITY], step.prefix_lens[victim]
    positions = identities >> POSITION_SHIFT & r.POSITION_MASK
    owned = ledger.words & g.OWNER_MASK != 0
    is_old = owned & (ledger.words & g.STATE_MASK == int(g.State.FREE)) & (positions < length)
    is_old[: records.first_slot] = False
    old = torch.nonzero(is_old).flatten().tolist()
    if not old:
        return None
    owner = int(ledger.words[rng.choice(old)]) & g.OWNER_MASK
    place = {int(positions[slot]): slot for slot in old if int(ledger.words[slot]) & g.OWNER_MASK == owner}
    first = min(place)
    stretch = [place[p] for p in range(first, first + _MOST) if p in place]
    if sorted(place)[: len(stretch)] != list(range(first, first + len(stretch))):
        return None
    fields = {"request": step.requests[victim].rid, "entries": len(stretch)}
    # A stretch of the same request's slots is told as one, by its first.
    return Injected("ownership", (stretch[0],), (first,), fields, _point(guard, step, victim, first, stretch))


def _list_victims(step: Step) -> list[int]:
    """Requests whose row may name other slots for a forward without anybody else taking them for theirs."""
    pairs = zip(step.requests, step.prefix_lens, strict=True)
    return [index for index, (request, length) in enumerate(pairs) if length and is_staying(request)]


OWNERSHIP_FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        free_running,
        free_cached,
        free_twice,
        alloc_taken,
        release_early,
        abort_chunk,
        foreign_entry,
        stale_entry,
        stale_row,
    )
}


def _free_one(guard: Guard, step: Step, rng: random.Random, suits: Callable[[int, int], bool]) -> Injected | None:
    """Give back one slot, or one page, of whoever reads it."""
    settle(guard, step)
    found = pick_entry(guard, step, rng, suits)
    if found is None:
        return None
    index, position, slot = found
    named = slots_in_page(guard, step.rows[index], step.prefix_lens[index], slot)[:_MOST]
    restore, allocator = keep(guard, named)
    allocator.free(to_tensor(guard, named))
    fields = {"request": step.requests[index].rid, "position": position}
    return Injected("ownership", tuple(heard_of(guard, named)), (), fields, restore)


def _point(guard: Guard, step: Step, index: int, position: int, slots: Sequence[int]) -> Callable[[], None]:
    """Change entries of a row, from ``position`` on. Returns what changes them back."""
    entries = guard.pool.req_to_token[step.rows[index], position : position + len(slots)]
    kept = entries.clone()
    entries[:] = torch.tensor(slots, dtype=entries.dtype, device=entries.device)

    def restore() -> None:
        entries[:] = kept

    return restore
