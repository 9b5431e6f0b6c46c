"""SGLang's real pools, small and on a CPU, each with its own way of storing one slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import composite, interleaved, qsa, single
from .single import FP4, FP8, Built, Write


@dataclass(frozen=True)
class Case:
    """One kind of pool.

    Attributes:
        name: the case.
        pool: its class, as the catalogue names it.
        build: makes it.
        writes: every slot, layer and half of it.
        alone: whether it is small enough to flip all bytes one at a time; otherwise one byte of every slot at a time.
        pads: whether some bytes are a slot's though its setter leaves them out.
        states: whether its per-request states are small enough to be among ``writes``.
    """

    name: str
    pool: str
    build: Callable[[], Built]
    writes: Callable[[Built], Iterator[Write]]
    alone: bool = True
    pads: bool = False
    states: bool = True


PAGE_MAJOR = "PageMajorMHATokenToKVPool"

CASES = (
    Case("mha", "MHATokenToKVPool", lambda: single.mha(1, v_head_dim=6), single.mha_writes),
    Case("mha-paged", "MHATokenToKVPool", lambda: single.mha(4), single.mha_writes),
    Case("mha-fp8", "MHATokenToKVPool", lambda: single.mha(1, FP8), single.mha_writes),
    Case("mha-hnd", "MHATokenToKVPool", lambda: single.hnd_pool(1), single.mha_writes),
    Case("mha-hnd-paged", "MHATokenToKVPool", lambda: single.hnd_pool(4), single.mha_writes),
    Case("mha-fp4", "MHATokenToKVPoolFP4", lambda: single.mha(1, FP4, "MHATokenToKVPoolFP4"), single.mha_writes),
    Case("mha-vectorized", "MHATokenToKVPool", interleaved.vectorized, interleaved.vectorized_writes, alone=False),
    Case("mha-nvfp4", "MHATokenToKVPool", interleaved.native_nvfp4, interleaved.native_nvfp4_writes, alone=False),
    Case("mha-mxfp8", "MHATokenToKVPoolMXFP8", interleaved.mxfp8, interleaved.mxfp8_writes, alone=False),
    Case("page-major", PAGE_MAJOR, lambda: single.mha(4, kind=PAGE_MAJOR), single.page_major_writes),
    Case("mla", "MLATokenToKVPool", single.mla, single.latent_writes),
    Case("mla-fp8", "MLATokenToKVPool", lambda: single.mla(dtype=FP8, page_size=4), single.latent_writes),
    Case("mla-fp4", "MLATokenToKVPoolFP4", lambda: single.mla("MLATokenToKVPoolFP4", FP4), single.latent_writes),
    Case("dsa", "DSATokenToKVPool", single.dsa, single.dsa_writes, alone=False),
    Case(
        "deepseek-v4",
        "DeepSeekV4TokenToKVPool",
        composite.deepseek_v4,
        composite.deepseek_v4_writes,
        alone=False,
        pads=True,
        states=False,
    ),
    Case("swa", "SWAKVPool", lambda: composite.swa_pool(1, [0, 2], [1]), composite.swa_writes),
    Case("swa-paged", "SWAKVPool", lambda: composite.swa_pool(4, [1], [0, 2]), composite.swa_writes),
    Case("swa-only", "SWAKVPool", composite.pure_swa_pool, composite.swa_writes),
    Case("hybrid", "HybridLinearKVPool", composite.hybrid_pool, composite.hybrid_writes),
    Case("hybrid-mla", "HybridLinearKVPool", lambda: composite.hybrid_pool(use_mla=True), composite.hybrid_writes),
    Case("qsa", "QSATokenToKVPool", qsa.qsa_pool, qsa.qsa_writes),
    Case("qsa-fp8", "QSATokenToKVPool", lambda: qsa.qsa_pool(qsa_indexer_dtype=FP8), qsa.qsa_writes, alone=False),
    Case("sparse", "MiniMaxSparseKVPool", composite.sparse_pool, composite.sparse_writes),
    Case("nvfp4", "MiniMaxM3Nvfp4KVPool", composite.nvfp4_pool, composite.nvfp4_writes, alone=False),
)
