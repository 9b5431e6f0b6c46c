"""Buffers whose pages interleave their slots: seen in such a way that whole dimensions count the slots of a page."""

from __future__ import annotations

from typing import Any

import torch

_V_SCALES_TOGETHER = 4  # slots whose native scales of V share their rows


def view_interleaved(pool: Any, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """One buffer of a pool, seen anew, and which of its dimensions count the slots of a page.

    Args:
        pool: SGLang's pool.
        name: the attribute that holds the buffer.
        tensor: (page_count, ...) of any dtype.

    Returns:
        A view of (page_count, ...) and its axes as for :func:`view_slots`; None where the buffer is none of these.
    """
    if name == "native_k_scale_buffer" and tensor.ndim == 4:
        return tensor, (2,)  # page, head, slot, scale
    if name == "native_v_scale_buffer" and tensor.ndim == 4 and tensor.shape[2] % _V_SCALES_TOGETHER == 0:
        # Scale s of slot t, of n, is in row s // (n / 4) of the four that slots t - t % 4 and on have, at
        # s % (n / 4) * 4 + t % 4 of it.
        pages, heads, rows, width = tensor.shape
        groups = (rows // _V_SCALES_TOGETHER, _V_SCALES_TOGETHER, width // _V_SCALES_TOGETHER, _V_SCALES_TOGETHER)
        return tensor.view(pages, heads, *groups), (2, 5)
    if tensor.ndim != 5:
        return None
    if getattr(pool, "kv_cache_layout", None) == "vectorized_5d" and name in ("k_buffer", "v_buffer"):
        # K: page, head, vector of a row, slot, element; V: page, head, group, element, slot of the group.
        return tensor, (3,) if name == "k_buffer" else (2, 4)
    if getattr(pool, "mxfp8_sf_interleaved", False) and name in ("k_scale_buffer", "v_scale_buffer"):
        return tensor, (3, 2)  # page, head, slot of a group, group, scale
    return None
