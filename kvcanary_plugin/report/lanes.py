"""The lanes of the timeline: which event is drawn where, from top to bottom."""

from __future__ import annotations

from typing import Final

CHECK_LANES: Final = ("content", "presence", "chain", "ownership", "identity", "order")
OTHER_CHECKS: Final = "other checks"
STORAGE: Final = "storage tier"
HEARTBEAT: Final = "heartbeat"
PLACES_A_SECOND: Final = 100  # of the axis of the timeline

EVENT_LANES: Final = {
    "more": "not described",
    "injected": "injected",
    "quarantined": "quarantined",
    "degraded": "quarantined",
    "weights": "weights",
    "mixed_weights": "weights",
    "changed": "settings",
    "resumed": "settings",
    "released": "settings",
    "attached": "started",
    "detached": "guard lost",
    "uncovered": "guard lost",
    "stopped": "stopped",
    "heartbeat": HEARTBEAT,
}
LANES: Final = tuple(dict.fromkeys((*CHECK_LANES, OTHER_CHECKS, STORAGE, *EVENT_LANES.values())))


def lane_of(check: str, *, is_page: bool) -> str:
    """Lane of a violation that ``check`` reported, of a slot or of a page of a tier."""
    if is_page:
        return STORAGE
    return check if check in CHECK_LANES else OTHER_CHECKS
