"""Pools of models with linear-attention layers: slots for the attention layers, and a state for each request."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ...errors import UncoveredError
from ..sources import view_slots
from .draft import Part, PoolDraft, SlotDraft, StateDraft
from .rows import read_rows

# Fields of MambaPool.State with one tensor (layers, state slots, ...) each, and what they hold.
_STATES = (
    ("temporal", "SSM"),
    ("replayssm_d", "replay d"),
    ("replayssm_k", "replay k"),
    ("replayssm_g", "replay g"),
    ("replayssm_rawv", "replay raw v"),
    ("replayssm_rawk", "replay raw k"),
    ("replayssm_beta", "replay beta"),
)


_WHOLE_BYTES = 1 << 16  # a state of more bytes than this is split along its first dimension, its heads


def draft_hybrid_pool(pool: Any, allocator: Any, request_pool: Any) -> PoolDraft:
    """Main space: the attention layers. States: convolution windows and SSM state of the other layers.

    Args:
        pool: SGLang's pool with ``full_kv_pool``, ``full_attention_layer_id_mapping`` and ``mamba_pool``.
        allocator: SGLang's allocator of the main slots.
        request_pool: SGLang's request table, which knows the state slot of each row.

    Raises:
        UncoveredError: the attention pool is not covered, or state slots are not where their number says.
    """
    rows = read_rows(pool.full_kv_pool, list_attention_layers(pool))
    main = SlotDraft("full", rows.parts, rows.slot_count, rows.page_size, allocator=allocator)
    return PoolDraft("full and state", main, states=tuple(draft_states(pool.mamba_pool, request_pool)))


def list_attention_layers(pool: Any) -> list[int]:
    """The model's layer of each buffer of ``pool.full_kv_pool``."""
    return [layer for layer, _ in sorted(pool.full_attention_layer_id_mapping.items(), key=lambda item: item[1])]


def draft_states(mamba_pool: Any, request_pool: Any) -> Iterator[StateDraft]:
    """The per-request states of ``mamba_pool``, those that are split alike together.

    Raises:
        UncoveredError: the request table does not say which request has which state.
    """
    row_slots = getattr(request_pool, "req_index_to_mamba_index_mapping", None)
    if row_slots is None:
        raise UncoveredError(
            f"request table {type(request_pool).__name__} does not say which state slot a request has, so that the "
            f"states in {type(mamba_pool).__name__} are not covered"
        )
    slot_count = int(mamba_pool.size) + 1
    layers = [layer for layer, _ in sorted(request_pool.mamba_map.items(), key=lambda item: item[1])]
    parts: dict[int, list[Part]] = {}
    for half, tensor in _list_states(mamba_pool.mamba_cache):
        if tensor.shape[:2] != (len(layers), slot_count):
            raise UncoveredError(
                f"{type(mamba_pool).__name__} has {half} states of shape {tuple(tensor.shape)} where {len(layers)} "
                f"layers of {slot_count} slots belong"
            )
        is_whole = math.prod(tensor.shape[2:]) * tensor.element_size() <= _WHOLE_BYTES
        split = 1 if is_whole else int(tensor.shape[2])
        for index, layer in enumerate(layers):
            pieces = view_slots(tensor[index], slot_axes=() if is_whole else (1,))
            parts.setdefault(split, []).extend(Part(layer, half, piece) for piece in pieces)
    for split, found in sorted(parts.items()):
        name = "state" if split == 1 else f"state in {split} parts"
        yield StateDraft(name, tuple(found), slot_count, row_slots, split)


def _list_states(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for index, tensor in enumerate(state.conv):
        yield f"conv {index}", tensor
    for name, half in _STATES:
        tensor = getattr(state, name, None)
        if tensor is not None:
            yield half, tensor
