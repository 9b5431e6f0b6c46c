"""Bring what the host knows about a forward, and what the forward may change, to tensors of our own."""

from __future__ import annotations

import torch


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
    """Fill ``block``, ``tokens``, ``slots`` and ``rows``; what a longer destination has room for beyond is padding.

    Args:
        source: int64 (words,), what the host wrote, a header (see :class:`record.Header`) and fields; pinned where the
            destination is on a device. It may be ``block``. The header repeats lengths and addresses of the three
            tensors that follow, because a captured launch finds them there.
        block: int64 (words,), out.
        input_ids, out_cache_loc: int64 or int32 (n,), of the forward, contiguous.
        req_pool_indices: int64 or int32 (bs,), of the forward, contiguous.
        tokens, slots: int64 (n or more,), out; padded with token 0 and slot -1.
        rows: int64 (bs or more,), out; padded with row 0.
    """
    if source.data_ptr() != block.data_ptr():
        block.copy_(source, non_blocking=True)
    for destination, values, padding in (
        (tokens, input_ids, 0),
        (slots, out_cache_loc, -1),
        (rows, req_pool_indices, 0),
    ):
        count = values.shape[0]
        destination[:count].copy_(values)
        if destination.shape[0] > count:
            destination[count:] = padding
