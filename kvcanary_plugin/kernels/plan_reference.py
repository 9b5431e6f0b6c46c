"""Lay a batch out as CSR. Torch reference and CPU backend."""

from __future__ import annotations

import torch


def plan_offsets(
    prefix_lens: torch.Tensor,
    write_lens: torch.Tensor,
    *,
    verify_offsets: torch.Tensor,
    write_offsets: torch.Tensor,
) -> None:
    """Turn lengths into offsets.

    Args:
        prefix_lens: int64 (bs,), positions each request will read from before its new tokens.
        write_lens: int64 (bs,), new tokens of each request.
        verify_offsets: int64 (bs + 1,), out. Element 0 becomes 0.
        write_offsets: int64 (bs + 1,), out. Element 0 becomes 0.
    """
    verify_offsets[0] = 0
    write_offsets[0] = 0
    torch.cumsum(prefix_lens, 0, out=verify_offsets[1:])
    torch.cumsum(write_lens, 0, out=write_offsets[1:])
