"""What is known of servers and files, in words: the same for text and page."""

from __future__ import annotations

from collections.abc import Iterator

from .format import show_duration, show_many, show_time
from .server import GAP_SECONDS
from .summary import LogFile, Server, Summary
from .text import quote, quote_clause, quote_name

MAX_LISTED = 8


def verdict(summary: Summary) -> tuple[str, ...]:
    """Whether damage is recorded, and how much: what matters most comes first."""
    if summary.event_count == 0:
        return ("no events: the log is empty, so nothing is known of any server",)
    parts = []
    if real := summary.violation_count - summary.drill_count:
        kinds = sum(finding.drill is None for finding in summary.findings)
        parts.append(f"DAMAGE: {show_many(kinds, 'finding')} in {show_many(real, 'report')}")
    elif summary.has_damage and not summary.drill_count and not summary.hidden_count:
        parts.append("DAMAGE, but the log does not hold the reports of it: was it rotated?")
    for event, what in (("detached", "GUARD LOST in"), ("stopped", "stopped by mode raise:")):
        if count := sum(ended.event == event for _, ended in summary.alarms):
            parts.append(f"{what} {count} process{'' if count == 1 else 'es'}")
    if summary.hidden_count:
        parts.append(f"{show_many(summary.hidden_count, 'violation')} counted and not described")
    if summary.drill_count:
        parts.append(f"{show_many(summary.drill_count, 'report')} of faults injected on purpose")
        parts += ["nothing beyond them"] if len(parts) == 1 else []
    return tuple(parts) or ("no damage recorded",)


def server_facts(server: Server) -> Iterator[tuple[str, str]]:
    """What is known of one process: labels and sentences."""
    yield "from, to", f"{show_time(server.first_time)} to {show_time(server.last_time)} UTC"
    for pool in server.attached:
        checks = quote_clause("+".join(pool.checks)) or "none"
        size = f"{pool.slots} slots of {pool.bytes_per_slot} bytes"
        size += f" in pages of {pool.page_size}" if pool.page_size > 1 else ""
        yield "guarding", f"pool {quote_name(pool.pool)}: {size}, checks {checks}, mode {quote_clause(pool.mode)}"
    if not server.attached:
        yield "guarding", "not known: the log has no event 'attached' of this process"
    if server.mode is not None and (not server.attached or server.mode != server.attached[-1].mode):
        yield "mode at the end", quote_clause(server.mode)
    yield from _tell_heartbeat(server)
    yield from _tell_containment(server)
    for ended in server.endings:
        yield ended.event.upper(), f"at {show_time(ended.time)} UTC: {quote_clause(ended.why)}"


def _tell_heartbeat(server: Server) -> Iterator[tuple[str, str]]:
    beat = server.heartbeat
    if beat is None or server.heartbeat_time is None:
        yield "heartbeat", "none; the first is due 30 seconds after the start"
        return
    age = server.heartbeat_age or 0.0
    late = ": SILENT since" if age > GAP_SECONDS else ""
    state = f", state {quote_clause(beat.state)}" if beat.state else ""
    last = f"last at {show_time(server.heartbeat_time)} UTC, {show_duration(age)} before the log ends"
    yield "heartbeat", f"{last}{late}{state}"
    slots = f"{beat.verified:,} slots verified, {beat.stored:,} stored, {beat.folded:,} gone over"
    yield "looked at", f"{show_many(beat.forwards, 'forward')}: {slots}"
    if beat.oldest_unverified_seconds is not None:
        pace = "" if beat.period_seconds is None else f"; one takes about {show_duration(beat.period_seconds)}"
        oldest = show_duration(beat.oldest_unverified_seconds)
        yield "oldest slot", f"last looked at {oldest} before that; passes done: {beat.passes or 0}{pace}"
    if server.gaps:
        spans = [
            f"{show_time(first)} to {show_time(last, with_date=False)}" for first, last in server.gaps[:MAX_LISTED]
        ]
        yield "gaps", f"{show_many(len(server.gaps), 'gap')} between heartbeats: {', '.join(spans)}"


def _tell_containment(server: Server) -> Iterator[tuple[str, str]]:
    if server.containment is not None:
        totals = server.containment
        refused = f" ({totals.refused_slots} more could not be)" if totals.refused_slots else ""
        lifted = f", {server.lifted_slots} back since flushes" if server.lifted_slots else ""
        yield (
            "quarantine",
            f"{quote_clause(totals.state)}: {totals.withheld_slots} slots withheld{refused}{lifted}, "
            f"{show_many(totals.ended_total, 'request')} ended, prefixes tainted: {totals.tainted_points}",
        )
    for number, (time, change) in enumerate(server.changes):
        if not number and server.change_count > len(server.changes):
            yield "changed", f"{server.change_count - len(server.changes)} times before"
        budget = "" if change.scrub_budget is None else f", budget {change.scrub_budget:g}"
        checks = "" if change.checks is None else f", checks {quote_clause('+'.join(change.checks))}"
        asked = ", an audit was asked for" if change.audit else ""
        state = f"{quote_clause(change.state)}, mode {quote_clause(change.mode)}"
        yield "changed", f"{show_time(time)}: {state}{checks}{budget}{asked}"
    if server.weights is not None:
        last = server.weights
        cache = "flushed" if last.flushed else "not flushed"
        yield (
            "weights",
            f"{show_many(server.weights_count, 'update')}, the last to {quote(last.version)}: cache {cache}, "
            f"{last.older_slots} slots of older versions; {server.mixed_count} requests ran through updates",
        )


def tell_cut(file: LogFile) -> str:
    """What incomplete lines mean."""
    where = (
        f"line {', '.join(map(str, file.cut_lines[:MAX_LISTED]))}{', ...' if len(file.cut_lines) > MAX_LISTED else ''}"
    )
    end = "; the last line: a crash, or a server that writes just now" if file.is_cut_at_end else ": a crash"
    return f"{where} incomplete and left out{end}"


def find_gaps(summary: Summary) -> list[tuple[int, float, float]]:
    """Process and span of each time that it was silent, the one at the end included."""
    gaps = [(server.pid, *gap) for server in summary.servers for gap in server.gaps]
    for server in summary.servers:
        if server.heartbeat_time is not None and (server.heartbeat_age or 0.0) > GAP_SECONDS:
            gaps.append((server.pid, server.heartbeat_time, server.log_end))
    return gaps
