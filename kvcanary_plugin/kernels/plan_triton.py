"""Lay a batch out as CSR, in one program for a batch of any size."""

from __future__ import annotations

import torch
import triton.language as tl

from . import record as r
from .launch import block_of, jit, launch
from .mixing_triton import append_rows
from .plan_reference import NO_SEED
from .violations import ViolationBuffer

_ROW_RANGE = tl.constexpr(int(r.Kind.ROW_RANGE))
_NO_SEED = tl.constexpr(NO_SEED)


@jit
def _plan_offsets(
    prefix_lens_ptr, write_lens_ptr, verify_offsets_ptr, write_offsets_ptr, bs: tl.int64, BLOCK: tl.constexpr
):
    reads_before = tl.zeros((), tl.int64)
    writes_before = tl.zeros((), tl.int64)
    tl.store(verify_offsets_ptr, reads_before)
    tl.store(write_offsets_ptr, writes_before)
    for start in range(0, bs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < bs
        reads = tl.maximum(tl.load(prefix_lens_ptr + i, mask=inside, other=0), 0)
        writes = tl.maximum(tl.load(write_lens_ptr + i, mask=inside, other=0), 0)
        tl.store(verify_offsets_ptr + 1 + i, reads_before + tl.cumsum(reads, 0), mask=inside)
        tl.store(write_offsets_ptr + 1 + i, writes_before + tl.cumsum(writes, 0), mask=inside)
        reads_before += tl.sum(reads, 0)
        writes_before += tl.sum(writes, 0)


@jit
def _plan_batch(
    rows_ptr, prefix_lens_ptr, write_lens_ptr, req_to_token_ptr, mapping_ptr, verify_offsets_ptr, write_offsets_ptr,
    seeds_ptr, verify_count_ptr, verify_enable_ptr, write_count_ptr, violations_ptr, violation_count_ptr,
    bs: tl.int64, write_capacity: tl.int64, verify_capacity: tl.int64, window: tl.int64, mapping_len: tl.int64,
    row_count: tl.int64, context: tl.int64, row_stride: tl.int64, violation_capacity: tl.int64,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, MAPPED: tl.constexpr, REPORTS: tl.constexpr,
):  # fmt: skip
    reads_before = tl.zeros((), tl.int64)
    writes_before = tl.zeros((), tl.int64)
    tl.store(verify_offsets_ptr, reads_before)
    tl.store(write_offsets_ptr, writes_before)
    for start in range(0, write_capacity, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < bs
        row = tl.load(rows_ptr + i, mask=inside, other=0)
        row_bad = (row < 0) | (row >= row_count)
        active = inside & ~row_bad & (row != 0)
        prefix = tl.maximum(tl.load(prefix_lens_ptr + i, mask=active, other=0), 0)
        writes = tl.maximum(tl.load(write_lens_ptr + i, mask=active, other=0), 0)
        reads = prefix
        if WINDOWED:
            reads = tl.minimum(prefix, window)
        tl.store(verify_offsets_ptr + 1 + i, reads_before + tl.cumsum(reads, 0), mask=inside)
        tl.store(write_offsets_ptr + 1 + i, writes_before + tl.cumsum(writes, 0), mask=i < write_capacity)
        reads_before += tl.sum(reads, 0)
        writes_before += tl.sum(writes, 0)

        has_seed = (writes > 0) & (prefix > 0) & (prefix <= context)
        place = req_to_token_ptr + row * row_stride + prefix - 1
        seed = tl.load(place, mask=has_seed, other=_NO_SEED).to(tl.int64)
        if MAPPED:
            known = has_seed & (seed >= 0) & (seed < mapping_len)
            seed = tl.load(mapping_ptr + seed, mask=known, other=_NO_SEED)
        tl.store(seeds_ptr + i, seed, mask=i < write_capacity)
        if REPORTS:  # noqa: SIM102 - settled when the kernel is compiled
            if tl.max((row_bad & inside).to(tl.int32), 0) > 0:
                append_rows(
                    violations_ptr, violation_count_ptr, violation_capacity, row_bad & inside,
                    _ROW_RANGE, i, 0, row, 0, 0, 0, 0, 0, 0, 0,
                )  # fmt: skip
    tl.store(verify_count_ptr, tl.minimum(reads_before, verify_capacity).to(tl.int32))
    tl.store(verify_enable_ptr, (reads_before <= verify_capacity).to(tl.int32))
    tl.store(write_count_ptr, (bs + reads_before * 0).to(tl.int32))


def plan_offsets(
    prefix_lens: torch.Tensor,
    write_lens: torch.Tensor,
    *,
    verify_offsets: torch.Tensor,
    write_offsets: torch.Tensor,
) -> None:
    """See :func:`plan_reference.plan_offsets`."""
    bs = prefix_lens.shape[0]
    launch(
        _plan_offsets,
        1,
        (prefix_lens, write_lens, verify_offsets, write_offsets, bs),
        (block_of(bs, 64, 1024),),
        device=verify_offsets.device,
    )


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
    """See :func:`plan_reference.plan_batch`."""
    capacity = out_write_seed_slot_indices.shape[0]
    mapping = out_write_offsets if full_to_swa_index_mapping is None else full_to_swa_index_mapping
    launch(
        _plan_batch,
        1,
        (
            req_pool_indices,
            prefix_lens,
            extend_seq_lens,
            req_to_token,
            mapping,
            out_verify_offsets_scratch,
            out_write_offsets,
            out_write_seed_slot_indices,
            out_verify_num_valid,
            out_verify_enable,
            out_write_num_valid_reqs,
            out_write_offsets if violations is None else violations.rows,
            out_write_offsets if violations is None else violations.count,
            req_pool_indices.shape[0],
            capacity,
            verify_capacity,
            swa_window_size,
            mapping.shape[0],
            req_to_token.shape[0],
            req_to_token.shape[1],
            req_to_token.stride(0),
            0 if violations is None else violations.capacity,
        ),
        (
            block_of(capacity, 64, 1024),
            swa_window_size > 0,
            full_to_swa_index_mapping is not None,
            violations is not None,
        ),
        device=req_to_token.device,
    )
