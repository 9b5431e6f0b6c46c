"""Scatter CSR spans of token ids into per-request rows. Torch reference and CPU backend."""

from __future__ import annotations

import torch


def scatter_req_token_ids(
    flat_in: torch.Tensor, offsets: torch.Tensor, req_pool_indices: torch.Tensor, pool_out: torch.Tensor
) -> None:
    """``pool_out[req_pool_indices[i], : length_i] = flat_in[offsets[i] : offsets[i + 1]]`` for every request i.

    Args:
        flat_in: int64 (total,), token ids of all requests, one after another.
        offsets: int64 (bs + 1,), non-decreasing.
        req_pool_indices: int64 (bs,), target row of each request.
        pool_out: int32 (row_count, row_length), out. Cells past a span are left alone.
    """
    lengths = offsets[1:] - offsets[:-1]
    request = torch.repeat_interleave(lengths, output_size=flat_in.numel())
    columns = torch.arange(flat_in.numel(), device=flat_in.device) - offsets[request]
    pool_out[req_pool_indices[request], columns] = flat_in.to(pool_out.dtype)
