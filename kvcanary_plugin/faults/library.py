"""The faults. Each damages one thing, restores nothing, and returns what it did, or None if the moment does not suit.

They act on live KV and on the live row table, between two forwards, the way a bug or a bad DIMM would.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..kernels import record as r

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step


@dataclass(frozen=True, slots=True)
class Injected:
    """What a fault did.

    Attributes:
        check: the check that must find it.
        slots, positions: damaged slots, and the positions at which requests read them.
        fields: more of what was done, for the log.
        restore: undoes it after the forward, where leaving it would damage the allocator's books as well.
        strike: done right behind the forward, for damage that the forward itself would do.
    """

    check: str
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    fields: dict[str, Any]
    restore: Callable[[], None] | None = None
    strike: Callable[[], None] | None = None


Fault = Callable[["Guard", "Step", random.Random, dict[str, str]], Injected | None]


def flip_running(guard: Guard, step: Step, rng: random.Random, options: dict[str, str]) -> Injected | None:
    """Flip one bit of K or V of one layer in a slot that a running request will read."""
    index = pick_request(step, rng, at_least=guard.pool.page_size)
    if index is None:
        return None
    position = rng.randrange(_kept_length(guard, step, index))
    slot = int(guard.pool.req_to_token[step.rows[index], position])
    return _flip_bit(guard, slot, position, rng, options, {"request": step.requests[index].rid})


def flip_cached(guard: Guard, step: Step, rng: random.Random, options: dict[str, str]) -> Injected | None:
    """Flip one bit in a slot of the prefix cache that no request of this batch reads."""
    live = (guard.records.hot[:, r.IDENTITY] & r.LIVE_BIT) != 0
    for index, row in enumerate(step.rows):
        live[guard.pool.req_to_token[row, : step.prefix_lens[index]].long()] = False
    # A slot written a while ago by a request that has left, so that it is not just about to be read by a running one.
    steps = guard.records.writers >> r.WRITER_ROW_BITS
    settled = torch.nonzero(live & (steps < step.number - 2)).flatten()
    if not len(settled):
        return None
    newest = settled[steps[settled].argsort(descending=True)[: max(1, len(settled) // 8)]]
    slot = int(newest[rng.randrange(len(newest))])
    position = int(guard.records.hot[slot, r.IDENTITY] >> 32) & r.POSITION_MASK
    return _flip_bit(guard, slot, position, rng, options, {})


def swap_entries(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Exchange two entries of a running request's row, for one forward."""
    index = pick_request(step, rng, at_least=2)
    if index is None:
        return None
    entries = guard.pool.req_to_token[step.rows[index]]
    one, other = sorted(rng.sample(range(step.prefix_lens[index]), 2))
    kept = entries[[one, other]].clone()
    entries[[one, other]] = kept.flip(0)

    def restore() -> None:
        entries[[one, other]] = kept

    slots = (int(kept[1]), int(kept[0]))
    return Injected("chain", slots, (one, other), {"request": step.requests[index].rid}, restore)


def alias_row(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Point the start of a running request's row at the slots of another running request, for one forward."""
    indices = [index for index, length in enumerate(step.prefix_lens) if length]
    rng.shuffle(indices)
    for victim in indices:
        for other in indices:
            length = min(step.prefix_lens[victim], step.prefix_lens[other])
            mine, theirs = (guard.pool.req_to_token[step.rows[i]] for i in (victim, other))
            names = guard.records.hot[theirs[:length].long(), r.IDENTITY] & r.TOKEN_MASK
            own = guard.records.hot[mine[:length].long(), r.IDENTITY] & r.TOKEN_MASK
            differing = torch.nonzero(names != own)
            if not len(differing):
                continue
            first = int(differing[0])
            kept = mine[:length].clone()
            mine[:length] = theirs[:length]

            def restore(mine: torch.Tensor = mine, kept: torch.Tensor = kept, length: int = length) -> None:
                mine[:length] = kept

            fields = {"request": step.requests[victim].rid, "other": step.requests[other].rid, "entries": length}
            return Injected("chain", (int(theirs[first]),), (first,), fields, restore)
    return None


def overwrite_slot(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Store the KV of another token over a slot that a running request will read, in every layer."""
    index = pick_request(step, rng, at_least=max(2, guard.pool.page_size))
    if index is None:
        return None
    position, other = rng.sample(range(_kept_length(guard, step, index)), 2)
    entries = guard.pool.req_to_token[step.rows[index]]
    slot, source = int(entries[position]), int(entries[other])
    for view in guard.pool.table.sources:
        bytes_of(view.rows, slot).copy_(bytes_of(view.rows, source))
    return Injected("content", (slot,), (position,), {"request": step.requests[index].rid, "copied_from": source})


FAULTS: dict[str, Fault] = {
    fault.__name__: fault for fault in (flip_running, flip_cached, swap_entries, alias_row, overwrite_slot)
}


def pick_request(step: Step, rng: random.Random, *, at_least: int) -> int | None:
    """Index of a request of the batch that reads as many positions."""
    suitable = [index for index, length in enumerate(step.prefix_lens) if length >= at_least]
    return rng.choice(suitable) if suitable else None


def _kept_length(guard: Guard, step: Step, index: int) -> int:
    """Positions that a request has read and the prefix cache takes over when it ends: those of whole pages. What is
    freed with the request, a few forwards later, may be free before the content pass comes by.
    """
    return step.prefix_lens[index] // guard.pool.page_size * guard.pool.page_size


def bytes_of(rows: torch.Tensor, slot: int) -> torch.Tensor:
    """The bytes of one slot of a source, a view."""
    return rows[tuple(int(index) for index in np.unravel_index(slot, rows.shape[:-1]))]


def _flip_bit(
    guard: Guard, slot: int, position: int, rng: random.Random, options: dict[str, str], fields: dict[str, Any]
) -> Injected:
    names = guard.pool.table.names
    fitting = [
        index
        for index, (layer, half) in enumerate(names)
        if options.get("layer", str(layer)) == str(layer) and options.get("half", half) == half
    ]
    index = rng.choice(fitting)
    (layer, half), view = names[index], guard.pool.table.sources[index]
    bit = int(options.get("bit", rng.randrange(view.read_bytes * 8)))
    bytes_of(view.rows, slot)[bit // 8] ^= 1 << bit % 8
    return Injected("content", (slot,), (position,), {"layer": layer, "half": half, "bit": bit, **fields})
