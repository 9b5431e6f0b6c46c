"""SGLang's pools whose pages interleave their slots, small and on a CPU, and how each stores one slot."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache import memory_pool as mp

from .single import FP4, FP8, LAYERS, Built, Write, flat, mha_writes, need


def interpreted(run: Callable[[], None], module: ModuleType, kernel: str) -> None:
    """Run with a kernel of SGLang in Triton's interpreter."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, kernel, interpreter.InterpretedFunction(getattr(module, kernel).fn))
        run()


def vectorized() -> Built:
    """Built as on ROCm, where alone SGLang chooses this layout."""
    with pytest.MonkeyPatch.context() as patch, envs.SGLANG_AITER_KV_CACHE_LAYOUT.override("vectorized_5d"):
        patch.setattr(mp, "_use_aiter", True)
        return flat(mp.MHATokenToKVPool(16, 16, torch.bfloat16, 3, 16, LAYERS, "cpu", False))


def vectorized_writes(built: Built) -> Iterator[Write]:
    try:
        module = importlib.import_module("sglang.kernels.ops.kvcache.shuffle_5d_cache")
    except ModuleNotFoundError:  # before it was moved there
        module = importlib.import_module("sglang.srt.layers.attention.utils")
    for write in mha_writes(built):
        yield replace(write, run=partial(interpreted, write.run, module, "reshape_and_cache_shuffle_5d"))


def native_nvfp4() -> Built:
    """As for all attention backends at once: scales slot by slot, and those that TensorRT-LLM reads."""
    methods = pytest.importorskip("sglang.srt.layers.quantization.fp4_kv_cache_quant_method")
    make = getattr(methods, "NVFP4KVCacheMethod", None)
    if make is None or "native_scale_layout" not in inspect.signature(make).parameters:
        pytest.skip("this SGLang has no native NVFP4 scales")
    method = make(LAYERS, "cpu", page_size=8, native_scale_layout=True)
    return flat(mp.MHATokenToKVPool(8, 8, FP4, 2, 128, LAYERS, "cpu", False, quant_method=method))


def native_nvfp4_writes(built: Built) -> Iterator[Write]:
    """Through the kernel that stores what was quantised; quantising itself takes a GPU."""
    module = importlib.import_module("sglang.srt.layers.quantization.nvfp4_kv_cache")
    pool = built.pool
    for layer in range(LAYERS):
        buffers = [
            getattr(pool, f"{kind}_buffer")[layer]
            for kind in ("k", "v", "k_scale", "v_scale", "native_k_scale", "native_v_scale")
        ]
        for slot in range(16):
            for half, (k, v) in (("K", (0x55, 0)), ("V", (0, 0x55))):
                data = [torch.full((1, 2, 64), value, dtype=torch.uint8) for value in (k, v)]
                scales = [torch.full((1, 2, 8), value, dtype=torch.uint8) for value in (k, v)]
                store = partial(module.store_nvfp4_kv_cache, *data, *scales, torch.tensor([slot]), *buffers, 8)
                run = partial(interpreted, store, module, "_store_nvfp4_kv_kernel")
                halves = frozenset({half, f"{half} scale", f"native {half} scale"})
                yield Write("full", slot, layer, halves, run)


def mxfp8() -> Built:
    return flat(need("MHATokenToKVPoolMXFP8")(128, 128, FP8, 2, 128, LAYERS, "cpu", False, v_head_dim=128))


def mxfp8_writes(built: Built) -> Iterator[Write]:
    """Its setter is a kernel for a GPU; whose the words of the scales are is what its plain reader says."""
    pool = built.pool
    for layer in range(LAYERS):
        for half, buffers, scales in (
            ("K", pool.k_buffer, pool.k_scale_buffer),
            ("V", pool.v_buffer, pool.v_scale_buffer),
        ):
            words = scales[layer].view(torch.uint8).view(-1).view(torch.int32)
            numbers = torch.arange(words.numel(), dtype=torch.int32).view(torch.uint8).view(scales[layer].shape)
            for slot in range(pool.size + pool.page_size):
                at = torch.tensor([slot])

                def run(buffer: torch.Tensor = buffers[layer], at: torch.Tensor = at) -> None:
                    buffer.view(torch.uint8)[at] = 0x55

                yield Write("full", slot, layer, frozenset({half}), run)

                def scale(words: torch.Tensor = words, numbers: torch.Tensor = numbers, at: torch.Tensor = at) -> None:
                    found = pool._read_sf_interleaved(numbers, at).contiguous().view(torch.uint8)
                    words[found.view(-1).view(torch.int32).long()] = 0x55555555

                yield Write("full", slot, layer, frozenset({f"{half} scale"}), scale)
