"""SGLang's launcher, with a hierarchical cache that works on a CPU. Run in place of ``sglang.launch_server``.

The code at the top also runs in the scheduler process, which is spawned from here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import runpy
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import utils

from tests.host_copies import COPIES, VARIABLE

try:
    from sglang.srt.mem_cache.pool_host import mha, mla

    modules: tuple[Any, ...] = (mha, mla)
except ImportError:  # before 0.5.16
    from sglang.srt.mem_cache import memory_pool_host

    modules = (memory_pool_host,)

BIT = 11  # of a bfloat16: the value changes by a factor of 65536
LOAD_LENGTH = 32  # what is shorter does not count
logger = logging.getLogger("kvcanary")
_loads = 0


def _without_pinning(init: Any) -> Any:
    def unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "pin_memory": False})

    return unpinned


def _with_bad_memory(start_loading: Any) -> Any:
    def damage(self: Any) -> int:
        global _loads
        slots = [slot for operation in self.load_queue for slot in operation.host_indices.tolist()]
        if len(slots) >= LOAD_LENGTH:
            _loads += 1
            logger.info("load %d of %d tokens", _loads, len(slots))
            if str(_loads) in os.environ.get(VARIABLE, "").split(","):
                pool = getattr(self.mem_pool_host, "anchor_entry", None)
                pool = self.mem_pool_host if pool is None else pool.host_pool
                pool.v_buffer[1].view(torch.int16)[slots[len(slots) // 2], 0, 5] ^= 1 << BIT
        return int(start_loading(self))

    return damage


def _hash_tokens(tokens: Any, prior: bytes | None, page_size: int | None) -> str | list[str]:
    """In place of a native extension that is compiled when it is first used."""
    ids, hashes = list(getattr(tokens, "token_ids", tokens)), []
    for start in range(0, len(ids), page_size or len(ids)):
        prior = hashlib.sha256((prior or b"") + repr(ids[start : start + (page_size or len(ids))]).encode()).digest()
        hashes.append(prior.hex())
    return hashes if page_size else hashes[0]


utils.get_native_hash = _hash_tokens
for module in modules:
    for name, copy in COPIES.items():
        setattr(module, name, copy)
    for name in ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost"):
        if hasattr(module, name):
            owner = getattr(module, name)
            owner.__init__ = _without_pinning(owner.__init__)
HiCacheController.start_loading = _with_bad_memory(HiCacheController.start_loading)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
