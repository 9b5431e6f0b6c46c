"""Which request sat on which row, by serial number, and what was done to slots lately. For attribution."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import ledger as g
from .truth import Request

MAX_REMEMBERED_TENANTS = 16384
MAX_ID_LENGTH = 256
MAX_EVENTS = 512


@dataclass(frozen=True, slots=True)
class Tenant:
    """One stay of a request on a row: from the step it was first forwarded in until its row is given back."""

    request: str
    row: int
    step: int


class Tenants:
    """Numbers every stay, and remembers the latest.

    Attributes:
        newcomers: rows that got a new tenant in the last :meth:`seat`.
    """

    def __init__(self, row_count: int) -> None:
        if row_count > 1 << g.ROW_BITS:
            raise ValueError(f"kvcanary: {row_count} request rows; a ledger word holds up to {1 << g.ROW_BITS}")
        self._owners = np.zeros(row_count, dtype=np.int64)
        self._requests: list[weakref.ref[Request] | None] = [None] * row_count
        self._retractions = [0] * row_count
        self._tenants: OrderedDict[int, Tenant] = OrderedDict()
        self._serial = 0
        self.newcomers: list[int] = []

    def seat(
        self, step: int, requests: Sequence[Request], rows: npt.NDArray[np.int64], started: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """Owner bits of each request of a batch, int64 (bs,). ``started``: those that may be new on a row."""
        self.newcomers.clear()
        for index in started:
            request, row = requests[index], int(rows[index])
            known = self._requests[row]
            stays = known is not None and known() is request and self._retractions[row] == request.retraction_count
            if stays and self._owners[row]:
                continue
            self._serial = self._serial % ((1 << g.SERIAL_BITS) - 1) + 1
            self._owners[row] = g.make_owner(self._serial, row)
            self.newcomers.append(row)
            self._requests[row], self._retractions[row] = weakref.ref(request), request.retraction_count
            self._tenants[self._serial] = Tenant(request.rid[:MAX_ID_LENGTH], row, step)
            if len(self._tenants) > MAX_REMEMBERED_TENANTS:
                self._tenants.popitem(last=False)
        return self._owners[rows]

    def owner_of(self, row: int) -> int:
        """Owner bits of whoever sits on ``row``, 0 for nobody."""
        return int(self._owners[row])

    def leave(self, row: int) -> None:
        """The row was given back."""
        self._owners[row] = 0
        self._requests[row] = None

    def leave_all(self) -> None:
        """Every row was given back."""
        self._owners[:] = 0
        self._requests[:] = [None] * len(self._requests)

    def find(self, word: int) -> Tenant | None:
        """The tenant whose owner bits ``word`` has, if there is one and it is still remembered."""
        return self._tenants.get(g.serial_of(word))


@dataclass(frozen=True, slots=True)
class Event:
    """What was done to a slot, in a call applied ahead of forward ``step``, for ``actor``: owner bits, TREE or 0."""

    step: int
    op: g.Op
    actor: int


class EventHistory:
    """The latest deltas with their slots, as tensors on the device: looked into only when something is reported."""

    def __init__(self, max_slots: int) -> None:
        self._events: deque[tuple[Event, torch.Tensor]] = deque()
        self._max_slots = max_slots
        self._slots = 0

    def note(self, event: Event, slots: torch.Tensor) -> None:
        """Remember ``event``. ``slots`` is kept, not copied."""
        self._events.append((event, slots))
        self._slots += slots.shape[0]
        while len(self._events) > MAX_EVENTS or self._slots > self._max_slots:
            _, forgotten = self._events.popleft()
            self._slots -= forgotten.shape[0]

    def clear(self) -> None:
        """Forget everything."""
        self._events.clear()
        self._slots = 0

    def look_back(self) -> Trail:
        """What is remembered, on the host. Waits for the device."""
        return Trail([event for event, _ in self._events], [slots for _, slots in self._events])


class Trail:
    """The latest events and the slots they named."""

    def __init__(self, events: list[Event], slots: list[torch.Tensor]) -> None:
        self._events = events
        self._slots = torch.cat(slots).cpu().numpy() if slots else np.zeros(0, dtype=np.int64)
        self._index = np.repeat(np.arange(len(events)), [part.shape[0] for part in slots])

    def find(self, slot: int, page_size: int, until: int) -> list[Event]:
        """The latest event of each kind up to step ``until`` that named ``slot``, newest first."""
        found: dict[g.Op, Event] = {}
        named = set(self._index[self._slots == slot].tolist())
        nearby = set(self._index[self._slots // page_size == slot // page_size].tolist())
        for index in sorted(named | nearby, reverse=True):
            event = self._events[index]
            # A page is freed by any of its slots.
            if event.step <= until and (index in named or event.op is g.Op.FREE):
                found.setdefault(event.op, event)
        return list(found.values())
