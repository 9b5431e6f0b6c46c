"""Scatter CSR spans of token ids into per-request rows. Torch reference."""

from __future__ import annotations

import torch

from .plan_reference import expand_offsets


def scatter_req_token_ids(
    flat_in: torch.Tensor, offsets: torch.Tensor, req_pool_indices: torch.Tensor, pool_out: torch.Tensor
) -> None:
    """What :func:`scatter.scatter_req_token_ids` documents, for arguments it has validated."""
    request = expand_offsets(offsets, flat_in.numel())
    columns = torch.arange(flat_in.numel(), device=flat_in.device) - offsets[request]
    pool_out[req_pool_indices[request], columns] = flat_in.to(pool_out.dtype)
