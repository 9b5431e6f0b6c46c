"""SGLang's pools that stand alone, small and on a CPU, and how each stores one slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache import memory_pool as mp
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

LAYERS = 2
FP8, FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2


@dataclass
class Built:
    """A pool and what belongs to it."""

    pool: Any
    allocator: Any
    rows: Any
    window: int | None = None


@dataclass(frozen=True)
class Write:
    """One slot stored in one layer by the pool's own means.

    Attributes:
        halves: what the report may call the bytes that ``run`` changes.
        run: stores: every byte of it that is read again is other than zero afterwards.
    """

    space: str
    slot: int
    layer: int
    halves: frozenset[str]
    run: Callable[[], None]


def rows(count: int = 4) -> mp.ReqToTokenPool:
    return mp.ReqToTokenPool(count, 64, "cpu", False)


def flat(pool: Any) -> Built:
    """With the allocator SGLang takes for it."""
    size, page_size = pool.size, pool.page_size
    if page_size == 1:
        return Built(pool, TokenToKVPoolAllocator(size, pool.dtype, "cpu", pool, False), rows())
    return Built(pool, PagedTokenToKVPoolAllocator(size, page_size, pool.dtype, "cpu", pool, False), rows())


def need(name: str) -> type:
    """A pool class that not every release has."""
    if not hasattr(mp, name):
        pytest.skip(f"this SGLang has no {name}")
    return getattr(mp, name)


def full(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, 1.0078125, dtype=dtype)  # bfloat16 0x3f81: no byte is zero


def layer_of(index: int) -> SimpleNamespace:
    return SimpleNamespace(layer_id=index)


def mha_writes(built: Built, space: str = "full", pool: Any = None, layers: range = range(LAYERS)) -> Iterator[Write]:
    pool = pool or built.pool
    k, v = full(1, pool.head_num, pool.head_dim), full(1, pool.head_num, pool.v_head_dim)
    scaled = getattr(pool, "k_scale_buffer", None) is not None
    for layer in layers:
        for slot in range(pool.size + pool.page_size):
            at = torch.tensor([slot])

            def store(k: torch.Tensor, v: torch.Tensor, layer: int = layer, at: torch.Tensor = at) -> None:
                pool.set_kv_buffer(layer_of(layer), at, k.clone(), v.clone())

            for half, run in (
                ("K", lambda store=store: store(k, torch.zeros_like(v))),
                ("V", lambda store=store: store(torch.zeros_like(k), v)),
            ):
                yield Write(space, slot, layer, frozenset({half, f"{half} scale"} if scaled else {half}), run)


def page_major_writes(built: Built) -> Iterator[Write]:
    """Its setter is a kernel for a GPU; how it numbers slots is what its move does, with torch."""
    pool = built.pool
    for layer in range(LAYERS):
        for slot in range(pool.size + pool.page_size):
            for half, buffers in (("K", pool.k_buffer), ("V", pool.v_buffer)):

                def run(buffer: torch.Tensor = buffers[layer], slot: int = slot) -> None:
                    other = (slot + 1) % (pool.size + pool.page_size)
                    source = buffer[other // pool.page_size, other % pool.page_size]
                    saved = source.clone()
                    source.copy_(full(1, pool.head_num, pool.head_dim)[0])
                    pool.move_kv_cache(torch.tensor([slot]), torch.tensor([other]))
                    source.copy_(saved)

                yield Write("full", slot, layer, frozenset({half}), run)


def latent_writes(built: Built) -> Iterator[Write]:
    pool = built.pool
    halves = frozenset({"KV", "KV scale"} if getattr(pool, "kv_scale_buffer", None) is not None else {"KV"})
    kv = full(1, 1, pool.kv_cache_dim)
    for layer in range(LAYERS):
        for slot in range(pool.size + pool.page_size):

            def run(layer: int = layer, slot: int = slot) -> None:
                pool.set_kv_buffer(layer_of(layer), torch.tensor([slot]), kv.clone(), None)

            yield Write("full", slot, layer, halves, run)


def dsa_writes(built: Built) -> Iterator[Write]:
    """The setter of the index is a kernel for a GPU; its plain reader says which bytes are a slot's."""
    yield from latent_writes(built)
    pool = built.pool
    for layer in range(LAYERS):
        buffer = pool.index_k_with_scale_buffer[layer]
        width = pool.index_head_dim
        for slot in range(pool.size + pool.page_size):
            page, at = divmod(slot, pool.page_size)
            for half, start, size in (("index", 0, width), ("index scale", pool.page_size * width, 4)):

                def run(row: torch.Tensor = buffer[page], start: int = start, size: int = size, at: int = at) -> None:
                    row[start + at * size : start + (at + 1) * size] = 0x55

                yield Write("full", slot, layer, frozenset({half}), run)


def hnd_pool(page_size: int) -> Built:
    envs.SGLANG_USE_HND_KVCACHE.set(True)
    try:
        return flat(mp.MHATokenToKVPool(8, page_size, torch.bfloat16, 3, 4, LAYERS, "cpu", False, v_head_dim=6))
    finally:
        envs.SGLANG_USE_HND_KVCACHE.set(False)


def mha(page_size: int, dtype: torch.dtype = torch.bfloat16, kind: str = "MHATokenToKVPool", **options: Any) -> Built:
    shape = {"head_num": 2, "head_dim": 32 if kind.endswith(("FP4", "MXFP8")) else 4}
    options |= {"page_size": page_size, "dtype": dtype, "layer_num": LAYERS, "device": "cpu", **shape}
    try:
        return flat(need(kind)(size=8, enable_memory_saver=False, **options))
    except NotImplementedError:
        pytest.skip(f"this SGLang refuses to build {kind}")


def mla(kind: str = "MLATokenToKVPool", dtype: torch.dtype = torch.bfloat16, page_size: int = 1) -> Built:
    return flat(need(kind)(8, page_size, dtype, 16, 16, LAYERS, "cpu", False))


def dsa() -> Built:
    return flat(need("DSATokenToKVPool")(64, 64, 16, torch.bfloat16, 8, LAYERS, "cpu", 128, False, 24))
