"""Lay a batch out as CSR: the checked entry point of the plan operation."""

from __future__ import annotations

import torch

from .backend import pick_backend
from .checks import require_device, require_integer, require_tensor
from .violations import ViolationBuffer

MAX_VERIFY_CAPACITY = (1 << 31) - 1  # what an int32 count holds


def launch_plan_offsets_kernel(
    *,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    out_verify_offsets_scratch: torch.Tensor,
    out_write_offsets: torch.Tensor,
    out_write_seed_slot_indices: torch.Tensor,
    out_verify_num_valid: torch.Tensor,
    out_verify_enable: torch.Tensor,
    out_write_num_valid_reqs: torch.Tensor,
    verify_capacity: int,
    full_to_swa_index_mapping: torch.Tensor | None = None,
    swa_window_size: int = 0,
    bs: int | None = None,
    write_offsets_len: int | None = None,
    write_req_capacity: int | None = None,
    req_to_token_stride0: int | None = None,
    violations: ViolationBuffer | None = None,
) -> None:
    """Lay out what a batch reads and stores, for a batch of any size, without waiting for the device.

    A request on row 0 is padding and contributes nothing. Neither does one on a row outside the table: it is reported
    to ``violations`` and nothing behind it is followed. Negative lengths count as none.

    Args:
        req_pool_indices, prefix_lens, extend_seq_lens: int64 (bs,). Row, positions before the new tokens, new tokens.
        req_to_token: int32 (row_count, context), contiguous.
        out_verify_offsets_scratch: int64 (>= bs + 1,). CSR of positions to verify; beyond bs + 1 untouched.
        out_write_offsets: int64 (write_req_capacity + 1,). CSR of new tokens, first 0; requests past bs are empty.
        out_write_seed_slot_indices: int64 (write_req_capacity,). Slot whose chain the new tokens continue, as it stands
            in req_to_token or the mapping; -1 where there is none. Not followed here, so not checked either.
        out_verify_num_valid: int32 (1,). Positions to verify, at most ``verify_capacity``.
        out_verify_enable: int32 (1,). 0 where there are more than ``verify_capacity``, else 1.
        out_write_num_valid_reqs: int32 (1,). bs.
        verify_capacity: most positions to verify.
        full_to_swa_index_mapping: int64 (n,), or None. Translates seed slots to those of a sliding-window pool.
        swa_window_size: positions a sliding window verifies; 0 for all.
        bs, write_offsets_len, write_req_capacity, req_to_token_stride0: what the caller believes the tensors to have,
            for callers that baked these numbers in; each is compared with the tensor.
        violations: where rows outside the table are reported.

    Raises:
        ValueError: a tensor has another dimension, dtype, length, device or stride than said above, or the numbers do
            not agree or fit. Values on the device are never looked at.
    """
    bs = int(req_pool_indices.shape[0]) if bs is None and req_pool_indices.ndim else bs or 0
    written = out_write_offsets.numel() if write_offsets_len is None else write_offsets_len
    capacity = out_write_seed_slot_indices.numel() if write_req_capacity is None else write_req_capacity
    require_tensor(req_to_token, "req_to_token", torch.int32, ndim=2)
    stride = req_to_token.stride(0) if req_to_token_stride0 is None else req_to_token_stride0
    for number, name in ((bs, "bs"), (capacity, "write_req_capacity"), (verify_capacity, "verify_capacity")):
        require_integer(number, name)
    require_integer(swa_window_size, "swa_window_size")
    if verify_capacity > MAX_VERIFY_CAPACITY:
        raise ValueError(f"kv-canary: verify_capacity must be at most {MAX_VERIFY_CAPACITY}, got {verify_capacity}")
    if written <= 0:
        raise ValueError(f"kv-canary: write_offsets_len must be positive, got {written}")
    if stride <= 0:
        raise ValueError(f"kv-canary: req_to_token_stride0 must be positive, got {stride}")

    tensors = (
        (req_pool_indices, "req_pool_indices", torch.int64, bs),
        (prefix_lens, "prefix_lens", torch.int64, bs),
        (extend_seq_lens, "extend_seq_lens", torch.int64, bs),
        (out_write_offsets, "out_write_offsets", torch.int64, written),
        (out_write_seed_slot_indices, "out_write_seed_slot_indices", torch.int64, capacity),
        (out_verify_num_valid, "out_verify_num_valid", torch.int32, 1),
        (out_verify_enable, "out_verify_enable", torch.int32, 1),
        (out_write_num_valid_reqs, "out_write_num_valid_reqs", torch.int32, 1),
    )
    for tensor, name, dtype, length in tensors:
        require_tensor(tensor, name, dtype, ndim=1, length=length)
    require_tensor(out_verify_offsets_scratch, "out_verify_offsets_scratch", torch.int64, ndim=1, least=bs + 1)
    devices = [(tensor, name) for tensor, name, _, _ in tensors] + [(req_to_token, "req_to_token")]
    if full_to_swa_index_mapping is not None:
        require_tensor(full_to_swa_index_mapping, "full_to_swa_index_mapping", torch.int64, ndim=1, least=1)
        devices.append((full_to_swa_index_mapping, "full_to_swa_index_mapping"))
    elif swa_window_size > 0:
        raise ValueError("kv-canary: full_to_swa_index_mapping is required when swa_window_size > 0")
    if written != capacity + 1:
        raise ValueError(
            f"kv-canary: write_offsets_len must equal write_req_capacity + 1, got {written} and {capacity}"
        )
    if bs > capacity:
        raise ValueError(f"kv-canary: bs={bs} exceeds write_req_capacity={capacity}")
    if stride != req_to_token.stride(0):
        raise ValueError(
            f"kv-canary: req_to_token_stride0={stride} does not match req_to_token.stride(0)={req_to_token.stride(0)}"
        )
    require_device(devices, out_verify_offsets_scratch, "out_verify_offsets_scratch")

    pick_backend(req_to_token.device).plan_batch(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        out_verify_offsets_scratch=out_verify_offsets_scratch,
        out_write_offsets=out_write_offsets,
        out_write_seed_slot_indices=out_write_seed_slot_indices,
        out_verify_num_valid=out_verify_num_valid,
        out_verify_enable=out_verify_enable,
        out_write_num_valid_reqs=out_write_num_valid_reqs,
        swa_window_size=swa_window_size,
        verify_capacity=verify_capacity,
        violations=violations,
    )
