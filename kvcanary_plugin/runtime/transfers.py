"""KV that goes to host memory and comes back: its records go with it, and the rows are compared when they are back.

SGLang copies on streams of its own, and a forward uses a layer as soon as that layer is there. So records are put back
ahead of the forward, which is checked against them as ever; the rows are folded behind it, when the last layer has
come. What is gated on the verdict is the output of the forward.

Host slots that storage filled get their record when they are loaded: of the tokens of the request for which they are,
and of the digests that the device made when it first stored the rows, which storage keeps beside them. Where it has
none, of the bytes as they came, which the storage tier has verified.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import GuardError
from ..kernels.backend import Backend
from ..tiers.page_records import Rows
from .adoption import make_records
from .backup_order import BackupOrder
from .host_records import HostRecords, Ids, ids_of
from .landed import LandedLoads, Load
from .ledger import Ledger
from .load_order import LoadOrder
from .page_rows import is_row_known
from .space import Space
from .step import Step
from .truth import Request, TruthTable
from .violation import Violation

LOADED = -2  # in place of the index of a request: the slot was folded because it had come back


class Copy(NamedTuple):
    """Rows on their way. ``host``: int64 (n,) on the CPU; ``device``: int (n,) main slots."""

    host: torch.Tensor
    device: torch.Tensor
    request: Request | None = None  # for which they come back
    start: int = 0  # and the position of the first one


class _Flight(NamedTuple):
    event: Any
    host: Ids
    device: torch.Tensor


class Transfers:
    """Transfers between the main space of a pool and one host pool.

    Attributes:
        host: what is known of the host slots.
        found: what was found on the host, for the next step; host pools are used on several threads.
        landed: loads that were compared lately.
        keeps_rows: whether records go to storage with the rows.
        order: of loads and the forwards that need them; None where that is not checked.
        backups: order of forwards and the copies of what they stored; None where that is not checked.
        has_storage: whether host slots may be filled from storage.
        host_pool: SGLang's.
    """

    def __init__(
        self,
        space: Space,
        ledger: Ledger | None,
        truth: TruthTable,
        backend: Backend,
        host_pool: Any,
        has_storage: Callable[[], bool],
        describe: Callable[[str, int, str | None], Violation],
    ) -> None:
        """``describe`` makes a violation of kind, host slot and request; ``host_pool`` is SGLang's."""
        self._space = space
        self._ledger = ledger
        self._truth = truth
        self._backend = backend
        self._device = space.records.hot.device
        self._describe = describe
        self.has_storage = has_storage
        self.host_pool = host_pool
        self.host = HostRecords(int(host_pool.size), self._device)
        self.landed = LandedLoads(self.host, host_pool, space.slots.table)
        self.found: deque[Violation] = deque()
        self.order: LoadOrder | None = None
        self.backups: BackupOrder | None = None
        self.keeps_rows = space.scrubber is not None  # without the digests there is nothing to keep
        self._number = 0
        self._flights: list[_Flight] = []
        self._loads: list[Load] = []
        self._is_coming = torch.zeros(space.records.slot_count, dtype=torch.bool, device=self._device)
        self._side = None if self._device.type == "cpu" else torch.get_device_module(self._device).Stream()
        if ledger is not None:
            ledger.before_free = self.poll

    @property
    def is_loading(self) -> bool:
        """Rows are coming that nobody has compared yet."""
        return bool(self._loads)

    def note_alloc(self, host: torch.Tensor | None) -> None:
        """The host pool gave out slots (n,); None if it could not."""
        if host is not None:
            self.host.give(ids_of(host))

    def note_free(self, host: torch.Tensor) -> None:
        """The host pool takes back slots (n,)."""
        found = self.host.take_back(ids_of(host))
        used = found.used
        if len(used):  # SGLang may know that a transfer is over, and we not yet
            under_way = [flight.host for flight in tuple(self._flights) if not flight.event.query()]
            used = np.intersect1d(used, np.concatenate(under_way)) if under_way else used[:0]
        self.report("host_free_in_flight", np.union1d(used, found.stored))
        self.report("host_double_free", found.free)

    def slots_in_use(self) -> Ids:
        """Host slots that a copy or a storage thread uses now."""
        under_way = [flight.host for flight in tuple(self._flights) if not flight.event.query()]
        return np.concatenate([*under_way, self.host.slots_in_storage()])

    def clear(self) -> None:
        """The host pool holds every slot again, and nothing is under way."""
        self.host.clear()
        self._flights.clear()
        self._loads.clear()
        self._is_coming.zero_()
        if self.order is not None:
            self.order.clear()
        if self.backups is not None:
            self.backups.clear()

    def begin_backup(self, device: torch.Tensor, step: int) -> None:
        """Rows of main slots (n,) are about to be copied to the host, on this stream; see :class:`BackupOrder`."""
        if self.backups is not None:
            self.backups.begin(device, step)

    def note_backup(self, copies: Sequence[Copy], event: Any, step: int) -> None:
        """Rows are being copied to the host; ``event`` is behind that. ``step`` is the number of the next one.

        Their records follow in stream order, ahead of that step: by then each forward that stored them has sealed them.
        """
        event = self._keep(event)
        for copy in copies:
            host, device = self._take_off(copy, event)
            self.host.note_filled(host, step)
            there = self._upload(copy.host)

            def store(host: Ids = host, there: torch.Tensor = there, device: torch.Tensor = device) -> None:
                records = self._space.copy_records(self._space.in_stream(device))
                self.host.store(self._space.in_stream(there), records)
                if self.keeps_rows and self.has_storage():
                    self.host.rows.bring(host, step, records[0])

            self._space.defer(store)

    def begin_load(self) -> None:
        """Rows are about to be copied to the device, layer by layer."""
        self._number += 1
        if self.order is not None:
            self.order.load = self._number

    def begin(self, step: Step) -> None:
        """Forward ``step`` begins. It has to wait for what comes for its requests."""
        if self.order is None:
            return
        loads = [load for load in self._loads if any(request is load.request for request in step.requests)]
        last = max(loads, key=lambda load: load.number, default=None)
        number, request = (0, None) if last is None else (last.number, last.request)
        self.order.begin(step.number, number, "" if request is None else request.rid)

    def note_load(self, copies: Sequence[Copy], event: Any) -> None:
        """Rows are being copied to the device; ``event`` is behind the last layer.

        Raises:
            GuardError: storage has filled the host slots, and nobody knows with which tokens.
        """
        event = self._keep(event)
        for copy in copies:
            host, device = self._take_off(copy, event)
            since = self.host.since[host]
            known, unknown = np.flatnonzero(since > 0), np.flatnonzero(since == 0)
            if len(known):
                self._restore(copy, known, self._choose(device, known), since[known], event)
            if len(unknown) and self.has_storage():
                rows = self.host.rows.collect(host[unknown])
                is_known = is_row_known(rows)
                for part, kept in ((unknown[is_known], rows[is_known]), (unknown[~is_known], None)):
                    if len(part):
                        self._adopt(copy, part, kept, self._choose(device, part), event)
            elif len(unknown):
                self.report("host_slot_empty", host[unknown], _rid_of(copy))

    def hide_coming(self, slots: torch.Tensor) -> torch.Tensor:
        """``slots``, int64 (n,), with -1 in place of those that are coming: they are folded by themselves."""
        inside = (slots >= 0) & (slots < len(self._is_coming))
        return torch.where(inside & ~self._is_coming[torch.where(inside, slots, 0)], slots, -1)

    def land(self, step: int) -> None:
        """Compare what has come. Enqueued behind a forward that used it; the device waits for the rest of it."""
        if self.order is not None:
            self.order.end()
        for load in self._loads:
            if self._device.type != "cpu":
                torch.get_device_module(self._device).current_stream().wait_event(load.event)
            if load.is_new:
                if self._space.scrubber is not None:
                    table = self._space.slots.table
                    self._backend.seal_slots(records=self._space.records.hot, table=table, slots=load.slots)
            else:
                self._space.check_slots(load.slots, LOADED)
            self._is_coming.index_fill_(0, load.slots, False)
            self.landed.note(step, load)
        self._loads.clear()

    def poll(self) -> None:
        """Let go of what transfers that are over have used. Does not wait."""
        if self.backups is not None:
            self.found.extend(self.backups.read())
        if not self._flights:
            return
        over: list[_Flight] = []
        under_way: list[_Flight] = []
        for flight in self._flights:
            (over if flight.event.query() else under_way).append(flight)
        self._flights = under_way
        for flight in over:
            self.host.let_go(flight.host)
            if self._ledger is not None:
                self._ledger.land(flight.device)

    def trace(self, violations: list[Violation], step: Step) -> list[Violation]:
        """Say of rows that came back wrong which way they went, and where they were right for the last time."""
        return self.landed.trace(violations, step)

    def take_found(self) -> list[Violation]:
        """What was found on the host since the last time."""
        return [self.found.popleft() for _ in range(len(self.found))]

    def _keep(self, event: Any) -> Any:
        """An event of our own that is over when ``event`` is: SGLang records some of its own anew for a later load."""
        if self._side is None:
            return event
        kept = torch.get_device_module(self._device).Event()
        self._side.wait_event(event)
        kept.record(self._side)
        return kept

    def _take_off(self, copy: Copy, event: Any) -> tuple[Ids, torch.Tensor]:
        host = ids_of(copy.host)
        device = copy.device.to(self._device, torch.int64, copy=True)
        self.report("host_slot_free", self.host.hold(host), _rid_of(copy))
        self._flights.append(_Flight(event, host, device))
        if self._ledger is not None:
            self._ledger.hold(device)
        return host, device

    def _restore(self, copy: Copy, part: Ids, slots: torch.Tensor, since: Ids, event: Any) -> None:
        ids = ids_of(copy.host)[part]
        there = self._upload(torch.from_numpy(ids))
        load = Load(self._number, slots, ids, since, False, copy.request, event)
        self._come(load, lambda: self.host.copy(self._space.in_stream(there)))

    def _adopt(self, copy: Copy, part: Ids, rows: Rows | None, slots: torch.Tensor, event: Any) -> None:
        """Records for rows that storage filled, see :func:`make_records`."""
        if copy.request is None:
            raise GuardError(
                f"{len(part)} host slots that storage has filled are loaded for no request, so that nobody knows "
                "which tokens they hold; this SGLang loads in a way that is not covered"
            )
        made = make_records(copy.request, self._truth.anchor_of(copy.request), copy.start + part, rows)
        hot = self._upload(torch.from_numpy(made))
        ids = ids_of(copy.host)[part]
        load = Load(self._number, slots, ids, np.zeros(len(part), np.int64), rows is None, copy.request, event)
        writers = torch.zeros(len(part), dtype=torch.int64, device=self._device)
        self._come(load, lambda: (self._space.in_stream(hot), self._space.in_stream(writers)))

    def _come(self, load: Load, records: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        def restore() -> None:
            slots = self._space.in_stream(load.slots)
            self._space.records.restore(slots, records())
            self._is_coming.index_fill_(0, slots, True)

        self._space.defer(restore)
        self._loads.append(load)

    def _choose(self, slots: torch.Tensor, part: Ids) -> torch.Tensor:
        return slots if len(part) == len(slots) else slots[self._upload(torch.from_numpy(part))]

    def _upload(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return numbers.to(torch.int64, copy=True)
        # Through pinned memory: else the host would wait for all that the stream has to do.
        return numbers.to(torch.int64).pin_memory().to(self._device, non_blocking=True)

    def report(self, kind: str, ids: Ids, request: str | None = None) -> None:
        """Host slots ``ids`` show a violation of that kind. Of any thread; told with the next step."""
        self.found.extend(self._describe(kind, slot, request) for slot in ids.tolist())


def _rid_of(copy: Copy) -> str | None:
    return None if copy.request is None else copy.request.rid
