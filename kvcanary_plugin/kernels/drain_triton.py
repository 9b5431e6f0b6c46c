"""The verdict is written into pinned memory by the device itself: nearly always that is one word."""

from __future__ import annotations

import torch
import triton.language as tl

from .launch import jit, launch
from .mixing_triton import ROW_COLUMNS
from .violations import ViolationBuffer

_BLOCK = 256


@jit
def _drain(block_ptr, ring_ptr, step_ptr, blocks: tl.int64, capacity: tl.int64, BLOCK: tl.constexpr):
    count = tl.load(block_ptr)
    target = ring_ptr + tl.load(step_ptr) % blocks * (capacity + 1) * ROW_COLUMNS
    words = tl.minimum(count, capacity) * ROW_COLUMNS
    for start in range(0, words, BLOCK):
        i = start + tl.arange(0, BLOCK)
        row = tl.load(block_ptr + ROW_COLUMNS + i, mask=i < words)
        tl.store(target + ROW_COLUMNS + i, row, mask=i < words)
    tl.store(target, count)
    tl.store(block_ptr, tl.zeros((), tl.int64))


def drain(violations: ViolationBuffer, ring: torch.Tensor, step: torch.Tensor) -> None:
    """See :func:`drain_reference.drain`."""
    # One warp: its threads read the count together, before any of them resets it.
    launch(
        _drain,
        1,
        (violations.block, ring, step, ring.shape[0], violations.capacity),
        (_BLOCK,),
        device=violations.block.device,
        warps=1,
    )
