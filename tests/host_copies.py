"""What SGLang's hierarchical cache lacks on a CPU: copies between the rows of device and host, in plain PyTorch."""

from __future__ import annotations

import ctypes
from typing import Any

VARIABLE = "KVCANARY_TEST_BAD_HOST_AT_LOAD"  # numbers of loads ahead of which one bit flips in host memory


def _copy_direct(src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _load_paged(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size) -> None:
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def _store_paged(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for index, source in enumerate(src_ptrs):
        half, layer = divmod(index, layers)
        dst_ptrs[half][dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]


def _load_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, **_: Any) -> None:
    dst_k[dst_indices], dst_v[dst_indices] = src_k[src_indices], src_v[src_indices]


def _load_page_first(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, **_: Any) -> None:
    dst_k[dst_indices], dst_v[dst_indices] = src_k[src_indices, layer_id], src_v[src_indices, layer_id]


def _store_layers(
    src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers, **_: Any
) -> None:
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for of, to in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
                ctypes.memmove(target + to * item_size, source + of * item_size, item_size)


def _store_page_first(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_: Any
) -> None:
    for sources, target in ((src_k_layers, dst_k.data_ptr()), (src_v_layers, dst_v.data_ptr())):
        for layer, source in enumerate(sources.tolist()):
            for of, to in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
                place = target + to * dst_layout_dim + layer * item_size
                ctypes.memmove(place, source + of * item_size, item_size)


COPIES = {
    "transfer_kv_direct": _copy_direct,
    "transfer_kv_per_layer_direct_pf_lf": _load_paged,
    "transfer_kv_all_layer_direct_lf_pf": _store_paged,
    "transfer_kv_per_layer": _load_layer,
    "transfer_kv_per_layer_pf_lf": _load_page_first,
    "transfer_kv_all_layer": _store_layers,
    "transfer_kv_all_layer_lf_pf": _store_page_first,
}
