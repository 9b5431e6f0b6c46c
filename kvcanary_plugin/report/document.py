"""The report for programs: one JSON document with a schema of its own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from .. import __version__
from ..runtime.violation import Violation
from .events import HASHES
from .layout import lay_out, name_tier
from .summary import Finding, Server, Summary

SCHEMA = 1


def make_document(summary: Summary) -> str:
    """JSON in ASCII: whatever stands in a log, nothing in it can be taken for a control sequence."""
    document = {
        "schema": SCHEMA,
        "kvcanary": __version__,
        "damage": summary.has_damage,
        "first_time": summary.first_time,
        "last_time": summary.last_time,
        "files": [dataclasses.asdict(file) for file in summary.files],
        "repeated_files": summary.repeated,
        "events": summary.events,
        "unknown_events": summary.unknown,
        "reports": summary.violation_count,
        "drill_reports": summary.drill_count,
        "hidden": summary.hidden_count,
        "kept_out": summary.kept_out,
        "counts": summary.counts,
        "drills": [dataclasses.asdict(drill) for drill in summary.drills],
        "servers": [_describe_server(server) for server in summary.servers],
        "findings": [_describe_finding(finding) for finding in summary.findings],
    }
    return json.dumps(document, indent=2)


def _describe_server(server: Server) -> dict[str, Any]:
    return {**dataclasses.asdict(server), "ranks": server.ranks, "heartbeat_age": server.heartbeat_age}


def _describe_finding(finding: Finding) -> dict[str, Any]:
    block, violation = lay_out(finding), finding.found.violation
    fields = dataclasses.asdict(violation)
    if isinstance(violation, Violation):
        for name in HASHES:
            fields[name] = None if fields[name] is None else f"{fields[name]:016x}"
    told = {fact.label: list(fact.lines) for fact in block.facts}
    cause = told.get("likely cause", [""])[0]
    return {
        "title": block.title,
        "summary": block.summary,
        "explanation": block.explanation,
        "check": finding.found.check,
        "tier": name_tier(violation),
        "count": finding.count,
        "first_time": finding.first_time,
        "last_time": finding.last_time,
        "ranks": finding.ranks,
        "pids": finding.pids,
        "slots": finding.slots,
        "slot_count": finding.slot_count,
        "pages": [{"page_key": key, "place": place} for key, place in finding.page_keys],
        "page_count": finding.page_count,
        "drill": None if finding.drill is None else dataclasses.asdict(finding.drill),
        "cause": cause or None,
        "actions": finding.actions,
        "bytes": finding.bytes_elsewhere or None,
        "facts": told,
        "violation": fields,
    }
