"""What a KV pool of SGLang is made of, in the engine's terms. The one place that names pool and allocator classes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UncoveredError
from .sources import PARTIAL_READ_ALIGN_BYTES, SourceTable, make_row_source

COVERED_POOLS = ("MHATokenToKVPool",)
COVERED_ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
_READ_BYTES = {"none": 0, "partial": PARTIAL_READ_ALIGN_BYTES, "all": sys.maxsize}


@dataclass(frozen=True, slots=True)
class GuardedPool:
    """One KV pool as the guard sees it.

    Attributes:
        name: what reports call it.
        kv_cache, allocator: SGLang's objects, only ever compared by identity.
        req_to_token: int32 (row_count, context), the live table of slots.
        table: byte sources, empty where content is not checked.
        slot_count: slots, padding included.
        page_size: slots a page.
        fingerprint: what partitions whole prefixes: everything two pools must share for their KV to mean the same.
    """

    name: str
    kv_cache: Any
    allocator: Any
    req_to_token: torch.Tensor
    table: SourceTable
    slot_count: int
    page_size: int
    fingerprint: tuple[tuple[str, str], ...]


def list_gaps(pool: object, allocator: object) -> list[str]:
    """Why this pool and allocator cannot be followed; empty if they can."""
    gaps = []
    pool_class, allocator_class = type(pool).__name__, type(allocator).__name__
    if pool_class not in COVERED_POOLS:
        gaps.append(f"KV pool {pool_class} is not covered (covered: {', '.join(COVERED_POOLS)})")
    elif any(buffer.ndim != 3 for buffer in pool.k_buffer + pool.v_buffer):  # type: ignore[attr-defined]
        gaps.append(
            f"KV pool {pool_class} is covered in the layout (slot, head, dim) only, not in HND or vectorised ones"
        )
    elif getattr(pool, "k_scale_buffer", None):
        gaps.append(f"KV pool {pool_class} keeps scale buffers beside its rows, which are not covered")
    if allocator_class not in COVERED_ALLOCATORS:
        gaps.append(f"allocator {allocator_class} is not covered (covered: {', '.join(COVERED_ALLOCATORS)})")
    return gaps


def adapt_model_runner(model_runner: Any, content: str) -> GuardedPool:
    """The pool of a ``ModelRunner`` whose pools exist.

    Args:
        model_runner: SGLang's runner after its memory pools were allocated.
        content: ``none``, ``partial`` or ``all``.

    Raises:
        UncoveredError: names what this version does not cover.
    """
    pool, allocator = model_runner.token_to_kv_pool, model_runner.token_to_kv_pool_allocator
    gaps = list_gaps(pool, allocator)
    if gaps:
        raise UncoveredError("; ".join(gaps))
    return adapt_mha_pool(
        pool,
        allocator,
        model_runner.req_to_token_pool.req_to_token,
        content,
        model=str(model_runner.model_config.model_path),
    )


def adapt_mha_pool(pool: Any, allocator: Any, req_to_token: torch.Tensor, content: str, *, model: str) -> GuardedPool:
    """Sources of an ``MHATokenToKVPool``: per layer the K row, then the V row, of every slot."""
    slot_count = int(pool.k_buffer[0].shape[0])
    named = []
    for index, (k, v) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True)):
        for half, buffer in (("K", k), ("V", v)):
            for source in make_row_source(layer_buffer=buffer, read_bytes=_READ_BYTES[content]):
                named.append(((pool.start_layer + index, half), source))
    return GuardedPool(
        name="mha",
        kv_cache=pool,
        allocator=allocator,
        req_to_token=req_to_token,
        table=SourceTable(named, slot_count, pool.k_buffer[0].device),
        slot_count=slot_count,
        page_size=int(pool.page_size),
        fingerprint=(
            ("model", model),
            ("dtype", str(pool.dtype)),
            ("layout", f"{len(pool.k_buffer)}x{tuple(pool.k_buffer[0].shape[1:])}x{tuple(pool.v_buffer[0].shape[1:])}"),
        ),
    )
