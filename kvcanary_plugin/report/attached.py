"""What is said once of a guard when it takes up its work."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .reporter import Reporter

if TYPE_CHECKING:
    from ..runtime.guard import Guard

logger = logging.getLogger("kvcanary")


def announce_guard(guard: Guard, reporter: Reporter) -> None:
    """Log what is guarded, how, and what is not; and write the event ``attached``."""
    pool, mode = guard.pool, guard.config.mode
    bytes_per_slot = sum(space.table.bytes_per_slot for space in (pool.main, *pool.companions))
    periods = [space.scrubber.period_forwards for space in guard.spaces if space.scrubber is not None]
    scrub = f", first content pass {max(periods)} forwards" if periods else ""
    logger.info(
        'kvcanary: guarding pool "%s": %d slots of %d bytes, checks %s, mode %s, %.1f bytes a slot resident%s',
        pool.name,
        pool.slot_count,
        bytes_per_slot,
        "+".join(guard.checks),
        mode,
        guard.resident_bytes / pool.slot_count,
        scrub,
    )
    if guard.traffic.drafts is not None:
        logger.warning("kvcanary: a draft model's pool is not guarded: it only proposes what the target decides")
    if left_out := guard.settings.missing:
        logger.warning("kvcanary: not checked, because it cannot be in this server: %s", ", ".join(left_out))
    reporter.event(
        "attached",
        {
            "pool": pool.name,
            "rank": guard.rank,
            "slots": pool.slot_count,
            "page_size": pool.page_size,
            "layers": 1 + max((layer for layer, _ in pool.table.names), default=-1),
            "bytes_per_slot": bytes_per_slot,
            "resident_bytes": guard.resident_bytes,
            "checks": list(guard.checks),
            "mode": mode,
        },
    )
