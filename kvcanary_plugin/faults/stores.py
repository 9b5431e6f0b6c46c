"""Forwards that store less than they should, or elsewhere. What a forward has misplaced is put right behind it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.poison_reference import poison_slots
from .books import claim, give_next, heard_of, is_owned, keep, pick_entry, to_tensor
from .library import Fault, Injected, bytes_of

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step


def skip_store(guard: Guard, step: Step, rng: random.Random, options: dict[str, str]) -> Injected | None:
    """Leave K or V of one layer as it was before the forward, for every token it stores."""
    place, batch = _pick_source(guard, step, rng, options), step.batch
    if place is None or batch is None:
        return None
    requests = [request.rid for request in step.requests]
    fields = {"layer": place[0], "half": place[1], "requests": requests}
    return Injected("presence", (), (), fields, strike=lambda: _leave_out(guard, place, batch.slots))


def skip_token(guard: Guard, step: Step, rng: random.Random, options: dict[str, str]) -> Injected | None:
    """The same for one token of one request."""
    place = _pick_source(guard, step, rng, options)
    if place is None:
        return None
    index = rng.randrange(len(step.requests))
    slot, position = _new_slot(guard, step, index), step.prefix_lens[index]
    chosen = to_tensor(guard, [slot])
    fields = {"layer": place[0], "half": place[1], "request": step.requests[index].rid}
    return Injected("presence", (slot,), (position,), fields, strike=lambda: _leave_out(guard, place, chosen))


def store_padding(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Let a decoding request store its token to slot 0, the padding, as a padded batch does."""
    return _misplace(guard, step, rng, 0)


def store_last(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Let a decoding request store its token to the last slot, by an index of -1 where those count from the end."""
    return _misplace(guard, step, rng, -1 if guard.pool.req_to_token.device.type == "cpu" else -2)


def take_freed(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Give back a slot of one running request, and let the forward store the token of another one to it."""
    found = pick_entry(guard, step, rng, is_owned)
    if found is None or not _can_misplace(guard, step):
        return None
    index, position, slot = found
    takers = [taker for taker in range(len(step.requests)) if taker != index]
    size = guard.pool.page_size
    # A token of the prompt may be on its way into the tree, and the page that is being filled must not be lost.
    is_settled = position >= len(step.requests[index].origin_input_ids)
    if not takers or not is_settled or slot // size == _new_slot(guard, step, index) // size:
        return None
    taker = rng.choice(takers)

    def give_and_take() -> Callable[[], None]:
        restore, allocator = keep(guard, [slot])
        allocator.free(to_tensor(guard, [slot]))
        give_next(guard, slot)
        allocator.alloc(size)
        return restore

    fields = {"request": step.requests[index].rid, "other": step.requests[taker].rid, "position": position}
    strike = _redirect(guard, step, taker, slot, give_and_take)
    return Injected("ownership", tuple(heard_of(guard, [slot])), (), fields, strike=strike)


BEFORE_FORWARD: dict[str, Fault] = {fault.__name__: fault for fault in (skip_store, skip_token)}
AT_LAUNCH: dict[str, Fault] = {fault.__name__: fault for fault in (store_padding, store_last, take_freed)}


def _pick_source(
    guard: Guard, step: Step, rng: random.Random, options: dict[str, str]
) -> tuple[int, str | None] | None:
    """Layer and half of something that every forward stores; None as long as that is not known."""
    space = guard.spaces[0]
    if not step.write_total or space.presence is None or space.presence.learned is None:
        return None
    expected = [space.slots.table.names[i] for i in space.presence.expects.nonzero().flatten().tolist()]
    some_layer, some_half = rng.choice(expected)
    layer = int(options["layer"]) if "layer" in options else some_layer
    return layer, options.get("half", some_half)


def _leave_out(guard: Guard, place: tuple[int, str | None], slots: torch.Tensor) -> None:
    space = guard.spaces[0]
    assert space.presence is not None
    chosen = torch.zeros_like(space.presence.chosen)
    chosen[space.slots.table.names.index(place)] = 1
    # What the guard put there before the forward is what a forward that stores nothing leaves.
    poison_slots(table=space.slots.table, slots=slots, chosen=chosen)


def _new_slot(guard: Guard, step: Step, index: int) -> int:
    """Where the first new token of a request goes."""
    return int(guard.pool.req_to_token[step.rows[index], step.prefix_lens[index]])


def _can_misplace(guard: Guard, step: Step) -> bool:
    """One token a request, and one numbering of slots: then it is known which to redirect, and what to put right."""
    is_decode = step.write_total == len(step.requests) and min(step.prefix_lens, default=0) > 0
    return is_decode and guard.ledger is not None and len(guard.spaces) == 1 and bool(guard.pool.table.sources)


def _misplace(guard: Guard, step: Step, rng: random.Random, place: int) -> Injected | None:
    """``place``: a slot, -1, or -2 for the last one by its number."""
    if not _can_misplace(guard, step):
        return None
    index = rng.randrange(len(step.requests))
    where = guard.pool.slot_count - 1 if place == -2 else place
    if where % guard.pool.slot_count == _new_slot(guard, step, index):
        return None
    fields = {"request": step.requests[index].rid}
    strike = _redirect(guard, step, index, where)
    return Injected("ownership", (where,), (step.prefix_lens[index],), fields, strike=strike)


def _redirect(
    guard: Guard, step: Step, index: int, where: int, ahead: Callable[[], Callable[[], None]] | None = None
) -> Callable[[], None]:
    """Make the next forward store the token of one request of a decode batch to slot ``where``.

    ``ahead`` is done right ahead of it, and what it returns right behind. Returns what is to be done behind the
    forward: K and V go where they belong, and what they have overwritten comes back.
    """
    true, sources = _new_slot(guard, step, index), guard.pool.table.sources
    there = where % guard.pool.slot_count
    kept = [bytes_of(view.rows, there).clone() for view in sources]
    targets: list[torch.Tensor] = []
    undo: list[Callable[[], None]] = []
    owner: Any = guard
    is_before = owner.before

    def before(input_ids: Any, out_cache_loc: torch.Tensor, *more: Any) -> None:
        owner.before = is_before  # this once
        if ahead is not None:
            undo.append(ahead())
        out_cache_loc[index] = where
        targets.append(out_cache_loc)
        is_before(input_ids, out_cache_loc, *more)

    def put_right() -> None:
        assert step.batch is not None
        for view, old in zip(sources, kept, strict=True):
            bytes_of(view.rows, true).copy_(bytes_of(view.rows, there))
            bytes_of(view.rows, there).copy_(old)
        for target in (*targets, step.batch.slots):
            target[index] = true
        for restore in undo:
            restore()
        claim(guard, step, index, true)

    owner.before = before
    return put_right
