"""Move what a forward found to host memory and make room for the next."""

from __future__ import annotations

import torch

from .violations import ViolationBuffer


def drain(violations: ViolationBuffer, ring: torch.Tensor, step: torch.Tensor) -> None:
    """Copy count and rows to one block of ``ring`` and reset the buffer. Rows past the count are left as they are.

    Args:
        violations: reset, in stream order.
        ring: int64 (blocks, 1 + capacity, ROW_COLUMNS), out; pinned where the buffer is on a device. Each block is laid
            out as ``violations.block``.
        step: int64 (1,), on the buffer's device; block ``step % blocks`` is filled.
    """
    block = ring[int(step) % ring.shape[0]]
    count = int(violations.count)
    kept = min(count, violations.capacity)
    block[0, 0] = count
    block[1 : 1 + kept] = violations.rows[:kept]
    violations.reset()
