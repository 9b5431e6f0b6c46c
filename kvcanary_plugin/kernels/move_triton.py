"""Move records on a GPU: one launch reads all of them, another writes them."""

from __future__ import annotations

import torch
import triton.language as tl

from .launch import jit, launch
from .mixing_triton import RECORD_WORDS

BLOCK = 128


@jit
def _move(
    records_ptr, writers_ptr, target_ptr, source_ptr, scratch_ptr, n: tl.int64, slot_count: tl.int64,
    WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + t, mask=t < n, other=0)
    source = tl.load(source_ptr + t, mask=t < n, other=0)
    sound = (target >= 1) & (target < slot_count) & (source >= 1) & (source < slot_count)
    for word in tl.static_range(0, RECORD_WORDS):
        if WRITES:
            value = tl.load(scratch_ptr + word * n + t, mask=sound)
            tl.store(records_ptr + target * RECORD_WORDS + word, value, mask=sound)
        else:
            value = tl.load(records_ptr + source * RECORD_WORDS + word, mask=sound)
            tl.store(scratch_ptr + word * n + t, value, mask=sound)
    if WRITES:
        tl.store(writers_ptr + target, tl.load(scratch_ptr + RECORD_WORDS * n + t, mask=sound), mask=sound)
    else:
        tl.store(scratch_ptr + RECORD_WORDS * n + t, tl.load(writers_ptr + source, mask=sound), mask=sound)


def move_records(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    target: torch.Tensor,
    source: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """See :func:`.move_reference.move_records`."""
    n = target.shape[0]
    if n == 0:
        return
    arguments = (records, writers, target, source, scratch, n, records.shape[0])
    for writes in (False, True):
        launch(_move, -(-n // BLOCK), arguments, (writes, BLOCK), device=records.device, warps=4)
