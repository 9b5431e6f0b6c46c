"""DeepSeek V4: a window of every position, and entries that stand for 4 or for 128 positions each.

No pool holds a row for every position, yet ``req_to_token`` and the allocator number positions: that numbering is the
main space, without bytes of its own. A page is 256 positions, so the entry of a group of positions is its slot divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...errors import UncoveredError
from ..sources import view_slots
from .draft import Part, PoolDraft, SlotDraft, StateDraft
from .packed import split_page

_NOPE_AND_ROPE_BYTES = 576
_SCALE_BYTES = 8  # seven of 64 values each, and one that pads
_INDEX_SCALE_BYTES = 4
_UNIFORM_BYTES = 512
RATIOS = (4, 128)

UNCHECKED = {
    "indexer_compress_state_pools": "sums of groups that are not full yet: rewritten in place for every token",
    "compress_state_pools": "the same of the attention; those of 128 positions are covered as a state of the request",
}


def draft_deepseek_v4_pool(pool: Any, allocator: Any, window: int | None) -> PoolDraft:
    """Main space: positions. Companions: the window, and the entries of each compression ratio with their index.

    Args:
        pool: SGLang's pool with ``swa_kv_pool`` and one pool for each ratio.
        allocator: SGLang's allocator over positions and window.
        window: positions before the current one that window layers attend to.

    Raises:
        UncoveredError: the rows have a layout that is not known, or the window is a ring of each request.
    """
    name = type(pool).__name__
    if pool.swa_kv_pool is None or getattr(pool, "swa_req_ring_size", None) is not None:
        raise UncoveredError(f"KV pool {name} is not covered where the window is a ring of each request")
    compressed = getattr(pool, "kv_pools", None) or {4: pool.c4_kv_pool, 128: pool.c128_kv_pool}
    indexers = getattr(pool, "index_pools", None) or {4: pool.c4_indexer_kv_pool}
    if unknown := sorted({*compressed, *indexers} - set(RATIOS)):
        raise UncoveredError(f"KV pool {name} is not covered with entries for {unknown} positions")
    window = int(getattr(pool, "sliding_window", window or 0))
    page_size, slot_count = int(pool.page_size), int(allocator.size_full) + int(pool.page_size)
    stage = range(pool._stage_start, pool._stage_end)
    held = tuple(_read_packed(pool.swa_kv_pool, stage))
    companions = [
        SlotDraft(
            "window", held, *_size_of(pool.swa_kv_pool, held), pool.full_to_swa_index_mapping, window,
            allocator=allocator.swa_attn_allocator,
        )
    ]  # fmt: skip
    for ratio in sorted(compressed):
        layers = [layer for layer in stage if pool.compression_ratios[layer] == ratio]
        parts = tuple(_read_packed(compressed[ratio], layers))
        if ratio in indexers:
            parts += tuple(_read_index(indexers[ratio], layers))
        if parts and page_size % ratio:
            raise UncoveredError(
                f"KV pool {name} is not covered with pages of {page_size} positions, which do not consist of whole "
                f"groups of {ratio}: a group could be freed in part"
            )
        if parts:
            count = min(part.rows.shape[0] * part.rows.shape[1] for part in parts)
            companions.append(SlotDraft(f"c{ratio}", parts, count, page_size // ratio, ratio=ratio))
    return PoolDraft(
        "DeepSeek V4",
        SlotDraft("positions", (), slot_count, page_size, allocator=allocator.full_attn_allocator),
        tuple(companions),
        tuple(_draft_sums(pool)),
        UNCHECKED,
    )


def _size_of(pool: Any, parts: tuple[Part, ...]) -> tuple[int, int]:
    return int(parts[0].rows.shape[0] * parts[0].rows.shape[1]), int(pool.page_size)


def _read_packed(pool: Any, layers: Iterable[int]) -> Iterator[Part]:
    """Rows of 584 bytes: per page 576 bytes of every slot, then 8 bytes of scales of every slot, then padding."""
    name = type(pool).__name__
    if hasattr(pool, "translate_loc_to_hisparse_device"):
        raise UncoveredError(f"KV pool {name} is not covered: its entries are wherever its table of device slots says")
    layout = getattr(pool, "kv_layout", None)
    width = int(pool.get_bytes_per_token())
    if (layout is not None and layout.name != "V4") or width not in (
        _NOPE_AND_ROPE_BYTES + _SCALE_BYTES,
        _UNIFORM_BYTES,
    ):
        raise UncoveredError(f"KV pool {name} is not covered with rows of {width} bytes in layout {layout}")
    regions = (width,) if width == _UNIFORM_BYTES else (_NOPE_AND_ROPE_BYTES, _SCALE_BYTES)
    for layer, buffer in zip(layers, pool.kv_buffer, strict=True):
        for half, rows in zip(("KV", "KV scale"), split_page(buffer, int(pool.page_size), regions), strict=False):
            yield Part(layer, half, rows)


def _read_index(pool: Any, layers: Iterable[int]) -> Iterator[Part]:
    if pool.index_k_with_scale_buffer is None or torch.version.hip is not None:
        raise UncoveredError(f"KV pool {type(pool).__name__} is not covered on ROCm: index keys of slots are shuffled")
    widths = (int(pool.get_bytes_per_token()) - _INDEX_SCALE_BYTES, _INDEX_SCALE_BYTES)
    for layer, buffer in zip(layers, pool.index_k_with_scale_buffer, strict=True):
        for half, rows in zip(("index", "index scale"), split_page(buffer, int(pool.page_size), widths), strict=True):
            yield Part(layer, half, rows)


def _draft_sums(pool: Any) -> Iterator[StateDraft]:
    """Sums of 128 positions that are not full yet: a ring of rows for each request row.

    Only forwards of the request change them. SGLang also resets them when a decode server takes a request over, and
    after rejected draft tokens; both modes are refused. Before SGLang 0.5.14 they belong to slots of the window, as
    those of 4 positions still do.
    """
    if not hasattr(pool, "num_req_slots"):
        return
    parts, rings = [], set()
    for layer, sums in enumerate(pool.compress_state_pools):
        if sums is not None and sums.ratio == 128 and sums.ring_size > 1:
            rings.add(int(sums.ring_size))
            parts += [Part(layer, "sums", rows) for rows in view_slots(sums.kv_score_buffer.kv_score)]
    if parts:
        (ring,) = rings
        count = int(pool.num_req_slots)
        row_slots = torch.arange(count, dtype=torch.int32, device=parts[0].rows.device)
        yield StateDraft("sums of 128", tuple(parts), count, row_slots, split=ring)
