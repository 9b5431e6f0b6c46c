"""Scatter CSR spans of token ids into per-request rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import block_of, jit, launch
from .mixing_triton import find_request, span_requests

_BLOCK = 1024


@jit
def _scatter(
    flat_ptr, offsets_ptr, rows_ptr, out_ptr, total: tl.int64, bs: tl.int64, row_count: tl.int64, row_length: tl.int64,
    row_stride: tl.int64, BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    t = first + tl.arange(0, BLOCK)
    inside = t < total
    low, high = span_requests(offsets_ptr, bs, first, tl.minimum(first + BLOCK, total) - 1, REQUESTS)
    request = find_request(offsets_ptr, t, low, high)
    start = tl.load(offsets_ptr + request, mask=inside, other=0)
    stop = tl.load(offsets_ptr + request + 1, mask=inside, other=0)
    row = tl.load(rows_ptr + request, mask=inside, other=-1)
    sound = inside & (start >= 0) & (start <= t) & (t < stop) & (stop - start <= row_length)
    sound = sound & (row >= 0) & (row < row_count)
    token = tl.load(flat_ptr + t, mask=inside, other=0).to(tl.int32)
    tl.store(out_ptr + row * row_stride + (t - start), token, mask=sound)


def scatter_req_token_ids(
    flat_in: torch.Tensor, offsets: torch.Tensor, req_pool_indices: torch.Tensor, pool_out: torch.Tensor
) -> None:
    """See :func:`scatter.scatter_req_token_ids`."""
    total, bs = flat_in.shape[0], req_pool_indices.shape[0]
    block = block_of(total, 64, _BLOCK)
    launch(
        _scatter,
        triton.cdiv(total, block),
        (flat_in, offsets, req_pool_indices, pool_out, total, bs, *pool_out.shape, pool_out.stride(0)),
        (block, block_of(bs, 64, 1024)),
        device=pool_out.device,
    )
