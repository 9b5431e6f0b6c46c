"""Real host pools of SGLang over small device pools on the CPU."""

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool

try:
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
except ImportError:  # before 0.5.16
    from sglang.srt.mem_cache.memory_pool_host import (
        AsymmetricMHATokenToKVPoolHost,
        MHATokenToKVPoolHost,
        MLATokenToKVPoolHost,
    )

PAGE_SIZE = 4
SIZE = 32  # tokens on the device; twice as many on the host
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def make_host(kind, device, layout):
    """A host pool with two slots for each slot of the device."""
    if not hasattr(device, "get_device_pool_infos"):
        return kind(device, 2.0, 0, PAGE_SIZE, layout, pin_memory=False)
    layers = {"target_layer_num": device.layer_num} if kind is MLATokenToKVPoolHost else {}
    return kind(
        device.get_device_pool_infos()[0].buffer_info,
        *(2.0, 0, PAGE_SIZE, layout),
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        **layers,
    )


def make_mha(layout="page_first", dtype=torch.bfloat16, layers=3):
    device = MHATokenToKVPool(SIZE, PAGE_SIZE, dtype, 2, 8, layers, "cpu", False)
    return make_host(MHATokenToKVPoolHost, device, layout)


def make_asymmetric(layout="page_first"):
    device = MHATokenToKVPool(SIZE, PAGE_SIZE, torch.bfloat16, 2, 8, 3, "cpu", False, v_head_dim=4)
    return make_host(AsymmetricMHATokenToKVPoolHost, device, layout)


def make_mla(layout="page_first"):
    device = MLATokenToKVPool(
        SIZE,
        PAGE_SIZE,
        torch.bfloat16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return make_host(MLATokenToKVPoolHost, device, layout)


def make_paged(layout="page_first", name="deepseek_v4_c4", page_size=PAGE_SIZE, item_bytes=96):
    buffers = [torch.zeros(16, item_bytes, dtype=torch.uint8) for _ in range(2)]
    return DeepSeekV4PagedHostPool(name, buffers, item_bytes, 16, page_size, layout, pin_memory=False)


def make_logical():
    return LogicalHostPool(64, PAGE_SIZE)


def fill(pool, seed=0):
    """Random bytes everywhere. Returns nothing; compare with :func:`snapshot`."""
    random = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        buffer.view(torch.uint8).random_(0, 256, generator=random)


def wipe(pool):
    for buffer in buffers_of(pool):
        buffer.view(torch.uint8).fill_(0xEE)


def buffers_of(pool):
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):
        return [pool.k_buffer, pool.v_buffer]
    if pool.kv_buffer is None:
        return []
    return pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]


def page_bytes(pool, page):
    """The bytes of a page in logical order, cut out by shape and not by address."""
    first, n = page * PAGE_SIZE, PAGE_SIZE
    if isinstance(pool, DeepSeekV4PagedHostPool):
        return pool.get_data_page(first).clone()
    cuts = {
        "layer_first": lambda b: b[..., first : first + n, :, :],
        "page_first": lambda b: b[..., first : first + n, :, :, :],
    }
    if pool.layout in cuts:
        pieces = [cuts[pool.layout](buffer) for buffer in buffers_of(pool)]
    else:
        pieces = [b[:, page] if b.dim() == 6 else b[page] for b in buffers_of(pool)]
    return torch.cat([piece.contiguous().view(torch.uint8).flatten() for piece in pieces])


def indices(*pages, page_size=PAGE_SIZE):
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def make_config(extra, **changes):
    values = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "org/tiny",
        "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**{**values, **changes})


def same_bytes(one, other):
    """Random bytes make NaNs, which are not equal to themselves."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def transfer(name, keys, host_indices, **options):
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    return PoolTransfer(name=name, keys=keys, host_indices=host_indices, **options)


def operation(extra_key=None, tokens=(1, 2)):
    """Something like SGLang's storage operation, made for a radix key."""
    return SimpleNamespace(), SimpleNamespace(token_ids=list(tokens), extra_key=extra_key)
