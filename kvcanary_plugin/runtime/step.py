"""One forward, as the host remembers it until its verdict has been read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import record as r
from ..kernels.violations import ViolationBuffer
from .batch import FIELDS, BatchBuffers, Requests
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
        self.is_open = False
        self._on_device = buffer.count.device.type != "cpu"
        self._fields = torch.zeros((FIELDS, 0), dtype=torch.int64)
        self._count = torch.zeros(1, dtype=torch.int64, pin_memory=self._on_device)
        self._rows = torch.zeros((buffer.capacity, r.ROW_COLUMNS), dtype=torch.int64, pin_memory=self._on_device)
        self._copied: Any = torch.get_device_module(buffer.count.device).Event() if self._on_device else None

    def fields_of(self, batch_size: int, batch: BatchBuffers) -> npt.NDArray[np.int64]:
        """Where the host writes the fields of :mod:`.batch`: int64 (FIELDS, batch_size). On a CPU the batch's own."""
        if not self._on_device:
            return batch.requests_of(batch_size).block.numpy()
        if self._fields.shape[1] < batch_size:
            self._fields = torch.zeros((FIELDS, 2 * batch_size), dtype=torch.int64, pin_memory=True)
        return self._fields[:, :batch_size].numpy()

    def upload(self, batch: Requests) -> None:
        """Copy the fields to the device, in stream order."""
        if self._on_device:
            batch.block.copy_(self._fields[:, : batch.block.shape[1]], non_blocking=True)

    def keep_verdict(self, buffer: ViolationBuffer) -> None:
        """Copy what the forward found to the host, in stream order, and make the buffer ready for the next forward."""
        self.is_open = True
        self._count.copy_(buffer.count, non_blocking=True)
        if self._on_device or int(self._count):
            self._rows.copy_(buffer.rows, non_blocking=True)
            buffer.reset()
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
        hidden, self.early_hidden = self.early_hidden, 0
        count = int(self._count)
        rows = self._rows[: min(count, self._rows.shape[0])].tolist() if count else []
        return len(early) + hidden + count, early + rows
