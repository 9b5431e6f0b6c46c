"""What quantised KV was divided by before it was stored: with other scales the same bytes mean something else."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

NONE = "none"
_HALVES = ("k_scale", "v_scale")


def read_scales(model: torch.nn.Module) -> str:
    """A fingerprint of the KV scales of ``model``, 16 hex digits, or ``none`` if no attention layer has any.

    May wait for the device. Attention layers are those with a ``layer_id`` that have ``k_scale`` and ``v_scale``.
    """
    scales = [
        (int(layer.layer_id), half, _read(layer, half))  # type: ignore[arg-type]
        for layer in model.modules()
        if hasattr(layer, "layer_id") and all(hasattr(layer, half) for half in _HALVES)
        for half in _HALVES
    ]
    if all(scale is None for _, _, scale in scales):
        return NONE
    return hashlib.blake2b(repr(sorted(scales, key=lambda each: each[:2])).encode(), digest_size=8).hexdigest()


def _read(layer: Any, half: str) -> list[float] | None:
    scale = getattr(layer, f"{half}_float", None)
    if scale is None:
        scale = getattr(layer, half)
    if isinstance(scale, torch.Tensor):
        return [float(value) for value in scale.detach().flatten().tolist()]
    return None if scale is None else [float(scale)]
