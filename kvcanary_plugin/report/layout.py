"""The block of a finding: its first report, as every violation is told, and what the logs say beyond it."""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.violation import Violation
from ..tiers.finding import TierViolation
from .format import show_slots, show_time
from .summary import Finding
from .text import Block, Fact, describe, quote, quote_clause, render_writer

MAX_LISTED = 5
TIERS = {"device": "L1 device", "host": "L2 host", "storage": "L3 storage"}


def name_tier(violation: Violation | TierViolation) -> str:
    """The tier on which a violation was found."""
    return TIERS.get(violation.tier, violation.tier)


def lay_out(finding: Finding) -> Block:
    """The block of a finding: its first report, and what the logs say beyond it."""
    found = finding.found
    told = None if found.cause is None else (found.cause, found.evidence)
    more = [Fact("tier", (quote_clause(name_tier(found.violation)),))]
    if last_good := _tell_last_good(found.violation):
        more.append(Fact("last good", (last_good,)))
    if finding.bytes_elsewhere:
        more.append(Fact("bytes", (finding.bytes_elsewhere,)))
    if finding.drill is not None:
        drill = finding.drill
        within = f", to be found within {drill.bound_forwards} forwards" if drill.bound_forwards else ""
        more.append(Fact("drill", (f"injected on purpose: {quote_clause(drill.fault)} in step {drill.step}{within}",)))
    more.append(Fact("done", finding.actions))
    more.append(Fact("seen", tuple(_tell_seen(finding))))
    block = describe(found.violation, told, more)
    if finding.drill is None:
        return block
    return Block(f"[drill] {block.title}", block.explanation, block.facts, f"{block.summary} drill")


def _tell_seen(finding: Finding) -> Iterator[str]:
    times = f"at {show_time(finding.first_time)} UTC"
    if finding.count > 1:
        times = f"{finding.count} reports from {show_time(finding.first_time)} to {show_time(finding.last_time)} UTC"
    yield f"{times}, rank {show_slots(finding.ranks)}, process {', '.join(map(str, finding.pids[:MAX_LISTED]))}"
    if finding.slot_count > 1:
        yield f"in {finding.slot_count} slots: {show_slots(finding.slots)}"
    if finding.page_count > 1:
        places = [f"{quote(key)} ({quote_clause(place)})" for key, place in finding.page_keys[1:MAX_LISTED]]
        yield f"in {finding.page_count} pages; also {', '.join(places)}" + (
            ", ..." if finding.page_count > MAX_LISTED else ""
        )


def _tell_last_good(violation: Violation | TierViolation) -> str:
    """Where the bytes of a slot were right for the last time; empty where bytes are not the matter, or it was said."""
    if isinstance(violation, TierViolation) or violation.hop is not None:
        return ""
    if violation.check == "content":
        return f"on the device, as stored by {render_writer(violation)}: its digest was taken right behind that"
    return "never: the forward did not store it" if violation.check == "presence" else ""
