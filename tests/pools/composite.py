"""SGLang's pools that consist of several, small and on a CPU, and how each stores one slot."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import memory_pool as mp
from sglang.srt.mem_cache.allocator.swa import PureSWATokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from .single import Built, Write, flat, full, latent_writes, layer_of, mha_writes, need, rows


def swa_pool(page_size: int, full_layers: list[int], window_layers: list[int]) -> Built:
    pool = SWAKVPool(12, 8, page_size, torch.bfloat16, 2, 4, window_layers, full_layers, "cpu")
    allocator = SWATokenToKVPoolAllocator(12, 8, page_size, torch.bfloat16, "cpu", pool, False)
    return Built(pool, allocator, rows(), window=4)


def pure_swa_pool() -> Built:
    pool = SWAKVPool(0, 8, 1, torch.bfloat16, 2, 4, [0, 1], [], "cpu")
    allocator = PureSWATokenToKVPoolAllocator(8, 1, torch.bfloat16, "cpu", pool, False)
    return Built(pool, allocator, rows(), window=4)


def swa_writes(built: Built) -> Iterator[Write]:
    pool = built.pool
    k, v = full(1, 2, 4), full(1, 2, 4)
    for layer, (_, in_window) in pool.layers_mapping.items():
        size = pool.size_swa if in_window else pool.size
        for slot in range(size + pool.page_size):
            at = torch.tensor([slot])
            where = mp.KVWriteLoc(at, swa_loc=at)
            for half in "KV":

                def run(layer: int = layer, half: str = half, where: Any = where) -> None:
                    pool.set_kv_buffer(
                        layer_of(layer), where, k * (half == "K"), v * (half == "V"), k_scale=None, v_scale=None
                    )

                yield Write("window" if in_window else "full", slot, layer, frozenset({half}), run)


def hybrid_pool(use_mla: bool = False, requests: int = 4) -> Built:
    """Attention in layers 1 and 3, a linear layer in 0 and 2."""
    shape = SimpleNamespace(conv=[(6, 3)], temporal=(2, 4, 4))
    kinds = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
    names = inspect.signature(mp.HybridReqToTokenPool.__init__).parameters
    options = {
        "size": requests,
        "mamba_size": requests + 1,
        "mamba_spec_state_size": requests,
        "max_context_len": 64,
        "device": "cpu",
        "enable_memory_saver": False,
        "cache_params": SimpleNamespace(shape=shape, dtype=kinds, layers=[0, 2], is_kda=False),
        "mamba_layer_ids": [0, 2],
        "enable_mamba_extra_buffer": False,
    }
    request_pool = mp.HybridReqToTokenPool(**{name: value for name, value in options.items() if name in names})
    pool = mp.HybridLinearKVPool(
        8,
        torch.bfloat16,
        1,
        2,
        4,
        [1, 3],
        "cpu",
        request_pool.mamba_pool,
        use_mla=use_mla,
        **({"kv_lora_rank": 16, "qk_rope_head_dim": 8} if use_mla else {}),
    )
    return Built(pool, TokenToKVPoolAllocator(8, torch.bfloat16, "cpu", pool, False), request_pool)


def hybrid_writes(built: Built) -> Iterator[Write]:
    pool, states = built.pool, built.rows.mamba_pool
    for index, layer in enumerate((1, 3)):
        kept = (
            latent_writes(Built(pool.full_kv_pool, None, None))
            if pool.use_mla
            else mha_writes(Built(pool.full_kv_pool, None, None))
        )
        for write in kept:
            if write.layer == index:
                yield Write("full", write.slot, layer, write.halves, write.run)
    for index, layer in enumerate((0, 2)):
        for slot in range(states.size + 1):
            for half, tensor in (("conv 0", states.mamba_cache.conv[0]), ("SSM", states.mamba_cache.temporal)):

                def run(tensor: torch.Tensor = tensor[index], slot: int = slot) -> None:
                    tensor[slot] = full(1, dtype=torch.bfloat16)[0] if tensor.dtype == torch.bfloat16 else 1.2345678

                yield Write("state", slot, layer, frozenset({half}), run)


def sparse_pool() -> Built:
    pool = need("MiniMaxSparseKVPool")(
        8, 4, torch.bfloat16, 2, 4, 6, [0], [1, 2], "cpu", [2], start_layer=0, end_layer=3
    )
    return flat(pool)


def sparse_writes(built: Built) -> Iterator[Write]:
    pool = built.pool
    yield from mha_writes(built, pool=pool.main_pool, layers=range(3))
    k, v = full(1, 1, 6), full(1, 1, 6)
    for slot in range(12):
        at = torch.tensor([slot])
        yield Write(
            "full", slot, 1, frozenset({"index K"}),
            lambda at=at: pool.set_index_kv_buffer(layer_of(1), at, k.clone(), torch.zeros_like(v), None, None),
        )  # fmt: skip
        yield Write(
            "full", slot, 1, frozenset({"index V"}),
            lambda at=at: pool.set_index_kv_buffer(layer_of(1), at, torch.zeros_like(k), v.clone(), None, None),
        )  # fmt: skip
        yield Write(
            "full", slot, 2, frozenset({"index K"}),
            lambda at=at: pool.set_index_k_buffer(layer_of(2), at, k.clone()),
        )  # fmt: skip


def deepseek_v4(pages: int = 1, page_size: int = 128, ratios: tuple[int, ...] = (4, 128), window: int = 8) -> Built:
    """A layer with groups of 4 and one with groups of 128, both with a window."""
    size, requests = pages * page_size, 16 if pages > 1 else 1
    module = pytest.importorskip("sglang.srt.mem_cache.deepseek_v4_memory_pool")
    settings = SimpleNamespace(
        speculative_algorithm=None,
        speculative_num_draft_tokens=None,
        enable_deepseek_v4_fp4_indexer=False,
        enable_encoder_swa_bounded_replay=False,
        dsv4_attn_backend="flashmla",
    )
    settings.kernel = settings.features = settings
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_global_server_args", "get_exec", "get_spec"):
            if hasattr(module, name):
                patch.setattr(module, name, lambda: settings)
        pool = module.DeepSeekV4TokenToKVPool(
            max_num_reqs=requests,
            swa_size=size,
            c4_size=size // 4,
            c128_size=size // 128,
            c4_state_pool_size=16,
            c128_state_pool_size=8,
            page_size=page_size,
            swa_page_size=page_size,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=len(ratios),
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=list(ratios),
            sliding_window=window,
        )
    allocator = SWATokenToKVPoolAllocator(size, size, page_size, torch.float8_e4m3fn, "cpu", pool, False)
    return Built(pool, allocator, rows())


def deepseek_v4_writes(built: Built) -> Iterator[Write]:
    """Through the plain twin of the kernel that stores a row; it leaves out the byte that pads the scales."""
    accessor = pytest.importorskip("sglang.srt.layers.attention.dsv4.index_buf_accessor")
    pool = built.pool
    pack = accessor.NopeFp8RopeBf16Pack(
        torch.ones(1, 448).to(torch.float8_e4m3fn), full(1, 64), torch.full((1, 7), 0x7F, dtype=torch.uint8)
    )
    kept = (
        ("window", pool.swa_kv_pool, (0, 1), 256),
        ("c4", pool.c4_kv_pool, (0,), 64),
        ("c128", pool.c128_kv_pool, (1,), 3),
    )
    for space, part, layers, count in kept:
        for index, layer in enumerate(layers):
            for slot in range(count):

                def run(buffer: torch.Tensor = part.kv_buffer[index], slot: int = slot, part: Any = part) -> None:
                    accessor._set_k_and_s_torch(buffer, torch.tensor([slot]), pack, part.page_size)

                yield Write(space, slot, layer, frozenset({"KV", "KV scale"}), run)
    for slot in range(64):
        page, at = divmod(slot, 32)
        row = pool.c4_indexer_kv_pool.index_k_with_scale_buffer[0][page]
        for half, start, size in (("index", 0, 128), ("index scale", 32 * 128, 4)):

            def mark(row: torch.Tensor = row, start: int = start, size: int = size, at: int = at) -> None:
                row[start + at * size : start + (at + 1) * size] = 0x55

            yield Write("c4", slot, 0, frozenset({half}), mark)


def nvfp4_pool() -> Built:
    module = pytest.importorskip("sglang.srt.mem_cache.minimax_m3_nvfp4_pool")
    pool = module.MiniMaxM3Nvfp4KVPool(
        size=128,
        page_size=128,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=128,
        idx_head_dim=128,
        dense_layer_ids=[],
        sparse_layer_ids=[0, 1],
        disable_value_sparse_layer_ids=[0, 1],
        device="cpu",
        start_layer=0,
        end_layer=2,
    )
    return flat(pool)


def nvfp4_writes(built: Built) -> Iterator[Write]:
    main, index = built.pool.main_pool, built.pool.index_k_pool
    packed, scales = (
        torch.full((2, 1, 2, 64), 0x55, dtype=torch.uint8),
        torch.full((2, 1, 2, 8), 0x55, dtype=torch.uint8),
    )
    for layer in range(2):
        for slot in range(256):
            at = torch.tensor([slot])
            for half, (k, v) in (("K", (1, 0)), ("V", (0, 1))):

                def store(layer: int = layer, at: torch.Tensor = at, k: int = k, v: int = v) -> None:
                    main.set_quantized_kv_buffer(layer, at, packed[0] * k, packed[1] * v, scales[0] * k, scales[1] * v)

                yield Write("full", slot, layer, frozenset({half, f"{half} scale"}), store)

            def mark(layer: int = layer, at: torch.Tensor = at) -> None:
                index.set_quantized_k_buffer(layer, at, packed[0, :, 0], scales[0, :, 0])

            yield Write("full", slot, layer, frozenset({"index K", "index K scale"}), mark)
