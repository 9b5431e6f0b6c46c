"""The allocator's books and the ledger, as faults need them: slots to choose from, and a way to put everything back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..kernels import ledger as g
from ..kernels import record as r

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step

_ENDING = 3  # forwards ahead of its end from which on a request's row may be read for the radix tree
_FREE_LISTS = ("free_pages", "release_pages", "staged_pages", "num_staged_pages")


def is_owned(word: int, owner: int) -> bool:
    """Whether a slot with this ledger word is the owner's own."""
    return g.state_of(word) is g.State.OWNED and word & g.OWNER_MASK == owner


def pick_entry(
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


def pick_free(guard: Guard, rng: random.Random) -> int | None:
    """The first slot of a free page."""
    pages = _allocator_of(guard).free_pages
    return int(pages[rng.randrange(len(pages))]) * guard.pool.page_size if len(pages) else None


def is_staying(request: Any) -> bool:
    """Whether a request goes on for a while: with overlap, the row of one that ends is read beside its last forward."""
    left = getattr(getattr(request, "sampling_params", None), "max_new_tokens", None)
    return left is None or int(left) - len(request.output_ids) > _ENDING


def slots_in_page(guard: Guard, row: int, length: int, slot: int) -> list[int]:
    """Those of the first ``length`` entries of a row that lie in the page of ``slot``."""
    size = guard.pool.page_size
    return [each for each in guard.pool.req_to_token[row, :length].tolist() if each // size == slot // size]


def heard_of(guard: Guard, slots: Sequence[int]) -> list[int]:
    """The slots by which the ledger hears that ``slots`` are freed: allocators that free by page name its first."""
    size = guard.pool.page_size
    frees_by_page = hasattr(_allocator_of(guard), "_release_page_ids")
    return sorted({slot // size * size for slot in slots}) if frees_by_page else list(slots)


def give_next(guard: Guard, slot: int) -> None:
    """Let the allocator give out ``slot``, or its page, next, whoever has it."""
    allocator = _allocator_of(guard)
    page = slot // guard.pool.page_size
    rest = allocator.free_pages[allocator.free_pages != page]
    allocator.free_pages = torch.cat([torch.tensor([page], dtype=rest.dtype, device=rest.device), rest])


def claim(guard: Guard, step: Step, index: int, slot: int) -> None:
    """What a forward does that stores to ``slot`` for a request of its batch."""
    assert guard.ledger is not None
    owner = guard.ledger.tenants.owner_of(step.rows[index])
    guard.ledger.words[slot] = owner | (step.number << g.STAMP_SHIFT & g.STAMP_MASK) | g.UNCLAIMED


def settle(guard: Guard, step: Step) -> None:
    """Let what was noted so far take effect, which happens anyway ahead of this forward: it is part of what is kept."""
    for space in guard.spaces:
        space.apply_changes()
    if guard.ledger is not None:
        guard.ledger.apply(step.number, guard.spaces[0].violations)


def keep_free_lists(allocator: Any) -> Callable[[], None]:
    """What puts back which slots an allocator of SGLang has."""
    lists = {name: getattr(allocator, name) for name in _FREE_LISTS if hasattr(allocator, name)}
    lists = {name: list(kept) if isinstance(kept, list) else kept for name, kept in lists.items()}

    def restore() -> None:
        for name, kept in lists.items():
            setattr(allocator, name, kept)

    return restore


def keep(guard: Guard, slots: Sequence[int]) -> tuple[Callable[[], None], Any]:
    """What puts back the allocator's books, and the ledger and liveness of the pages of ``slots``; the allocator."""
    allocator, ledger, records = _allocator_of(guard), guard.ledger, guard.records
    assert ledger is not None
    put_back = keep_free_lists(allocator)
    size = records.page_size
    pages = sorted({slot // size for slot in slots})
    places = torch.tensor([page * size + i for page in pages for i in range(size)], device=ledger.words.device)
    words, live = ledger.words[places], records.hot[places, r.IDENTITY] & r.LIVE_BIT

    def restore() -> None:
        put_back()
        ledger.words[places] = words
        records.hot[places, r.IDENTITY] |= live

    return restore, allocator


def to_tensor(guard: Guard, slots: Sequence[int]) -> torch.Tensor:
    """``slots`` where the pool is, int64 (n,)."""
    return torch.tensor(slots, device=guard.pool.req_to_token.device)


def _allocator_of(guard: Guard) -> Any:
    allocator = guard.pool.allocator
    return getattr(allocator, "full_attn_allocator", allocator)
