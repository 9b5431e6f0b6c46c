"""One numbering of slots under guard: its shadow records, and what is launched for it around a forward."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..config import Config
from ..errors import UncoveredError
from ..kernels.backend import Backend
from ..kernels.move_reference import MOVED_WORDS
from ..kernels.record import POSITION_MASK
from ..kernels.violations import ViolationBuffer
from ..pool_patcher.records import ShadowRecords
from ..pool_patcher.spaces import GuardedPool, SlotSpace
from .batch import Batch
from .presence import Presence
from .scrubber import Scrubber

VIOLATIONS_A_FORWARD = 256
# Far enough apart that the difference is not launches: what it measures is the cost of one more slot.
_CALIBRATION_SLOTS = {True: (8, 136), False: (2048, 10240)}


class Space:
    """The guard's view of one :class:`SlotSpace`.

    Attributes:
        slots: what is guarded.
        index: place among the spaces of the pool; 0 is the main one.
        req_to_token: int32 (row_count, context), SGLang's request rows.
        title: what reports call it.
        allocator: SGLang's object whose slots :meth:`release` takes: that of the main space where slots here live and
            die with their main slots.
        records: its shadow records.
        violations: what was found since the last verdict.
        ring: int64 (steps in flight, 1 + capacity, ROW_COLUMNS) in host memory, where verdicts go.
        scrubber: its rotating pass, None where content is not checked.
        presence: what forwards must store, None where that is not checked.
        verifies, folds, poisons: whether what ``chain``, ``content`` and ``presence`` need is launched: they may be
            switched off in a running server. Records are kept up to date all the same.
    """

    def __init__(
        self,
        slots: SlotSpace,
        index: int,
        pool: GuardedPool,
        config: Config,
        backend: Backend,
        steps_in_flight: int,
        main: Space | None = None,
    ) -> None:
        """``main`` is the space whose slots the rows name, None for that one itself.

        Raises:
            UncoveredError: a row has more positions than a record can tell apart.
        """
        device, context = pool.req_to_token.device, pool.req_to_token.shape[1]
        if context > POSITION_MASK:
            raise UncoveredError(
                f"request rows of {context} positions are not covered: a record holds positions up to {POSITION_MASK}; "
                "start with a smaller --context-length"
            )
        self._main = self if main is None else main
        self._backend = backend
        self.req_to_token = pool.req_to_token.detach()  # what is kept with a tensor is not kept with SGLang's
        self.verifies = "chain" in config.checks
        self.slots = slots
        self.index = index
        self.title = f"{pool.name}/{slots.name}" if index else pool.name
        self.allocator = pool.allocator if slots.allocator is None else slots.allocator
        self.records = ShadowRecords(slots.slot_count, slots.page_size, device)
        self.violations = ViolationBuffer(VIOLATIONS_A_FORWARD, device)
        shape = (steps_in_flight, *self.violations.block.shape)
        self.ring = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type != "cpu")
        self._changes: list[Callable[[], None]] = []
        self._moving = torch.empty(0, dtype=torch.int64, device=device)
        self.scrubber: Scrubber | None = None
        self.presence: Presence | None = None
        if slots.table.sources:
            if config.has_content:
                seconds_a_slot = self._time_one_slot()
                # The budget is that of the pool: its spaces share it.
                sharing = sum(bool(each.table.sources) for each in (pool.main, *pool.companions))
                budget = config.scrub_budget / sharing
                self.scrubber = Scrubber(slots.page_size, slots.slot_count, budget, seconds_a_slot)
            if "presence" in config.checks:
                self.presence = Presence(slots.table, device)
        self.folds = self.scrubber is not None
        self.poisons = self.presence is not None

    def release(self, slots: torch.Tensor | None) -> None:
        """Slots were given back to :attr:`allocator`, None for all. In effect before the next forward, in stream order.

        Slots that stand for several go when one of theirs does: pages are whole groups, and are freed as a whole.
        """
        if slots is None:
            self._changes[:] = [self.records.release_all]
        elif slots.numel():
            kept = self._keep(slots)  # often a view of a row that is about to change
            if self.slots.ratio > 1:
                kept //= self.slots.ratio
            self._changes.append(lambda: self.records.release(self.in_stream(kept)))

    def move_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The same in effect at once: what is enqueued next reads the records that were moved."""
        to, of = self.find(target), self.find(source)
        if self._moving.numel() < to.numel() * MOVED_WORDS:
            self._moving = self._moving.new_empty(2 * to.numel() * MOVED_WORDS)
        self._backend.move_records(
            records=self.records.hot, writers=self.records.writers, target=to, source=of, scratch=self._moving
        )

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The pool copied the rows of ``source`` to ``target``, main slots (n,) both. In effect like a release."""
        to, of = self._keep(self.find(target)), self._keep(self.find(source))
        self._changes.append(lambda: self.records.move(self.in_stream(to), self.in_stream(of)))

    def copy_records(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records and writers of main slots (n,) as they are now, for a copy of their rows that leaves the pool."""
        return self.records.copy(self.find(slots))

    def restore(self, slots: torch.Tensor, records: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Rows came back into main slots (n,) with these records: they are taken over, and the rows compared."""
        place = self._keep(self.find(slots))

        def restore() -> None:
            self.records.restore(self.in_stream(place), records)
            self.check_slots(place, -1)

        self._changes.append(restore)

    def defer(self, change: Callable[[], None]) -> None:
        """Do ``change`` ahead of the next forward, in stream order, behind what was released and moved by now."""
        self._changes.append(change)

    def find(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots here, int64 (n,), of main slots (n,); -1 where there is none."""
        slots = slots.to(torch.int64).contiguous()
        if self._main is self:
            return slots
        found = torch.empty_like(slots)
        self._find(slots, found)
        return found

    def main_slot_of(self, slot: int) -> int:
        """The main slot that ``slot`` here belongs to, -1 for none. Waits for the device; for reports."""
        if self._main is self or slot < 0:
            return slot
        if self.slots.mapping is None:
            return (slot + 1) * self.slots.ratio - 1  # the one that completed the group
        owners = (self.slots.mapping == slot).nonzero().flatten()
        return int(owners[0]) if slot and owners.numel() else -1

    def _find(self, slots: torch.Tensor, found: torch.Tensor) -> None:
        if self.slots.mapping is not None:
            self._backend.map_slots(slots=slots, mapping=self.slots.mapping, out=found)
            return
        of = self._main.records
        self._backend.group_slots(
            slots=slots, ratio=self.slots.ratio, first_slot=of.first_slot, slot_count=of.slot_count, out=found
        )

    @property
    def is_flushed(self) -> bool:
        """Whether everything is about to be released."""
        return self.records.release_all in self._changes

    def apply_changes(self) -> None:
        """Enqueue what was released, moved and restored, in that order of events."""
        for change in self._changes:
            change()
        self._changes.clear()

    @staticmethod
    def _keep(slots: torch.Tensor) -> torch.Tensor:
        return slots.to(torch.int64, copy=True)

    @staticmethod
    def in_stream(slots: torch.Tensor) -> torch.Tensor:
        """``slots``, which were made on the scheduler's stream and are now used on the current one."""
        if slots.device.type != "cpu":
            slots.record_stream(torch.get_device_module(slots.device).current_stream())
        return slots

    @property
    def resident_bytes(self) -> int:
        """Device bytes kept beside the pool."""
        return self.records.resident_bytes + self.slots.table.resident_bytes

    def find_slots(self, batch: Batch) -> None:
        """Look up where the forward stores here, while the table says so."""
        if self._main is not self:
            self._find(batch.slots, batch.slots_of(self.index))

    def verify(self, batch: Batch, total: int) -> None:
        """Check every slot the forward will read; ``total`` positions at most."""
        if not self.verifies or not total:
            return
        if self.slots.ratio > 1:
            self._backend.verify_groups(
                records=self.records.hot,
                writers=self.records.writers,
                main=self._main.records.hot,
                req_to_token=self.req_to_token,
                rows=batch.forward_rows,
                offsets=batch.fields.verify_offsets,
                total=total,
                ratio=self.slots.ratio,
                first_slot=self.records.first_slot,
                main_first_slot=self._main.records.first_slot,
                violations=self.violations,
            )
            return
        self._backend.verify_prefixes(
            records=self.records.hot,
            writers=self.records.writers,
            req_to_token=self.req_to_token,
            rows=batch.forward_rows,
            offsets=batch.fields.verify_offsets,
            anchors=batch.fields.anchors,
            end_points=batch.fields.chains,
            total=total,
            first_slot=self.records.first_slot,
            violations=self.violations,
            mapping=self.slots.mapping,
            window=self.slots.window,
        )

    def poison(self, batch: Batch) -> None:
        """Put poison into the rows the forward is to store."""
        if self.poisons and self.presence is not None:
            self._backend.poison_slots(
                table=self.slots.table, slots=batch.slots_of(self.index), chosen=self.presence.chosen
            )

    def record(
        self,
        batch: Batch,
        step: int | torch.Tensor,
        scrub_start: int | torch.Tensor,
        scrub_count: int,
        *,
        is_stamped: bool = False,
    ) -> None:
        """Make records of what the forward stored, look for poison it left, and fold the next piece of the space.

        ``is_stamped``: all of the records but the fold has been made.
        """
        if batch.slots.shape[0] and not is_stamped:
            self._backend.write_chain(
                records=self.records.hot,
                writers=self.records.writers,
                slots=batch.slots_of(self.index),
                tokens=batch.tokens,
                rows=batch.fields.rows,
                prefix_lens=batch.fields.prefix_lens,
                offsets=batch.fields.write_offsets,
                seeds=batch.fields.chains,
                step=step,
                first_slot=self.records.first_slot,
                violations=self.violations,
                is_partial=self.index > 0,
            )
        if self.scrubber is not None or self.presence is not None:
            self._backend.seal_and_scrub(
                records=self.records.hot,
                writers=self.records.writers,
                table=self.slots.table,
                slots=batch.slots_of(self.index),
                start=scrub_start,
                count=scrub_count,
                step=step,
                violations=self.violations,
                expects=self.presence.expects if self.poisons and self.presence is not None else None,
            )

    def scrub(self, start: int, count: int) -> None:
        """Fold slots again and compare."""
        self._backend.scrub_range(
            records=self.records.hot,
            writers=self.records.writers,
            table=self.slots.table,
            start=start,
            count=count,
            violations=self.violations,
        )

    def drain(self, batch: Batch) -> None:
        """Write the verdict to the host and make room for the next."""
        self._backend.drain(self.violations, self.ring, batch.fields.step)

    def slots_of_prefix(self, row: int, length: int) -> torch.Tensor:
        """The slots here, int64 (n,), of the first ``length`` positions of a row, as far as they are kept; a copy."""
        first = 0 if self.slots.window is None else max(0, length - self.slots.window)
        ratio = self.slots.ratio
        return self.find(self.req_to_token[row, first + ratio - 1 : length : ratio])

    def check_slots(self, slots: torch.Tensor, request: int) -> None:
        """Fold slots of this space (int64 (n,)) now, on behalf of a request of the batch, -1 for none."""
        if not self.folds or not slots.numel():
            return
        self._backend.check_slots(
            records=self.records.hot,
            writers=self.records.writers,
            table=self.slots.table,
            slots=slots,
            request=request,
            violations=self.violations,
        )

    def seal(self, slots: torch.Tensor) -> None:
        """Take the bytes that slots of this space (int64 (n,)) hold now for right."""
        if self.scrubber is not None:
            self._backend.seal_slots(records=self.records.hot, table=self.slots.table, slots=slots)

    def _time_one_slot(self) -> float:
        """Seconds one more slot in the rotating pass costs, measured here and now."""
        device = self.records.hot.device
        on_host = device.type == "cpu"
        few, many = (min(count, self.slots.slot_count) for count in _CALIBRATION_SLOTS[on_host])
        sums = torch.empty((2, many), dtype=torch.int64, device=device)

        def seconds(count: int) -> float:
            slots = torch.arange(count, device=device)
            start = time.perf_counter()
            self._backend.fold_slots(self.slots.table, slots, digest=sums[0, :count], locator=sums[1, :count])
            if not on_host:
                torch.get_device_module(device).synchronize()
            return time.perf_counter() - start

        best = [min(seconds(count) for _ in range(8)) for count in (few, many)]
        return max(best[1] - best[0], 1e-9) / max(many - few, 1)
