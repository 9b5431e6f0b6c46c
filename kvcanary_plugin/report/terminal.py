"""The report as text: counts first, then a block for each finding."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import server_facts, tell_cut, verdict
from .format import show_counts, show_many, show_time
from .layout import lay_out
from .summary import Server, Summary
from .text import quote_clause, render_block

MAX_LISTED = 16


def render_text(summary: Summary, top: int) -> Iterator[str]:
    """The report in pieces of one or several lines; ``top`` findings get a block, all of them if it is 0."""
    yield f"kvcanary report: {'; '.join(verdict(summary))}"
    yield from _render_files(summary)
    if summary.event_count == 0:
        return
    yield ""
    yield from _render_counts(summary)
    for server in summary.servers:
        yield ""
        yield from render_server(server)
    shown = summary.findings[:top] if top else summary.findings
    for finding in shown:
        yield ""
        yield render_block(lay_out(finding))
    if rest := len(summary.findings) - len(shown):
        yield f"{rest} more finding{'' if rest == 1 else 's'}: --top 0 shows all, --json lists them"
    if summary.kept_out:
        yield f"{summary.kept_out} more reports of damage are counted above, and too many to be kept apart"
    yield ""
    yield (
        f"SUMMARY: kvcanary report: findings={len(summary.findings)} reports={summary.violation_count} "
        f"drills={summary.drill_count} hidden={summary.hidden_count} alarms={len(summary.alarms)} "
        f"damage={'yes' if summary.has_damage else 'no'}"
    )


def render_server(server: Server) -> Iterator[str]:
    """What is known of one process."""
    ranks = ", ".join(map(str, server.ranks))
    yield f"process {server.pid}" + (f" (rank {ranks})" if ranks else "") + f" of {quote_clause(server.path)}"
    for label, text in server_facts(server):
        yield f"  {label:<13} {text}"


def _render_files(summary: Summary) -> Iterator[str]:
    for file in summary.files:
        span = "empty"
        if file.first_time is not None and file.last_time is not None:
            span = f"{show_time(file.first_time)} to {show_time(file.last_time)} UTC"
        yield f"  {quote_clause(file.path)}: {show_many(file.event_count, 'event')}, {span}"
        if file.cut_lines:
            yield f"    {tell_cut(file)}"
    for path in summary.repeated:
        yield f"  {quote_clause(path)}: the same file once more, counted once"


def _render_counts(summary: Summary) -> Iterator[str]:
    for name in ("check", "kind", "tier", "pool", "rank"):
        if summary.counts[name]:
            yield f"  by {name:<10} {show_counts(summary.counts[name])}"
    if summary.drills:
        told = [f"{quote_clause(drill.fault)} {drill.count}" for drill in summary.drills[:MAX_LISTED]]
        yield f"  {'injected':<13} {', '.join(told)}  (drills: faults put in on purpose)"
    yield f"  {'events':<13} {show_counts(summary.events)}"
    if summary.unknown:
        yield f"  {'not read':<13} {show_counts(summary.unknown)}  (events that this version does not know)"
