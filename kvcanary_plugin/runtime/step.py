"""One forward, as the host remembers it until its verdict has been read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.violations import ViolationBuffer
from .batch import BatchBuffers, Fields, split_fields, words_of
from .truth import Request

MAX_IN_FLIGHT = 4


class Step:
    """A forward from its announcement to its verdict. Steps are reused in a ring, because their host memory is pinned.

    Attributes:
        number: counts forwards from 1.
        requests, rows, prefix_lens: what the batch held, in its order.
        started: indices of requests seen for the first time.
        verify_total, write_total: positions to be read and tokens to be stored.
        early_rows: raw rows that were read before the forward, where that costs nothing.
        early_hidden: violations counted by then that had no room to be described.
        hidden: violations of the verdict last read that had no room to be described.
        is_open: launched, verdict not read yet.
    """

    def __init__(self, buffer: ViolationBuffer) -> None:
        self.number = 0
        self.requests: Sequence[Request] = ()
        self.rows: Sequence[int] = ()
        self.prefix_lens: Sequence[int] = ()
        self.started: Sequence[int] = ()
        self.verify_total = 0
        self.write_total = 0
        self.early_rows: list[list[int]] = []
        self.early_hidden = 0
        self.hidden = 0
        self.is_open = False
        self._on_device = buffer.count.device.type != "cpu"
        self._fields = torch.zeros(0, dtype=torch.int64)
        self._verdict = torch.zeros_like(buffer.block, device="cpu", pin_memory=self._on_device)
        self._began: Any = 0.0
        self._ended: Any = 0.0
        self._copied: Any = None
        if self._on_device:
            event: Any = torch.get_device_module(buffer.block.device).Event
            self._began, self._ended = event(enable_timing=True), event(enable_timing=True)
            self._copied = event()

    def fields_of(self, batch_size: int, batch: BatchBuffers) -> Fields:
        """Where the host writes the fields of a batch: in pinned memory of this step, on a CPU in the batch itself."""
        if not self._on_device:
            return batch.fields_of(batch_size)
        if self._fields.numel() < words_of(batch_size):
            self._fields = torch.zeros(words_of(2 * batch_size), dtype=torch.int64, pin_memory=True)
        return split_fields(self._fields, batch_size)

    def upload(self, batch: Fields) -> None:
        """Copy the fields to the device, in stream order."""
        if self._on_device:
            batch.block.copy_(self._fields[: batch.block.numel()], non_blocking=True)

    def note_begin(self) -> None:
        """The forward begins, in stream order."""
        if self._on_device:
            self._began.record()
        else:
            self._began = time.perf_counter()

    def note_end(self) -> None:
        """The forward has ended, in stream order."""
        if self._on_device:
            self._ended.record()
        else:
            self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long the forward took, without anything of ours; once its verdict was read."""
        if self._on_device:
            return float(self._began.elapsed_time(self._ended)) / 1000
        return float(self._ended - self._began)

    def keep_verdict(self, buffer: ViolationBuffer) -> None:
        """Copy what the forward found to the host, in stream order, and make the buffer ready for the next forward."""
        self.is_open = True
        if self._on_device or int(buffer.count):
            self._verdict.copy_(buffer.block, non_blocking=True)
            buffer.reset()
        else:
            self._verdict[0, 0] = 0
        if self._copied is not None:
            self._copied.record()

    def read_verdict(self) -> tuple[int, list[list[int]]]:
        """Violations there were, and the raw rows of those that were described. Waits for the copy on a GPU.

        The copy is ahead of the result copy the scheduler has waited for by now, so there is nothing left to wait for.
        """
        self.is_open = False
        if self._copied is not None:
            self._copied.synchronize()
        early, self.early_rows = self.early_rows, []
        count = int(self._verdict[0, 0])
        rows = self._verdict[1 : 1 + min(count, len(self._verdict) - 1)].tolist() if count else []
        self.hidden, self.early_hidden = self.early_hidden + count - len(rows), 0
        return len(early) + len(rows) + self.hidden, early + rows
