"""One launch for what would be four copies. The host's part is read straight from pinned memory: it is a few KiB.

Where the forward's own tensors lie, and how long they are, stands in the header of the host's part, so that a captured
launch serves every forward.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .launch import jit, launch
from .record import Header

_BLOCK = 1024
_INPUT_IDS = tl.constexpr(int(Header.INPUT_IDS))
_OUT_CACHE_LOC = tl.constexpr(int(Header.OUT_CACHE_LOC))
_REQ_POOL_INDICES = tl.constexpr(int(Header.REQ_POOL_INDICES))
_WRITTEN = tl.constexpr(int(Header.WRITTEN))
_REQUESTS = tl.constexpr(int(Header.REQUESTS))


@jit
def _stage(
    source_ptr, block_ptr, words: tl.int64, tokens_ptr, slots_ptr, capacity: tl.int64, rows_ptr, row_capacity: tl.int64,
    TOKEN: tl.constexpr, SLOT: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(block_ptr + i, tl.load(source_ptr + i, mask=i < words, other=0), mask=i < words)
    written = tl.load(source_ptr + _WRITTEN)
    input_ids = tl.load(source_ptr + _INPUT_IDS).to(tl.pointer_type(TOKEN))
    token = tl.load(input_ids + i, mask=i < written, other=0)
    tl.store(tokens_ptr + i, token.to(tl.int64), mask=i < capacity)
    out_cache_loc = tl.load(source_ptr + _OUT_CACHE_LOC).to(tl.pointer_type(SLOT))
    slot = tl.load(out_cache_loc + i, mask=i < written, other=-1)
    tl.store(slots_ptr + i, slot.to(tl.int64), mask=i < capacity)
    req_pool_indices = tl.load(source_ptr + _REQ_POOL_INDICES).to(tl.pointer_type(ROW))
    row = tl.load(req_pool_indices + i, mask=i < tl.load(source_ptr + _REQUESTS), other=0)
    tl.store(rows_ptr + i, row.to(tl.int64), mask=i < row_capacity)


_KINDS = {torch.int64: tl.int64, torch.int32: tl.int32}


def stage_batch(
    *,
    source: torch.Tensor,
    block: torch.Tensor,
    input_ids: torch.Tensor,
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """See :func:`stage_reference.stage_batch`. The addresses and lengths must stand in the header already."""
    words, capacity, row_capacity = block.shape[0], tokens.shape[0], rows.shape[0]
    launch(
        _stage,
        -(-max(words, capacity, row_capacity) // _BLOCK),
        (source, block, words, tokens, slots, capacity, rows, row_capacity),
        (_KINDS[input_ids.dtype], _KINDS[out_cache_loc.dtype], _KINDS[req_pool_indices.dtype], _BLOCK),
        device=block.device,
    )
