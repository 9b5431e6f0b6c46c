"""Loads that were compared lately: which way rows went that came back wrong, and where they were right last."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..pool_patcher.sources import SourceTable
from .cause import BEFORE_STORAGE, ROUND_TRIP, TO_DEVICE, TO_HOST
from .host_records import HostRecords, Ids
from .host_rows import locate_hop
from .step import Step
from .truth import Request
from .violation import Violation

STEPS_REMEMBERED = 8  # more than can be under way
MAX_DAMAGES = 1024


class Load(NamedTuple):
    """Rows that come back at one stroke.

    Attributes:
        number: of the load.
        slots: int64 (n,) on the device, where they come to.
        host: the host slots they come from.
        since: the step ahead of which each was copied there, 0 for rows from storage.
        is_new: there are no digests to compare them with.
        request: for which they come.
        event: behind the last layer.
    """

    number: int
    slots: torch.Tensor
    host: Ids
    since: Ids
    is_new: bool
    request: Request | None
    event: Any


class LandedLoads:
    """Loads from one host pool and the steps that compared them."""

    def __init__(self, host: HostRecords, host_pool: Any, table: SourceTable) -> None:
        self._host, self._host_pool, self._table = host, host_pool, table
        self._loads: deque[tuple[int, Load]] = deque()
        self._damages: dict[tuple[int, int | None], dict[str, Any]] = {}

    def __iter__(self) -> Iterator[tuple[int, Load]]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    def note(self, step: int, load: Load) -> None:
        """``load`` was compared in ``step``."""
        self._loads.append((step, load))
        while self._loads[0][0] < step - STEPS_REMEMBERED:
            self._loads.popleft()

    def trace(self, violations: list[Violation], step: Step) -> list[Violation]:
        """``violations`` of ``step``; those of loaded rows with tier, hop and where they were last good."""
        return [self._trace(each, step) if each.check == "content" else each for each in violations]

    def _trace(self, violation: Violation, step: Step) -> Violation:
        damage = violation.slot, violation.stored_hash
        if violation.phase != "load":  # found before, and again since
            return dataclasses.replace(violation, **self._damages.get(damage, {}))
        landed = (load for number, load in self._loads if number == step.number)
        found = ((load, torch.nonzero(load.slots == violation.slot).flatten()) for load in landed)
        load, at = next(((load, int(places[0])) for load, places in found if len(places)), (None, 0))
        if load is None:
            return violation
        if len(self._damages) >= MAX_DAMAGES:
            self._damages.clear()
        way = self._damages[damage] = self._find_way(int(load.host[at]), int(load.since[at]), violation)
        rows = [row for row, request in zip(step.rows, step.requests, strict=False) if request is load.request]
        return dataclasses.replace(
            violation,
            **way,
            request=None if load.request is None else load.request.rid,
            request_row=rows[0] if rows else None,
        )

    def _find_way(self, slot: int, since: int, violation: Violation) -> dict[str, Any]:
        is_there = self._host.since[slot] == since
        hop = locate_hop(self._host_pool, slot, self._table, violation) if is_there else ROUND_TRIP
        if hop == TO_DEVICE:
            last_good = f"in host slot {slot}, where it still is"
        elif since:
            last_good = f"on the device, when it was copied to host slot {slot} ahead of step {since}"
        else:  # what storage was given came back from it
            hop = BEFORE_STORAGE if hop == TO_HOST else hop
            last_good = "on the device that stored it first, before it went to storage"
        return {"tier": "host", "hop": hop, "last_good": last_good, "host_slot": slot}
