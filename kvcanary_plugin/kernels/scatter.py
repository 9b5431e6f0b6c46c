"""Scatter CSR spans of token ids into per-request rows: the checked entry point of the scatter operation."""

from __future__ import annotations

import torch

from .backend import pick_backend

_NAME = "kv-canary: scatter_req_token_ids"


def scatter_req_token_ids(
    flat_in: torch.Tensor, offsets: torch.Tensor, req_pool_indices: torch.Tensor, pool_out: torch.Tensor
) -> None:
    """``pool_out[req_pool_indices[i], : length_i] = flat_in[offsets[i] : offsets[i + 1]]`` for every request i.

    Values are checked where that needs no wait: on a CPU they raise, on any other device a span that is out of order,
    longer than a row, or bound for a row outside ``pool_out`` is left out as a whole.

    Args:
        flat_in: int64 (total,), token ids of all requests, one after another; the lower 32 bits are kept.
        offsets: int64 (bs + 1,), from 0 to total, non-decreasing. There is no upper limit on bs.
        req_pool_indices: int64 (bs,), target row of each request, each row at most once.
        pool_out: int32 (row_count, row_length), out; each row contiguous. Cells past a span are left alone.

    Raises:
        TypeError: a dtype differs; the message names the one wanted and the one given.
        ValueError: a dimension, length, stride or device differs, or on a CPU a value is out of bounds.
    """
    for tensor, name, dtype, ndim in (
        (flat_in, "flat_in", torch.int64, 1),
        (offsets, "offsets", torch.int64, 1),
        (req_pool_indices, "req_pool_indices", torch.int64, 1),
        (pool_out, "pool_out", torch.int32, 2),
    ):
        if tensor.dtype != dtype:
            wanted = str(dtype).removeprefix("torch.")
            raise TypeError(f"{_NAME} {name} must be {wanted}, got {tensor.dtype}")
        if tensor.ndim != ndim:
            raise ValueError(f"{_NAME} {name} must be {ndim}-D, got shape {tuple(tensor.shape)}")
        if tensor.device != pool_out.device:
            raise ValueError(f"{_NAME} {name} must be on pool_out's device {pool_out.device}, got {tensor.device}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{_NAME} {name} must be contiguous in its last dimension, got strides {tensor.stride()}")
    bs = req_pool_indices.shape[0]
    if offsets.shape[0] != bs + 1:
        raise ValueError(f"{_NAME} offsets length {offsets.shape[0]} != bs+1 ({bs + 1})")
    if pool_out.device.type == "cpu":
        _check_values(flat_in, offsets, req_pool_indices, pool_out)
    if bs and flat_in.shape[0]:
        pick_backend(pool_out.device).scatter_req_token_ids(flat_in, offsets, req_pool_indices, pool_out)


def _check_values(
    flat_in: torch.Tensor, offsets: torch.Tensor, req_pool_indices: torch.Tensor, pool_out: torch.Tensor
) -> None:
    lengths = offsets[1:] - offsets[:-1]
    row_count, row_length = pool_out.shape
    if bool((lengths < 0).any()):
        raise ValueError(f"{_NAME} offsets must be non-decreasing, got {offsets.tolist()}")
    if int(offsets[0]) != 0 or int(offsets[-1]) != flat_in.shape[0]:
        raise ValueError(
            f"{_NAME} offsets must run from 0 to the length of flat_in ({flat_in.shape[0]}), got {int(offsets[0])} "
            f"to {int(offsets[-1])}"
        )
    if bool((lengths > row_length).any()):
        raise ValueError(f"{_NAME} a span of {int(lengths.max())} ids is longer than a row of pool_out ({row_length})")
    if bool(((req_pool_indices < 0) | (req_pool_indices >= row_count)).any()):
        raise ValueError(f"{_NAME} req_pool_indices must lie within [0, {row_count}), got {req_pool_indices.tolist()}")
