"""How many pages of a prefix may be loaded, when several pools have to have their part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransferResult


def count_prefix(present: Sequence[bool]) -> int:
    """Length of the leading run of True."""
    return next((number for number, is_present in enumerate(present) if not is_present), len(present))


def match_pools(
    keys: list[str],
    kv_present: Sequence[bool],
    transfers: Sequence[Any],
    exists: Callable[[str, list[str]], list[bool]],
) -> Any:
    """SGLang's ``PoolTransferResult``: the longest prefix of ``keys`` that is complete in every pool.

    Args:
        keys, kv_present: page keys, and which of them the KV pool has.
        transfers: of side pools. ``ALL_PAGES``: all pages of the prefix are needed; ``TRAILING_PAGES``: as many of its
            last ones as the transfer has keys, at least one.
        exists: which of some keys a side pool, by name, has.
    """
    pages = count_prefix(kv_present)
    limits = [_usable_lengths(transfer, exists(str(transfer.name), keys[:pages])) for transfer in transfers]
    # The pools constrain each other: the tail of one has to be there for the length that all the others leave.
    usable = next((length for length in range(pages, 0, -1) if all(limit[length - 1] for limit in limits)), 0)
    hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
    if usable:
        hits |= {transfer.name: usable for transfer in transfers}
    return PoolTransferResult(usable, hits)


def _usable_lengths(transfer: Any, present: Sequence[bool]) -> list[bool]:
    """For each length of prefix, from 1 on, whether this pool has what such a prefix needs."""
    is_tail = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
    needed = max(1, len(transfer.keys or [])) if is_tail else len(present)
    usable, run = [], 0
    for length, is_present in enumerate(present, start=1):
        run = run + 1 if is_present else 0
        usable.append(run >= min(needed, length))
    return usable
