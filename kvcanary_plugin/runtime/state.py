"""State that a request has one of, such as the SSM state of Mamba layers: every forward rewrites it.

So it can only be compared from one forward to the next. And it is large, so one request is watched at a time, and of a
large state one part: folded behind a forward, and again before the next forward of that request.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..config import Config
from ..kernels import record as r
from ..kernels.backend import Backend
from ..kernels.violations import ViolationBuffer
from ..pool_patcher.spaces import StateSpace
from .batch import Batch
from .step import Step

VIOLATIONS_A_FORWARD = 64


class StateWatch:
    """Watches one :class:`StateSpace`.

    Attributes:
        state: what is watched.
        violations: what was found since the last verdict.
        ring: int64 (steps in flight, 1 + capacity, ROW_COLUMNS) in host memory, where verdicts go.
        compared: parts of states compared so far.
    """

    def __init__(self, state: StateSpace, config: Config, backend: Backend, steps_in_flight: int) -> None:
        device = state.row_slots.device
        self._backend = backend
        self._is_on = config.has_content and bool(state.table.sources)
        rows = state.slot_count * state.split if self._is_on else 1
        self.state = state
        self.compared = 0
        self.violations = ViolationBuffer(VIOLATIONS_A_FORWARD, device)
        shape = (steps_in_flight, *self.violations.block.shape)
        self.ring = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type != "cpu")
        self._records = torch.zeros((rows, r.RECORD_WORDS), dtype=torch.int64, device=device)
        self._writers = torch.zeros(rows, dtype=torch.int64, device=device)
        self._watched: tuple[weakref.ref[Any], int, int] | None = None  # request, its row, its retractions
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # the part that was folded
        self._turn = 0

    @property
    def resident_bytes(self) -> int:
        """Device bytes kept beside the state."""
        return (self._records.numel() + self._writers.numel()) * 8 + self.state.table.resident_bytes

    def compare(self, step: Step) -> None:
        """Before a forward: the state that was folded behind an earlier one must not have changed since."""
        if self._watched is None:
            return
        request, row, retractions = self._watched
        watched = request()
        for index, (candidate, its_row) in enumerate(zip(step.requests, step.rows, strict=True)):
            if candidate is not watched:
                continue
            self._watched = None
            if its_row != row or candidate.retraction_count != retractions or index in step.started:
                return  # it was retracted and comes back: its state is made anew
            # SGLang may have moved the state to another slot since: then there is nothing to compare.
            part = torch.where(
                self._part_of(row) // self.state.split == self._place // self.state.split, self._place, -1
            )
            self._backend.check_slots(
                records=self._records,
                writers=self._writers,
                table=self.state.table,
                slots=part,
                request=index,
                violations=self.violations,
            )
            self.compared += 1
            return
        if watched is None:
            self._watched = None  # the request has left, and its state belongs to somebody else now

    def remember(self, step: Step) -> None:
        """Behind a forward: fold a part of the state of one of its requests, each in turn."""
        if self._watched is not None or not step.requests or not self._is_on:
            return
        index = self._turn % len(step.requests)
        request, row = step.requests[index], step.rows[index]
        self._place.copy_(self._part_of(row))
        place = self._place.clamp(min=0)  # where there is no state, the padding's
        self._records[place, r.IDENTITY] = r.LIVE_BIT | (step.prefix_lens[index] << 32)
        self._writers[place] = (row & r.WRITER_ROW_MASK) | (step.number << r.WRITER_ROW_BITS)
        self._backend.seal_slots(records=self._records, table=self.state.table, slots=self._place)
        self._watched = weakref.ref(request), row, request.retraction_count
        self._turn += 1

    def drain(self, batch: Batch) -> None:
        """Write the verdict to the host and make room for the next."""
        self._backend.drain(self.violations, self.ring, batch.fields.step)

    def _part_of(self, row: int) -> torch.Tensor:
        """The row of the table, int64 (1,), with the part of this turn of a request row's state; -1 for none."""
        slot = self.state.row_slots[row : row + 1].to(torch.int64)
        inside = (slot > 0) & (slot < self.state.slot_count)
        return torch.where(inside, slot * self.state.split + self._turn % self.state.split, -1)
