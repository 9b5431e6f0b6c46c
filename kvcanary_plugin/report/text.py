"""A violation for people: one line for the log, and a block in the manner of a sanitizer."""

from __future__ import annotations

import json
import re

from ..runtime.cause import guess_cause
from ..runtime.violation import Violation

RULE = "=" * 78
_BY_PHASE = {
    "read": "read by",
    "start": "matched by",
    "scrub": "found by",
    "write": "written by",
    "alloc": "allocated for",
    "free": "freed for",
    "insert": "inserted for",
}
MAX_ID_LENGTH = 80
MAX_CLAUSE_LENGTH = 200


def quote(request: str) -> str:
    """A request id as it may be printed. Clients choose it: an unusual one is quoted and escaped, and length is cut."""
    if not re.fullmatch(r"[\w.:@-]+", request, re.ASCII):
        request = json.dumps(request)
    return request if len(request) <= MAX_ID_LENGTH else request[:MAX_ID_LENGTH] + "..."


def render_place(violation: Violation) -> str:
    """Where it is, as short as it can be said."""
    place = f"slot {violation.slot}"
    if violation.page is not None:
        place += f" page {violation.page}"
    if violation.layer is not None:
        place = f"layer {violation.layer} {violation.half} " + place
    elif violation.check == "content":
        place = "several layers " + place
    return f'{place} (pool "{violation.pool}", rank {violation.rank})'


def render_reader(violation: Violation) -> str:
    """Who found it, doing what."""
    by = _BY_PHASE[violation.phase]
    if violation.request is None and violation.phase in ("alloc", "free", "insert"):
        return f"{by} nobody known ahead of step {violation.step}"
    if violation.request is None:
        return f"{by} the rotating pass after step {violation.step}"
    return f"{by} request {quote(violation.request)} row {violation.request_row} in step {violation.step}"


def render_writer(violation: Violation) -> str:
    """Who stored the slot last."""
    if violation.writer is None:
        return "nobody"
    request = quote(violation.writer.request) if violation.writer.request else "(no longer remembered)"
    return f"request {request} row {violation.writer.row} in step {violation.writer.step}"


def render_expected_found(violation: Violation) -> tuple[str, str]:
    """The two sides that differ."""
    if violation.check == "ownership":
        holder = "nobody" if violation.owner is None else f"request {quote(violation.owner)} row {violation.owner_row}"
        return "a slot of its own", f"a slot that is {violation.state}, of {holder}"
    if violation.kind == "other_identity":
        return (
            ", ".join(f"{tag} {quote(expected)}" for tag, expected, _ in violation.differs),
            ", ".join(f"{tag} {quote(found)}" for tag, _, found in violation.differs),
        )
    if violation.kind == "mixed_weights":
        return f"weights {violation.differs[0][1]}", f"weights {violation.differs[0][2]} up to the update"
    if violation.check == "presence":
        return "K and V of every layer stored by the forward", {
            "not_stored": "the row as it was before",
            "partly_stored": "a part of the row as it was before",
        }[violation.kind]
    if violation.check == "content":
        return f"digest {violation.expected_hash:016x}", f"digest {violation.stored_hash:016x}"
    if violation.kind == "link_behind":
        return "this request's prefix in the slots before it", "another one"
    if violation.stored_position is None:
        return "a slot of the pool", f"slot {violation.slot}"
    expected, found = f"position {violation.position}", f"position {violation.stored_position}"
    if violation.expected_token is not None:
        expected = f"token {violation.expected_token} " + expected
    if violation.stored_token is not None:
        found = f"token {violation.stored_token} " + found
    if violation.expected_hash is not None and violation.stored_hash is not None:
        expected += f" chain {violation.expected_hash:016x}"
        found += f" chain {violation.stored_hash:016x}"
    return expected, found


def render_line(violation: Violation) -> str:
    """Everything on one line, the kind and place first, made for grep."""
    expected, found = render_expected_found(violation)
    position = "" if violation.position is None else f" position {violation.position}"
    return (
        f"kvcanary: {violation.title} in {render_place(violation)}{position}: "
        f"expected {expected}, found {found}; {render_reader(violation)}; last written by {render_writer(violation)}"
    )


def _render_cause(violation: Violation) -> list[str]:
    cause, evidence = guess_cause(violation)
    lines = [f"  likely cause  {cause}"]
    lines += [f"                - {quote_clause(clause)}" for clause in evidence]
    if violation.neighbours:
        lines.append(f"  around it     {violation.neighbours}  (. free, o owned, c cached, q quarantined)")
    return lines


def quote_clause(clause: str) -> str:
    """A clause of evidence as it may be printed: it may hold request ids, which clients choose."""
    return "".join(letter if letter.isprintable() else "?" for letter in clause)[:MAX_CLAUSE_LENGTH]


def render_block(violation: Violation) -> str:
    """A framed block: kind and place, who reads, what was expected and found, who wrote, one line for grep."""
    expected, found = render_expected_found(violation)
    return "\n".join(
        (
            RULE,
            f"KVCANARY: {violation.title} in {render_place(violation)}",
            f"  {violation.explanation}",
            f"  {render_reader(violation)}"
            + ("" if violation.position is None else f", position {violation.position}"),
            f"  expected      {expected}",
            f"  found         {found}",
            f"  last written  by {render_writer(violation)}",
            *_render_cause(violation),
            f"SUMMARY: kvcanary: {violation.title} {violation.pool} slot={violation.slot}"
            + ("" if violation.layer is None else f" layer={violation.layer} half={violation.half}")
            + ("" if violation.position is None else f" position={violation.position}"),
            RULE,
        )
    )
