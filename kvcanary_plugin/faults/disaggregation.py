"""Faults of the way from a prefill to a decode server: most are put in when all of a transfer has come."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .books import give_next, keep, pick_free, settle
from .library import Fault, Injected, bytes_of

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step


_NOBODY = -1  # number of a transfer that no request has


def drop_sent_page(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Have one page of a request not arrive: what was there before is still there."""

    def drop(page: list[int], other: list[int]) -> None:
        for slot, older in zip(page, other, strict=True):
            for view in guard.pool.table.sources:
                bytes_of(view.rows, slot).copy_(bytes_of(view.rows, older).roll(1))
        assert guard.traffic.handover is not None
        guard.traffic.handover.hot[page] = 0

    return _damage(guard, step, rng, "chain", 1, drop)


def short_transfer(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Have a transfer end a page early: the last tokens of the prompt have neither KV nor records."""
    size, handover = guard.pool.page_size, guard.traffic.handover
    fitting = [index for index in step.started if step.prefix_lens[index] > size]
    if handover is None or not fitting:
        return None
    index = rng.choice(fitting)
    length = step.prefix_lens[index]
    positions = range((length - 1) // size * size, length)
    slots = guard.pool.req_to_token[step.rows[index], positions.start : length].tolist()
    for slot in slots:
        for view in guard.pool.table.sources:
            bytes_of(view.rows, slot).copy_(bytes_of(view.rows, slot).roll(1))
    handover.hot[slots] = 0
    return Injected("chain", tuple(slots), tuple(positions), {"request": step.requests[index].rid})


def wrong_slot(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Have a page arrive a second time, in the slots of another page, with its records."""

    def send_again(page: list[int], other: list[int]) -> None:
        for view in guard.pool.table.sources:
            for slot, source in zip(page, other, strict=True):
                bytes_of(view.rows, slot).copy_(bytes_of(view.rows, source))
        assert guard.traffic.handover is not None
        guard.traffic.handover.hot[page] = guard.traffic.handover.hot[other]

    return _damage(guard, step, rng, "chain", 1, send_again)


def late_page(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Give out a page to which a transfer that was given up still sends, and have something arrive there."""
    settle(guard, step)
    slot, flights = pick_free(guard, rng), guard.ledger.flights if guard.ledger is not None else None
    if slot is None or flights is None:
        return None
    size = guard.pool.page_size
    slots = tuple(range(slot, slot + size))
    put_back, allocator = keep(guard, slots)
    flights.begin(_NOBODY, np.array([slot // size]))
    flights.name(_NOBODY, "given up")
    give_next(guard, slot)
    allocator.alloc(size)
    for view in guard.pool.table.sources:
        for each in slots:
            bytes_of(view.rows, each).copy_(bytes_of(view.rows, each).roll(1))

    def restore() -> None:
        flights.end(_NOBODY)
        put_back()

    return Injected("ownership", slots, (), {"request": "given up"}, restore)


def swap_sent_pages(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Have two pages of a request arrive in each other's place, with their records."""

    def swap(page: list[int], other: list[int]) -> None:
        _exchange(guard, page, other)
        assert guard.traffic.handover is not None
        hot = guard.traffic.handover.hot
        hot[page + other] = hot[other + page]

    return _damage(guard, step, rng, "chain", 2, swap)


def swap_sent_rows(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Have the KV of two pages arrive in each other's place, and their records in the right one."""
    return _damage(guard, step, rng, "content", 2, lambda page, other: _exchange(guard, page, other))


def _damage(
    guard: Guard, step: Step, rng: random.Random, check: str, count: int, act: Callable[[list[int], list[int]], None]
) -> Injected | None:
    """Act on two whole pages of a request whose KV has just come; ``count`` of them are damaged."""
    size = guard.pool.page_size
    fitting = [index for index in step.started if step.prefix_lens[index] >= 2 * size]
    if guard.traffic.handover is None or not fitting:
        return None
    index = rng.choice(fitting)
    first, second = rng.sample(range(step.prefix_lens[index] // size), 2)
    row = guard.pool.req_to_token[step.rows[index]]
    places = [list(range(page * size, (page + 1) * size)) for page in (first, second)]
    pages = [row[place].tolist() for place in places]
    act(*pages)
    slots, positions = (tuple(each for page in part[:count] for each in page) for part in (pages, places))
    return Injected(check, slots, positions, {"request": step.requests[index].rid})


def _exchange(guard: Guard, page: list[int], other: list[int]) -> None:
    for view in guard.pool.table.sources:
        for one, two in zip(page, other, strict=True):
            kept = bytes_of(view.rows, one).clone()
            bytes_of(view.rows, one).copy_(bytes_of(view.rows, two))
            bytes_of(view.rows, two).copy_(kept)


ARRIVAL_FAULTS: dict[str, Fault] = {
    fault.__name__: fault for fault in (drop_sent_page, short_transfer, wrong_slot, swap_sent_pages, swap_sent_rows)
}
FLIGHT_FAULTS: dict[str, Fault] = {late_page.__name__: late_page}
FOUND_BY = {**dict.fromkeys(ARRIVAL_FAULTS, "chain"), "swap_sent_rows": "content", "late_page": "ownership"}
