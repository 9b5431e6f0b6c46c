"""Scatter CSR spans of token ids into per-request rows."""

from __future__ import annotations

import torch
import triton.language as tl

from .launch import block_of, jit, launch
from .mixing_triton import find_owner

_BLOCK = 512


@jit
def _scatter(
    flat_ptr, offsets_ptr, rows_ptr, out_ptr, total: tl.int64, bs: tl.int64, row_count: tl.int64, row_length: tl.int64,
    row_stride: tl.int64, BLOCK: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    _, row, begin, end, first = find_owner(offsets_ptr, rows_ptr, bs, tl.program_id(0).to(tl.int64), BLOCK, REQUESTS)
    t = first + tl.arange(0, BLOCK)
    sound = (begin >= 0) & (end <= total) & (end - begin <= row_length) & (row >= 0) & (row < row_count)
    inside = sound & (t < end)
    token = tl.load(flat_ptr + t, mask=inside, other=0).to(tl.int32)
    tl.store(out_ptr + row * row_stride + (t - begin), token, mask=inside)


def scatter_req_token_ids(
    flat_in: torch.Tensor, offsets: torch.Tensor, req_pool_indices: torch.Tensor, pool_out: torch.Tensor
) -> None:
    """See :func:`scatter.scatter_req_token_ids`."""
    total, bs = flat_in.shape[0], req_pool_indices.shape[0]
    launch(
        _scatter,
        total // _BLOCK + bs,
        (flat_in, offsets, req_pool_indices, pool_out, total, bs, *pool_out.shape, pool_out.stride(0)),
        (_BLOCK, block_of(bs, 16, 256)),
        device=pool_out.device,
    )
