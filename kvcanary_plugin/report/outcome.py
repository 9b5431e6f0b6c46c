"""What became of damage, as far as the log of its server says: what was done, and whether the bytes are right."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.violation import Violation
from ..tiers.finding import TierViolation
from .format import show_slots, show_time
from .server import ServerFacts
from .text import quote_clause

_ABOUT_BYTES = ("content", "presence")


def tell_actions(
    violation: Violation | TierViolation, slots: Sequence[int], mode: str | None, server: ServerFacts
) -> tuple[str, ...]:
    """What was done about damage in ``slots``, found while ``mode`` was in force."""
    if isinstance(violation, TierViolation):
        return ("counted as a miss: the page was not served, and its prefix is computed afresh",)
    if mode is None:
        return ("not known: the log has no event 'attached' of this process, so its mode is not known",)
    if mode == "raise":
        if server.stopped is None:
            return ("mode raise: the server was to stop, but the log has no event 'stopped'",)
        return (f"the server stopped at {show_time(server.stopped.time, with_date=False)} (mode raise)",)
    if mode != "quarantine":
        return (f"nothing: mode {quote_clause(mode)} reports and serves on",)
    actions = []
    if held := [slot for slot in slots if slot in server.withheld]:
        since = show_time(min(server.withheld[slot] for slot in held), with_date=False)
        what = f"slot {held[0]}" if len(held) == 1 else f"{len(held)} slots ({show_slots(held)})"
        actions.append(f"{what} out of circulation since {since}")
    if violation.request in server.ended:
        since = show_time(server.ended[violation.request], with_date=False)
        actions.append(f"the request was ended with an error at {since}")
    return tuple(actions) or (
        "no event 'quarantined' names these slots or this request; at most 16 a minute are written",
    )


def tell_bytes(
    violation: Violation | TierViolation,
    slots: Sequence[int],
    last_time: float,
    checks: Sequence[str],
    server: ServerFacts,
    *,
    has_tier_findings: bool,
) -> str:
    """Whether the bytes behind a finding that is not about them are right; empty where the finding is about them."""
    if isinstance(violation, TierViolation) or violation.check in _ABOUT_BYTES or violation.slot < 0:
        return ""
    if "content" not in checks:
        return "not looked at: check content was not in force, or the log does not say so"
    if damaged := [slot for slot in slots if (violation.pool, slot) in server.damaged]:
        return f"damaged as well: check content reported slot {damaged[0]}"
    storage = "storage has findings of its own" if has_tier_findings else "no page of a storage tier failed either"
    if server.has_gone_over(violation.pool, last_time):
        where = "on the device" if has_tier_findings else "on every hop"
        return f"clean {where}: the pass has gone over the whole pool since, and {storage}"
    return f"no damage reported in these slots so far; the pass has not gone over the whole pool since, and {storage}"
