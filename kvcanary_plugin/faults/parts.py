"""A part of what a request needs is gone, while the rest of it is as it should be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..kernels import record as r
from .books import keep_free_lists
from .library import Fault, Injected, bytes_of

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.space import Space
    from ..runtime.step import Step

_MOST = 8  # slots: more would not be listed one by one


def drop_part(guard: Guard, step: Step, rng: random.Random, options: dict[str, str]) -> Injected | None:
    """Let a request start on a cached prefix whose end lacks one part of one layer (``layer=``, ``half=``)."""
    hits = [index for index in step.started if step.prefix_lens[index]]
    places = [
        place
        for place in guard.pool.table.names
        if options.get("layer", str(place[0])) == str(place[0]) and options.get("half", place[1]) == place[1]
    ]
    if not hits or not places:
        return None
    index, place = rng.choice(hits), rng.choice(places)
    length = step.prefix_lens[index]
    first = max(0, length - _MOST)
    slots = guard.pool.req_to_token[step.rows[index], first:length].tolist()
    view = guard.pool.table.sources[guard.pool.table.names.index(place)]
    for slot in slots:
        bytes_of(view.rows, slot).zero_()
    fields = {"layer": place[0], "half": place[1], "request": step.requests[index].rid}
    return Injected("content", tuple(slots), tuple(range(first, length)), fields)


def drop_state(guard: Guard, step: Step, _: random.Random, __: dict[str, str]) -> Injected | None:
    """Lose the state of a request of a hybrid model between two forwards, of the one that is watched."""
    for watch in guard.states:
        if watch._watched is None:
            continue
        watched, row, _retractions = watch._watched
        for request, its_row in zip(step.requests, step.rows, strict=True):
            if request is not watched() or its_row != row:
                continue
            slot, split = int(watch.state.row_slots[row]), watch.state.split
            for view in watch.state.table.sources:
                for part in range(slot * split, (slot + 1) * split):
                    bytes_of(view.rows, part).zero_()
            return Injected("content", (slot,), (), {"request": request.rid})
    return None


def free_in_window(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Give back the window part of a slot that lies within the window of a running request, for one forward."""
    space = next((space for space in guard.spaces if space.slots.window is not None and space.index), None)
    if space is None or space.slots.mapping is None or space.slots.window is None:
        return None
    indices = [index for index, length in enumerate(step.prefix_lens) if length]
    if not indices:
        return None
    index = rng.choice(indices)
    length, size = step.prefix_lens[index], guard.pool.page_size
    position = rng.randrange(max(0, length - space.slots.window), length)
    slot = guard.pool.req_to_token[step.rows[index], position].long()
    page = slot // size * size + torch.arange(size, device=slot.device)
    restore = _keep_window(space, page)
    space.allocator.free(space.slots.mapping[page])
    space.slots.mapping[page] = 0
    # What is gone has no slot: it is told by request and position.
    return Injected("chain", (), (position,), {"request": step.requests[index].rid}, restore)


PART_FAULTS: dict[str, Fault] = {fault.__name__: fault for fault in (drop_part, drop_state, free_in_window)}


def _keep_window(space: Space, page: torch.Tensor) -> Callable[[], None]:
    """What puts back the window part of main slots ``page``, (page_size,)."""
    space.apply_changes()
    mapping, records, allocator = space.slots.mapping, space.records.hot, space.allocator
    assert mapping is not None
    mapped = mapping[page]
    places = mapped.long()
    live = records[places, r.IDENTITY] & r.LIVE_BIT
    books = keep_free_lists(allocator)

    def restore() -> None:
        assert mapping is not None
        mapping[page] = mapped
        books()
        records[places, r.IDENTITY] |= live

    return restore
