"""Lay a batch out as CSR. Torch reference."""

from __future__ import annotations

import torch

from . import record as r
from .violations import ViolationBuffer

NO_SEED = -1


def plan_offsets(
    prefix_lens: torch.Tensor,
    write_lens: torch.Tensor,
    *,
    verify_offsets: torch.Tensor,
    write_offsets: torch.Tensor,
) -> None:
    """Turn lengths into offsets. A negative length counts as none.

    Args:
        prefix_lens: int64 (bs,), positions each request will read from before its new tokens.
        write_lens: int64 (bs,), new tokens of each request.
        verify_offsets: int64 (bs + 1,), out. Element 0 becomes 0.
        write_offsets: int64 (bs + 1,), out. Element 0 becomes 0.
    """
    verify_offsets[0] = 0
    write_offsets[0] = 0
    torch.cumsum(prefix_lens.clamp(min=0), 0, out=verify_offsets[1:])
    torch.cumsum(write_lens.clamp(min=0), 0, out=write_offsets[1:])


def plan_batch(
    *,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor | None,
    out_verify_offsets_scratch: torch.Tensor,
    out_write_offsets: torch.Tensor,
    out_write_seed_slot_indices: torch.Tensor,
    out_verify_num_valid: torch.Tensor,
    out_verify_enable: torch.Tensor,
    out_write_num_valid_reqs: torch.Tensor,
    swa_window_size: int,
    verify_capacity: int,
    violations: ViolationBuffer | None,
) -> None:
    """What :func:`plan.launch_plan_offsets_kernel` documents, for arguments it has validated."""
    bs = req_pool_indices.shape[0]
    row_bad = (req_pool_indices < 0) | (req_pool_indices >= req_to_token.shape[0])
    active = ~row_bad & (req_pool_indices != 0)
    prefix = torch.where(active, prefix_lens.clamp(min=0), 0)
    reads = prefix.clamp(max=swa_window_size) if swa_window_size > 0 else prefix
    writes = torch.where(active, extend_seq_lens.clamp(min=0), 0)

    out_verify_offsets_scratch[0] = 0
    torch.cumsum(reads, 0, out=out_verify_offsets_scratch[1 : bs + 1])
    total = reads.sum()
    out_verify_num_valid[0] = total.clamp(max=verify_capacity)
    out_verify_enable[0] = total <= verify_capacity
    out_write_offsets[0] = 0
    torch.cumsum(writes, 0, out=out_write_offsets[1 : bs + 1])
    out_write_offsets[bs + 1 :] = writes.sum()
    out_write_num_valid_reqs[0] = bs

    has_seed = (writes > 0) & (prefix > 0) & (prefix <= req_to_token.shape[1])
    last = torch.where(has_seed, prefix - 1, 0)
    seeds = req_to_token[torch.where(has_seed, req_pool_indices, 0), last].to(torch.int64)
    if full_to_swa_index_mapping is not None:
        inside = (seeds >= 0) & (seeds < full_to_swa_index_mapping.shape[0])
        seeds = torch.where(inside, full_to_swa_index_mapping[torch.where(inside, seeds, 0)], NO_SEED)
    out_write_seed_slot_indices.fill_(NO_SEED)
    out_write_seed_slot_indices[:bs] = torch.where(has_seed, seeds, NO_SEED)
    if violations is not None:
        request = torch.arange(bs, device=req_pool_indices.device)
        columns: dict[int, torch.Tensor | int] = {
            r.ROW_KIND: int(r.Kind.ROW_RANGE),
            r.ROW_REQUEST: request,
            r.ROW_SLOT: req_pool_indices,
        }
        violations.append(row_bad, columns)


def expand_offsets(offsets: torch.Tensor, total: int) -> torch.Tensor:
    """The request each of ``total`` elements belongs to: int64 (total,) from CSR offsets (bs + 1,).

    Not ``repeat_interleave``: on a CPU that starts its threads for a handful of requests, which costs milliseconds when
    the cores are busy with the server.
    """
    steps = torch.zeros(total + 1, dtype=torch.int64, device=offsets.device)
    steps.index_add_(0, offsets[1:-1], torch.ones_like(offsets[1:-1]))
    return torch.cumsum(steps[:total], 0)
