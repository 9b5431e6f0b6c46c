"""A bounded, reusable buffer of raw violation rows on the device. It counts all and keeps the first ``capacity``."""

from __future__ import annotations

import torch

from . import record as r
from .mixing import as_array


class ViolationBuffer:
    """Raw rows found since the last reset, in no particular order on a GPU.

    Attributes:
        capacity: rows kept; those that find no room are counted all the same.
        block: int64 (1 + capacity, ROW_COLUMNS), contiguous: the count in its first element, then ``rows``. A host
            drains the buffer in one copy of it.
        rows: int64 (capacity, ROW_COLUMNS), part of ``block``. Only the first ``min(count, capacity)`` mean something.
        is_on_host: it lies in host memory.
        count: int64 (1,), part of ``block``: every violation appended since the last reset, kept or not.
    """

    def __init__(self, capacity: int, device: torch.device | str) -> None:
        self.capacity = capacity
        self.is_on_host = torch.device(device).type == "cpu"
        # One line more than promised: rows that find no room are sent there, so appending needs no branch.
        self._lines = torch.zeros((capacity + 2, r.ROW_COLUMNS), dtype=torch.int64, device=device)
        self.block = self._lines[: capacity + 1]
        self.rows = self._lines[1 : capacity + 1]
        self.count = self._lines[0, :1]

    def count_on_host(self) -> int:
        """The count, of a buffer in host memory."""
        return int(as_array(self.count)[0])

    def reset(self) -> None:
        """Forget everything, in stream order; after a drain this makes room for detail again."""
        self.count.zero_()

    def append(self, mask: torch.Tensor, columns: dict[int, torch.Tensor | int]) -> None:
        """Add one row for every true element of ``mask``, in order, without waiting for the device.

        Args:
            mask: bool (n,).
            columns: column to a scalar or an int64 tensor (n,); columns not named become 0.
        """
        if mask.device.type == "cpu":  # looking is free there: of a million positions nearly none makes a row
            chosen = mask.nonzero().flatten()
            self._fill(chosen[: max(self.capacity - int(self.count), 0)], columns)
            self.count.add_(chosen.numel())
            return
        rows = torch.zeros((mask.numel(), r.ROW_COLUMNS), dtype=torch.int64, device=mask.device)
        for column, value in columns.items():
            rows[:, column] = value
        place = self.count + torch.cumsum(mask, 0)  # counts from 1, the line of the first row
        place = torch.where(mask & (place <= self.capacity), place, self.capacity + 1)
        self._lines.index_copy_(0, place, rows)
        self.count.add_(mask.sum())

    def _fill(self, chosen: torch.Tensor, columns: dict[int, torch.Tensor | int]) -> None:
        """Make the next rows of the elements ``chosen``, int64 (k,), for which there is room."""
        first = int(self.count)
        rows = self.rows[first : first + chosen.numel()]
        rows.zero_()
        for column, value in columns.items():
            rows[:, column] = value[chosen] if isinstance(value, torch.Tensor) else value
