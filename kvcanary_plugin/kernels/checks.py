"""Refuse tensors that a kernel would misread. All of it is looked up on the host; no value is read from a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def require_integer(number: int, name: str) -> None:
    """Refuse anything but a non-negative integer."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"kv-canary: {name} must be an int, got {type(number).__name__}")
    if number < 0:
        raise ValueError(f"kv-canary: {name} must be non-negative, got {number}")


def require_tensor(
    tensor: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    *,
    ndim: int,
    length: int | None = None,
    least: int | None = None,
) -> None:
    """Refuse a tensor of another dtype or dimension, of another length, or that is not contiguous.

    Args:
        tensor: what was passed.
        name: what messages call it.
        dtype, ndim: what it must have.
        length: of dimension 0, exactly.
        least: of dimension 0, at least.

    Raises:
        ValueError: naming the tensor, what it must have and what it has.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"kv-canary: {name} must have dtype {dtype}, got {tensor.dtype}")
    if tensor.ndim != ndim:
        raise ValueError(f"kv-canary: {name} must be {ndim}-D, got shape {tuple(tensor.shape)}")
    if length is not None and tensor.shape[0] != length:
        raise ValueError(f"kv-canary: {name} length must be {length}, got {tensor.shape[0]}")
    if least is not None and tensor.shape[0] < least:
        raise ValueError(f"kv-canary: {name} length must be >= {least}, got {tensor.shape[0]}")
    if not tensor.is_contiguous():
        raise ValueError(f"kv-canary: {name} must be contiguous, got strides {tensor.stride()}")


def require_device(tensors: Iterable[tuple[torch.Tensor, str]], reference: torch.Tensor, reference_name: str) -> None:
    """Refuse tensors that are not on the device of ``reference``."""
    for tensor, name in tensors:
        if tensor.device != reference.device:
            raise ValueError(
                f"kv-canary: {name} must be on {reference_name}'s device {reference.device}, got {tensor.device}"
            )
