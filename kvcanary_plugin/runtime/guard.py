"""The guard of one model runner: what happens before and after each of its forwards, and when the verdict is read.

Everything of the scheduler's is read in :meth:`announce` and :meth:`before`; once the forward is launched its rows may
already be changing, so :meth:`after` uses private copies only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ..config import Config
from ..errors import CorruptionError, GuardError
from ..faults.injector import Injector
from ..kernels.backend import pick_backend
from ..kernels.violations import ViolationBuffer
from ..pool_patcher.adapters import GuardedPool
from ..pool_patcher.records import ShadowRecords
from ..report.reporter import Reporter
from ..report.text import render_line
from .batch import BatchBuffers, fill_fields
from .diagnosis import Diagnosis, RowHistory, refine_chain_rows, sort_rows
from .scrubber import Scrubber
from .step import MAX_IN_FLIGHT, Step
from .truth import Request, TruthTable

logger = logging.getLogger("kvcanary")

VIOLATIONS_A_FORWARD = 256
# Far enough apart that the difference is not launches: what it measures is the cost of one more slot.
_CALIBRATION_SLOTS = {True: (8, 136), False: (2048, 10240)}


class Guard:
    """Guards the pool of one model runner.

    Attributes:
        pool: what is guarded.
        records: its shadow records.
        scrubber: the rotating content pass, None where content is not checked.
        forwards: forwards guarded so far; the number of the latest step.
    """

    def __init__(self, pool: GuardedPool, config: Config, reporter: Reporter, *, rank: int = 0) -> None:
        device = pool.req_to_token.device
        self.pool = pool
        self.config = config
        self.records = ShadowRecords(pool.slot_count, pool.page_size, device)
        self.forwards = 0
        self._reporter = reporter
        self._backend = pick_backend(device)
        self._on_host = device.type == "cpu"
        self._buffer = ViolationBuffer(VIOLATIONS_A_FORWARD, device)
        self._truth = TruthTable(pool.req_to_token.shape[0], pool.fingerprint)
        self._history = RowHistory()
        self._diagnosis = Diagnosis(pool, self._truth, self._history, rank)
        self._steps = [Step(self._buffer) for _ in range(MAX_IN_FLIGHT)]
        self._launched: deque[tuple[Any, Step]] = deque()
        self._announced: Step | None = None
        self._released: list[torch.Tensor | None] = []
        self._batch = BatchBuffers(device)
        self._running: Step | None = None
        self.scrubber: Scrubber | None = None
        if config.has_content and pool.table.sources:
            self.scrubber = Scrubber(pool.page_size, pool.slot_count, config.scrub_budget, self._time_one_slot())
        self.injector = Injector.parse(config.inject) if config.inject else None
        if self.injector is not None:
            self.injector.check_against(pool.table, config.checks)

    @property
    def resident_bytes(self) -> int:
        """Device bytes kept beside the pool."""
        return self.records.resident_bytes + self.pool.table.resident_bytes

    def announce(
        self, requests: Sequence[Request], rows: Sequence[int], prefix_lens: Sequence[int], write_lens: Sequence[int]
    ) -> None:
        """Say what the next forward will read and store. Called where the scheduler launches a batch.

        Args:
            requests: the batch, in its order.
            rows: request row of each.
            prefix_lens: positions each reads from before its new tokens.
            write_lens: new tokens of each.
        """
        self.forwards += 1
        step = self._steps[self.forwards % MAX_IN_FLIGHT]
        if step.is_open:
            self._judge(step)
        step.number = self.forwards
        step.requests, step.rows, step.prefix_lens = list(requests), list(rows), list(prefix_lens)
        step.verify_total, step.write_total = sum(prefix_lens), sum(write_lens)
        if requests:
            anchors, chains, step.started = self._truth.advance(step.requests, step.rows, step.prefix_lens)
            for index in step.started:
                self._history.note(step.rows[index], step.number, step.requests[index].rid)
            fields = step.fields_of(len(requests), self._batch)
            fill_fields(fields, step.rows, step.prefix_lens, list(write_lens), anchors, chains)
        self._announced = step

    def before(
        self, input_ids: torch.Tensor | None, out_cache_loc: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> None:
        """Verify what the forward will read. Enqueued on the forward's stream, before it.

        Args:
            input_ids: int (write_total,), copied: a model may clamp them in place.
            out_cache_loc: int (write_total,), the slots to be stored, copied.
            req_pool_indices: int (bs,), the rows the forward will use.
        """
        step, self._announced = self._announced, None
        if step is None:
            return  # a dummy forward: nothing was scheduled
        self._apply_releases()
        if self.injector is not None:
            self.injector.before_forward(self, step, self._reporter)
        batch_size, written = len(step.requests), step.write_total
        if input_ids is None or input_ids.numel() != written or out_cache_loc.numel() != written:
            raise GuardError(
                f"step {step.number} was announced with {written} new tokens but its forward carries others"
            )
        self._running = step
        if batch_size == 0:
            step.note_begin()
            return
        batch = self._batch.fields_of(batch_size)
        step.upload(batch)
        self._batch.snapshot(input_ids, out_cache_loc)
        if "chain" in self.config.checks:
            self._backend.verify_prefixes(
                records=self.records.hot,
                writers=self.records.writers,
                req_to_token=self.pool.req_to_token,
                rows=req_pool_indices[:batch_size].to(torch.int64),
                offsets=batch.verify_offsets,
                anchors=batch.anchors,
                end_points=batch.chains,
                total=step.verify_total,
                first_slot=self.records.first_slot,
                violations=self._buffer,
            )
            if self._on_host and int(self._buffer.count):
                self._read_early(step)
        if self.scrubber is not None:
            for index in step.started:
                self._check_content(
                    self.pool.req_to_token[step.rows[index], : step.prefix_lens[index]].to(torch.int64), index
                )
        step.note_begin()

    def after(self) -> None:
        """Record what the forward stored and scrub the next piece. Enqueued on the forward's stream, behind it."""
        step, self._running = self._running, None
        if step is None:
            return
        step.note_end()
        batch_size, written = len(step.requests), step.write_total
        tokens, slots = self._batch.stored(written)
        if batch_size:
            batch = self._batch.fields_of(batch_size)
            self._backend.write_chain(
                records=self.records.hot,
                writers=self.records.writers,
                slots=slots,
                tokens=tokens,
                rows=batch.rows,
                prefix_lens=batch.prefix_lens,
                offsets=batch.write_offsets,
                seeds=batch.chains,
                step=step.number,
                first_slot=self.records.first_slot,
                violations=self._buffer,
            )
        if self.scrubber is not None:
            start, count = self.scrubber.next_range()
            self._backend.seal_and_scrub(
                records=self.records.hot,
                writers=self.records.writers,
                table=self.pool.table,
                slots=slots,
                start=start,
                count=count,
                violations=self._buffer,
            )
        if self.injector is not None:
            self.injector.after_forward(self)
        step.keep_verdict(self._buffer)

    def note_launched(self, result: object) -> None:
        """Tie the latest step to the object whose arrival at :meth:`settle` means that SGLang processes its result."""
        step = self._steps[self.forwards % MAX_IN_FLIGHT]
        if step.is_open:
            self._launched.append((result, step))

    def settle(self, result: object) -> None:
        """Read the verdict of the step that gave ``result``, and of any before it.

        Raises:
            CorruptionError: something is damaged and the mode is ``raise``.
        """
        if not any(known is result for known, _ in self._launched):
            return
        while self._launched:
            known, step = self._launched.popleft()
            if step.is_open:
                self._judge(step)
            if known is result:
                return

    def release(self, slots: torch.Tensor) -> None:
        """Slots were given back to the allocator. Takes effect on the forward's stream, before its next forward."""
        if slots.numel():
            self._released.append(slots.to(torch.int64, copy=True))  # often a view of a row that is about to change

    def release_all(self) -> None:
        """The pool was flushed."""
        self._released[:] = [None]

    def _apply_releases(self) -> None:
        for slots in self._released:
            if slots is None:
                self.records.release_all()
                continue
            self.records.release(slots)
            if not self._on_host:
                slots.record_stream(torch.get_device_module(slots.device).current_stream())
        self._released.clear()

    def _read_early(self, step: Step) -> None:
        """On a CPU the rows of a request are at hand and still what the forward will read: look closer right away."""
        count = int(self._buffer.count)
        rows = self._buffer.rows[: min(count, self._buffer.capacity)].tolist()
        step.early_rows = self._refine(step, rows)
        step.early_hidden = count - len(rows)
        self._buffer.reset()

    def _refine(self, step: Step, rows: list[list[int]]) -> list[list[int]]:
        scatter = self._backend.scatter_req_token_ids
        return refine_chain_rows(step, rows, self.records, self.pool.req_to_token, scatter, self._truth.anchor_of)

    def _check_content(self, slots: torch.Tensor, index: int) -> None:
        self._backend.check_slots(
            records=self.records.hot,
            writers=self.records.writers,
            table=self.pool.table,
            slots=slots,
            request=index,
            violations=self._buffer,
        )

    def _judge(self, step: Step) -> None:
        count, rows = step.read_verdict()
        if self.scrubber is not None and self.scrubber.wants_timing and step.requests:
            self.scrubber.observe_forward(step.seconds)
        if not count:
            return
        if not self._on_host:
            # Only to name a place: what the rows said when they were verified decides, not what they say now.
            rows = self._refine(step, sort_rows(rows))
        fresh = self._reporter.report(self._diagnosis.explain(step, rows))
        if step.hidden:
            self._reporter.count_unlisted(step.hidden, step.number)
        if fresh and self.config.mode == "raise":
            raise CorruptionError(render_line(fresh[0]))

    def _time_one_slot(self) -> float:
        """Seconds one more slot in the rotating pass costs, measured here and now."""
        device = self._buffer.count.device
        few, many = (min(count, self.pool.slot_count) for count in _CALIBRATION_SLOTS[self._on_host])
        sums = torch.empty((2, many), dtype=torch.int64, device=device)

        def seconds(count: int) -> float:
            slots = torch.arange(count, device=device)
            start = time.perf_counter()
            self._backend.fold_slots(self.pool.table, slots, digest=sums[0, :count], locator=sums[1, :count])
            if not self._on_host:
                torch.get_device_module(device).synchronize()
            return time.perf_counter() - start

        best = [min(seconds(count) for _ in range(8)) for count in (few, many)]
        return max(best[1] - best[0], 1e-9) / max(many - few, 1)
