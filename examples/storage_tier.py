"""The verified storage tier: pages written, one damaged on the disk, and what a reader gets of it.

    python examples/storage_tier.py

uses the backend as SGLang's hierarchical cache does, on a host pool of SGLang's own, without a server or a GPU. In a
server it is one flag:

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --kvcanary-hf3fs /mnt/3fs/kv
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

try:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
except ImportError:  # before 0.5.16
    from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost

from kvcanary_plugin.tiers.hf3fs.backend import VerifiedHF3FS

PAGE_TOKENS, PAGES = 16, 4
KEYS = [f"{number:064x}" for number in range(1, PAGES + 1)]


def make_host_pool() -> MHATokenToKVPoolHost:
    """Host memory as SGLang lays it out: two layers, twice as many tokens as the device pool behind it."""
    device = MHATokenToKVPool(PAGE_TOKENS * PAGES, PAGE_TOKENS, torch.bfloat16, 2, 16, 2, "cpu", False)
    options = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE_TOKENS, "layout": "page_first"}
    if not hasattr(device, "get_device_pool_infos"):  # before 0.5.16
        return MHATokenToKVPoolHost(device, **options, pin_memory=False)
    return MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        **options,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
    )


def main() -> int:
    """Write four pages, flip one bit of the second on the disk, and read them all."""
    logging.basicConfig(level=logging.ERROR, format="    %(message)s")
    pool = make_host_pool()
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    written = pool.kv_buffer.clone()
    first, behind = torch.arange(PAGE_TOKENS * PAGES), torch.arange(PAGE_TOKENS * PAGES) + PAGE_TOKENS * PAGES
    with tempfile.TemporaryDirectory(prefix="kvcanary-storage-") as folder:
        config = HiCacheStorageConfig(
            **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1},
            **{"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True},
            model_name="example",
            extra_config={"path": folder, "capacity": "16MiB", "interface_v1": 1},
        )
        backend = VerifiedHF3FS(config, {})
        backend.register_mem_pool_host(pool)
        print(f"stored      {backend.batch_set_v1(KEYS, first)}")
        print(f"read back   {backend.batch_get_v1(KEYS, behind)}")
        is_same = torch.equal(pool.kv_buffer[:, behind], written[:, first])
        print(f"same bytes  {is_same}")

        [file] = Path(folder).rglob("*.kvp*")
        damage(file, written[:, PAGE_TOKENS : 2 * PAGE_TOKENS])
        pool.kv_buffer[:, behind] = 0
        print("now one bit of the second page flips on the disk")
        served = backend.batch_get_v1(KEYS, behind)
        print(f"read back   {served}: SGLang takes the pages up to the first miss, and computes the rest")
        backend.close()
        code = subprocess.run([sys.executable, "-m", "kvcanary_plugin.cli", "fsck", "--deep", str(file)]).returncode
        print(f"fsck ends with {code}; --repair would drop the page")
    return 0 if is_same and served == [True, False, True, True] else 1


def damage(file: Path, page: torch.Tensor) -> None:
    """Flip one bit in the middle of where ``page`` lies."""
    content = bytearray(file.read_bytes())
    start = content.index(page[0, 0].contiguous().view(torch.uint8).numpy().tobytes())
    content[start + 5] ^= 1
    file.write_bytes(content)


if __name__ == "__main__":
    raise SystemExit(main())
