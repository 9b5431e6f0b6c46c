"""Pages that hold the data of all their slots first and the scales of all their slots after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import UncoveredError

_SCALE_BYTES = 4  # one fp32 a slot


def split_page(buffer: torch.Tensor, page_size: int, widths: Sequence[int]) -> list[torch.Tensor]:
    """Views of the regions of packed pages.

    Args:
        buffer: (page_count, page bytes) of any dtype, each page contiguous.
        page_size: slots a page.
        widths: bytes a slot has in each region, in the order in which regions follow each other; what comes after
            the last one is padding.

    Returns:
        uint8 (page_count, page_size, width) for each region.

    Raises:
        UncoveredError: a page is too small.
    """
    flat = buffer.view(buffer.shape[0], -1).view(torch.uint8)
    if page_size * sum(widths) > flat.shape[1]:
        raise UncoveredError(
            f"pages of {flat.shape[1]} bytes cannot hold {page_size} slots of {' + '.join(map(str, widths))} bytes"
        )
    regions, start = [], flat.storage_offset()
    for width in widths:
        regions.append(flat.as_strided((flat.shape[0], page_size, width), (flat.stride(0), width, 1), start))
        start += page_size * width
    return regions


def read_index(
    pool: Any, slot_count: int, layers_of: Callable[[Sequence[torch.Tensor]], Sequence[int]]
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """The index keys of DeepSeek sparse attention: per page the keys of its slots, then their scales.

    Yields:
        layer, what it is, and uint8 (page_count, page_size, width) for keys and scales of each layer.

    Raises:
        UncoveredError: the index has another page size than the pool, or shuffles the keys of several slots.
    """
    buffers = getattr(pool, "index_k_with_scale_buffer", None)
    if not buffers:
        return
    name, page_size = type(pool).__name__, int(pool.page_size)
    if getattr(pool, "index_kpool", 1) != 1 or getattr(pool, "index_page_size", page_size) != page_size:
        raise UncoveredError(
            f"KV pool {name} is not covered with pooled index keys: several slots share one, made from a tail that "
            "each request keeps elsewhere"
        )
    if torch.version.hip is not None and page_size > 1:
        raise UncoveredError(f"KV pool {name} is not covered on ROCm with pages: index keys of 16 slots are shuffled")
    for layer, buffer in zip(layers_of(buffers), buffers, strict=True):
        if buffer.shape[0] == 0:
            continue  # the layer takes over what an earlier one chose
        held, width = int(buffer.shape[0]) * page_size, int(pool.index_head_dim)
        if held < slot_count or buffer.shape[1] != page_size * (width + _SCALE_BYTES):
            raise UncoveredError(
                f"KV pool {name} has index pages of shape {tuple(buffer.shape)}, which do not fit {slot_count} slots "
                f"in pages of {page_size}"
            )
        keys, scales = split_page(buffer, page_size, (width, _SCALE_BYTES))
        yield layer, "index", keys
        yield layer, "index scale", scales
