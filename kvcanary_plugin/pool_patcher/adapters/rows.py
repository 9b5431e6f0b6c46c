"""Pools in which a slot is a row, or a row within a page: K, V, latents, and the scales beside them.

What such a pool is, is read off its buffers: which of the known names it has, and how they lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UncoveredError
from ..sources import view_slots
from .draft import Part
from .interleaved import view_interleaved
from .packed import read_index

# Attribute and what it holds: a list with a tensor for each layer.
ROW_BUFFERS = (
    ("k_buffer", "K"),
    ("v_buffer", "V"),
    ("kv_buffer", "KV"),
    ("k_scale_buffer", "K scale"),
    ("v_scale_buffer", "V scale"),
    ("kv_scale_buffer", "KV scale"),
    ("native_k_scale_buffer", "native K scale"),
    ("native_v_scale_buffer", "native V scale"),
)
PLACEHOLDERS = dict.fromkeys(("k_buffer", "v_buffer"), "one page that nothing is written to")


@dataclass(frozen=True, slots=True)
class Rows:
    """The slots of one pool of this kind.

    Attributes:
        parts: all its bytes; none where the pool keeps placeholders only.
        slot_count, page_size: of its numbering.
        stores: whether anything is stored: a pool for prefill-only serving has one page that nothing is written to.
    """

    parts: tuple[Part, ...]
    slot_count: int
    page_size: int
    stores: bool = True


def read_rows(pool: Any, layers: Sequence[int] | None = None, prefix: str = "") -> Rows:
    """Describe a pool whose buffers are lists with one tensor a layer.

    Args:
        pool: SGLang's object.
        layers: the model's layer of each tensor; counted from ``pool.start_layer`` if None.
        prefix: put before what each part is called.

    Raises:
        UncoveredError: slots are not where their number says, or a buffer is laid out in a way that is not known.
    """
    _refuse_translated(pool)
    buffers = [(name, half, list(found)) for name, half in ROW_BUFFERS if (found := getattr(pool, name, None))]
    if not buffers and getattr(pool, "layer_num", None) != 0:
        raise UncoveredError(f"KV pool {_name(pool)} is not covered: it has none of the buffers that are known")
    page_size, size = int(pool.page_size), int(pool.size)
    if not buffers:  # all layers of the model are in another pool
        return Rows((), size + page_size, page_size, stores=False)
    slot_count = _count_slots(pool, buffers[0][0], buffers[0][2][0])
    if slot_count <= size and slot_count == page_size:
        return Rows((), size + page_size, page_size, stores=False)
    slot_count = _count_backed(pool, slot_count)
    page_count = -(-slot_count // page_size)
    parts = []
    for name, half, tensors in buffers:
        for layer, tensor in zip(_layers_of(pool, tensors, layers), tensors, strict=True):
            seen, axes = _find_slots(pool, name, tensor)
            held = int(tensor.shape[0]) * (page_size if axes else 1)
            if held < slot_count:
                raise UncoveredError(
                    f"KV pool {_name(pool)} has buffer {name} with {held} slots in layer {layer} where the pool has "
                    f"{slot_count}"
                )
            backed = seen[: page_count if axes else slot_count]
            parts += [Part(layer, prefix + half, piece) for piece in view_slots(backed, slot_axes=axes)]
    for layer, half, piece in read_index(pool, slot_count, lambda found: _layers_of(pool, found, layers)):
        parts.append(Part(layer, prefix + half, piece[:page_count]))
    return Rows(tuple(parts), slot_count, page_size)


def _name(pool: object) -> str:
    return type(pool).__name__


def _layers_of(pool: Any, tensors: Sequence[torch.Tensor], layers: Sequence[int] | None) -> Sequence[int]:
    if layers is None:
        return range(pool.start_layer, pool.start_layer + len(tensors))
    if len(layers) != len(tensors):
        raise UncoveredError(
            f"KV pool {_name(pool)} has buffers for {len(tensors)} layers where {len(layers)} are listed"
        )
    return layers


def _refuse_translated(pool: Any) -> None:
    """Pools that store a slot elsewhere than its number says, with buffers that look like any other's."""
    if hasattr(pool, "translate_loc_to_hisparse_device"):
        raise UncoveredError(
            f"KV pool {_name(pool)} is not covered: it keeps a slot wherever its table of device slots says, and moves "
            "slots to host memory and back while a request runs"
        )
    if hasattr(pool, "shard_spec"):
        raise UncoveredError(
            f"KV pool {_name(pool)} is not covered: each rank keeps every n-th page, and attention reads a copy "
            "gathered from the other ranks"
        )
    if getattr(pool, "layer_shard_enabled", False):
        raise UncoveredError(
            f"KV pool {_name(pool)} is not covered: each rank keeps some of the layers, and attention reads the others "
            "from a copy sent by their owner"
        )


def _count_slots(pool: Any, name: str, tensor: torch.Tensor) -> int:
    return int(tensor.shape[0]) * (int(pool.page_size) if _find_slots(pool, name, tensor)[1] else 1)


def _count_backed(pool: Any, slot_count: int) -> int:
    """Slots whose memory is there. Pools sized after graph capture reserve addresses first; touching those faults."""
    if not getattr(pool, "post_capture_active", False):
        return slot_count
    if getattr(pool, "_post_capture_owner", None) is None or pool._post_capture_owner._final_num_tokens is None:
        raise UncoveredError(
            f"KV pool {_name(pool)} has no memory behind its slots yet: it is sized after graphs were captured, by "
            "finalize_backing; attach after that"
        )
    return min(slot_count, int(pool.size) + int(pool.page_size))


def _find_slots(pool: Any, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A view of the buffer, and which dimensions of it count the slots of a page, see :func:`view_slots`.

    None of them does where the first one counts slots and there are no pages.
    """
    layout, page_size = getattr(pool, "kv_cache_layout", None), int(pool.page_size)
    found = view_interleaved(pool, name, tensor)
    if found is not None:
        if math.prod(found[0].shape[axis] for axis in found[1]) == page_size:
            return found
    elif tensor.ndim <= 3:
        is_paged = layout is None and tensor.shape[0] < int(pool.size) + page_size and tensor.shape[1] == page_size
        return tensor, (1,) if is_paged else ()
    elif tensor.ndim == 4:
        if layout == "hnd":
            axes = [2]
        elif layout is not None and layout.startswith("page_major"):
            axes = [1]
        else:
            axes = [1, 2]
        fitting = [axis for axis in axes if tensor.shape[axis] == page_size]
        if len(fitting) == 1:
            return tensor, (fitting[0],)
    raise UncoveredError(
        f"KV pool {_name(pool)} is not covered in this layout: buffer {name} of shape {tuple(tensor.shape)} and layout "
        f"{layout!r} interleaves the bytes of different slots, or it is not clear which dimension counts them"
    )
