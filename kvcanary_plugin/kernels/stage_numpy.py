"""The host's fields are in place already on a CPU; what is left are three small copies."""

from __future__ import annotations

import torch

from .mixing import as_array
from .stage_reference import stage_batch as stage_padded


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
    """See :func:`stage_reference.stage_batch`."""
    if source is not block or tokens.shape != input_ids.shape or rows.shape != req_pool_indices.shape:
        stage_padded(
            source=source,
            block=block,
            input_ids=input_ids,
            out_cache_loc=out_cache_loc,
            req_pool_indices=req_pool_indices,
            tokens=tokens,
            slots=slots,
            rows=rows,
        )
        return
    as_array(tokens)[:] = input_ids.numpy()
    as_array(slots)[:] = out_cache_loc.numpy()
    as_array(rows)[:] = req_pool_indices.numpy()
