"""Faults in the bookkeeping of slots. Each is for one forward: what it did to the allocator's books and to the ledger
is undone behind it, so that a server under drill keeps serving.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..kernels import ledger as g
from ..kernels import record as r
from .library import Fault, Injected

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step

_BOOKS = ("free_pages", "release_pages", "staged_pages", "num_staged_pages")


def free_running(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Give back a slot that a running request owns, as a release that counts one token too many does."""
    found = _pick_owned(guard, step, rng)
    if found is None:
        return None
    index, position, slot = found
    restore = _keep(guard, slot)
    _allocator_of(guard).free(torch.tensor([slot], device=guard.pool.req_to_token.device))
    return Injected("ownership", (slot,), (position,), {"request": step.requests[index].rid}, restore)


def free_cached(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Give back a slot that the radix tree holds, as a request does that is aborted behind its insertion."""
    found = _pick(guard, step, rng, lambda word, owner: g.state_of(word) is g.State.CACHED)
    if found is None:
        return None
    index, position, slot = found
    restore = _keep(guard, slot)
    _allocator_of(guard).free(torch.tensor([slot], device=guard.pool.req_to_token.device))
    return Injected("ownership", (slot,), (position,), {"request": step.requests[index].rid}, restore)


def free_twice(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Give back a slot that is free."""
    allocator = _allocator_of(guard)
    if not len(allocator.free_pages):
        return None
    slot = int(allocator.free_pages[rng.randrange(len(allocator.free_pages))]) * guard.pool.page_size
    restore = _keep(guard, slot)
    allocator.free(torch.tensor([slot], device=guard.pool.req_to_token.device))
    return Injected("ownership", (slot,), (), {}, restore)


def alloc_taken(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Let the allocator give out a slot that a running request owns, from a free list that names it."""
    found = _pick_owned(guard, step, rng)
    if found is None:
        return None
    index, position, slot = found
    restore, allocator, size = _keep(guard, slot), _allocator_of(guard), guard.pool.page_size
    page = torch.tensor([slot // size], device=allocator.free_pages.device)
    allocator.free_pages = torch.cat([page, allocator.free_pages])
    allocator.alloc(size)
    return Injected("ownership", (slot,), (position,), {"request": step.requests[index].rid}, restore)


def foreign_entry(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Point one entry of a running request's row at a slot that another one owns."""
    other = _pick_owned(guard, step, rng)
    victims = [i for i, length in enumerate(step.prefix_lens) if length and other is not None and i != other[0]]
    if other is None or not victims:
        return None
    victim, slot = rng.choice(victims), other[2]
    position = rng.randrange(step.prefix_lens[victim])
    fields = {"request": step.requests[victim].rid, "other": step.requests[other[0]].rid}
    return Injected("ownership", (slot,), (position,), fields, _point(guard, step, victim, position, slot))


def stale_entry(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Point one entry of a running request's row at a free slot, as an old row does that comes back."""
    allocator = _allocator_of(guard)
    victims = [index for index, length in enumerate(step.prefix_lens) if length]
    if not victims or not len(allocator.free_pages):
        return None
    victim = rng.choice(victims)
    position = rng.randrange(step.prefix_lens[victim])
    slot = int(allocator.free_pages[rng.randrange(len(allocator.free_pages))]) * guard.pool.page_size
    fields = {"request": step.requests[victim].rid}
    return Injected("ownership", (slot,), (position,), fields, _point(guard, step, victim, position, slot))


OWNERSHIP_FAULTS: dict[str, Fault] = {
    fault.__name__: fault for fault in (free_running, free_cached, free_twice, alloc_taken, foreign_entry, stale_entry)
}


def _allocator_of(guard: Guard) -> Any:
    allocator = guard.pool.allocator
    return getattr(allocator, "full_attn_allocator", allocator)


def _pick(
    guard: Guard, step: Step, rng: random.Random, suits: Callable[[int, int], bool]
) -> tuple[int, int, int] | None:
    """Request, position and slot of an entry that the batch reads and whose ledger word and owner bits suit."""
    ledger = guard.ledger
    if ledger is None:
        return None
    found = []
    for index, (row, length) in enumerate(zip(step.rows, step.prefix_lens, strict=True)):
        slots = guard.pool.req_to_token[row, :length].long()
        owner = ledger.tenants.owner_of(int(row))
        words = ledger.words[slots].tolist()
        found += [(index, p, int(slots[p])) for p, word in enumerate(words) if suits(word, owner)]
    return rng.choice(found) if found else None


def _pick_owned(guard: Guard, step: Step, rng: random.Random) -> tuple[int, int, int] | None:
    def suits(word: int, owner: int) -> bool:
        return g.state_of(word) is g.State.OWNED and word & g.OWNER_MASK == owner

    return _pick(guard, step, rng, suits)


def _point(guard: Guard, step: Step, index: int, position: int, slot: int) -> Callable[[], None]:
    """Change one entry of a row. Returns what changes it back."""
    entries = guard.pool.req_to_token[step.rows[index]]
    kept = entries[position].clone()
    entries[position] = slot

    def restore() -> None:
        entries[position] = kept

    return restore


def _keep(guard: Guard, slot: int) -> Callable[[], None]:
    """Returns what puts back the allocator's books, and the ledger and liveness of the slot's page."""
    allocator, ledger, records = _allocator_of(guard), guard.ledger, guard.records
    assert ledger is not None
    books = {name: getattr(allocator, name) for name in _BOOKS if hasattr(allocator, name)}
    books = {name: list(book) if isinstance(book, list) else book for name, book in books.items()}
    page = slice(slot // records.page_size * records.page_size, (slot // records.page_size + 1) * records.page_size)
    words, live = ledger.words[page].clone(), records.hot[page, r.IDENTITY] & r.LIVE_BIT

    def restore() -> None:
        for name, book in books.items():
            setattr(allocator, name, book)
        ledger.words[page] = words
        records.hot[page, r.IDENTITY] |= live

    return restore
