"""A violation for people: one line for the log, and a block in the manner of a sanitizer.

What a client, or whoever forged a log, put into a text is made harmless here: it stays on its line and is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.cause import guess_cause
from ..runtime.violation import EXPLANATIONS, Violation
from ..tiers import finding as tier
from ..tiers.finding import TierViolation
from .strip import draw_strip

RULE = "=" * 78
INDENT = 16
_BY_PHASE = {
    "read": "read by",
    "start": "matched by",
    "scrub": "found by",
    "write": "written by",
    "alloc": "allocated for",
    "free": "freed for",
    "insert": "inserted for",
    "load": "loaded for",
    "backup": "copied to host memory for",
    "host": "seen for",
    "arrival": "received for",
}
MAX_ID_LENGTH = 80
MAX_CLAUSE_LENGTH = 200
MAX_CLAUSES = 32
UNKNOWN_KIND = "a kind of damage that this version does not know"


def quote(request: str) -> str:
    """A request id as it may be printed. Clients choose it: an unusual one is quoted and escaped, and length is cut."""
    if not re.fullmatch(r"[\w.:@-]+", request, re.ASCII):
        request = json.dumps(request[: MAX_ID_LENGTH + 1])
    return request if len(request) <= MAX_ID_LENGTH else request[:MAX_ID_LENGTH] + "..."


def quote_clause(clause: str) -> str:
    """A text as it may be printed within a sentence of ours: it may hold request ids, which clients choose."""
    return "".join(letter if letter.isprintable() else "?" for letter in clause[:MAX_CLAUSE_LENGTH])


def quote_name(name: str) -> str:
    """A name within quotes, as of a pool."""
    return json.dumps(name[:MAX_ID_LENGTH])


def render_place(violation: Violation) -> str:
    """Where it is, as short as it can be said."""
    place = f"slot {violation.slot}"
    if violation.page is not None:
        place += f" page {violation.page}"
    if violation.layer is not None:
        place = f"layer {violation.layer} {quote_clause(violation.half or '')} " + place
    elif violation.check == "content":
        place = "several layers " + place
    return f"{place} (pool {quote_name(violation.pool)}, rank {violation.rank})"


def render_reader(violation: Violation) -> str:
    """Who found it, doing what."""
    return " ".join(_tell_reader(violation))


def _tell_reader(violation: Violation) -> tuple[str, str]:
    by = _BY_PHASE.get(violation.phase, "seen by")
    if violation.request is None and violation.phase in ("alloc", "free", "insert", "load", "backup", "host"):
        return by, f"nobody known ahead of step {violation.step}"
    if violation.request is None:
        return by, f"the rotating pass after step {violation.step}"
    return by, f"request {quote(violation.request)} row {violation.request_row} in step {violation.step}"


def render_writer(violation: Violation) -> str:
    """Who stored the slot last."""
    if violation.writer is None:
        return "nobody"
    request = quote(violation.writer.request) if violation.writer.request else "(no longer remembered)"
    return f"request {request} row {violation.writer.row} in step {violation.writer.step}"


def render_expected_found(violation: Violation) -> tuple[str, str]:
    """The two sides that differ."""
    if violation.phase == "host":
        return "host slots that are given out, filled and used in turn", EXPLANATIONS.get(violation.kind, UNKNOWN_KIND)
    if violation.check == "order":
        return "a forward that waits for what is ahead of it", "one that did not wait"
    if violation.check == "ownership":
        holder = "nobody" if violation.owner is None else f"request {quote(violation.owner)} row {violation.owner_row}"
        return "a slot of its own", f"a slot that is {quote_clause(violation.state or 'not known')}, of {holder}"
    if violation.kind == "other_identity":
        return (
            ", ".join(f"{quote_clause(tag)} {quote(expected)}" for tag, expected, _ in violation.differs),
            ", ".join(f"{quote_clause(tag)} {quote(found)}" for tag, _, found in violation.differs),
        )
    if violation.kind == "mixed_weights" and violation.differs:
        _, expected, found = violation.differs[0]
        return f"weights {quote_clause(expected)}", f"weights {quote_clause(found)} up to the update"
    if violation.check == "presence":
        part = "a part of the row" if violation.kind == "partly_stored" else "the row"
        return "K and V of every layer stored by the forward", f"{part} as it was before"
    if violation.check == "content" and violation.expected_hash is not None and violation.stored_hash is not None:
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
    hop = "" if violation.hop is None else f" on {violation.hop} (last good {violation.last_good})"
    return (
        f"kvcanary: {quote_clause(violation.title)} in {render_place(violation)}{position}{hop}: "
        f"expected {expected}, found {found}; {render_reader(violation)}; last written by {render_writer(violation)}"
    )


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is known, under its label: lines of prose, or a drawing in letters of one width."""

    label: str
    lines: tuple[str, ...]
    is_drawing: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A violation laid out.

    Attributes:
        title: kind and place.
        explanation: what the kind means.
        facts: in the order in which they are told.
        summary: one line for grep.
    """

    title: str
    explanation: str
    facts: tuple[Fact, ...]
    summary: str


def describe(
    violation: Violation | TierViolation,
    told: tuple[str, Sequence[str]] | None = None,
    more: Sequence[Fact] = (),
) -> Block:
    """Lay a violation out.

    Args:
        violation: what was found.
        told: its likely cause and the evidence, if they were guessed already, as those in a log were.
        more: further facts, which come last.
    """
    if isinstance(violation, TierViolation):
        return _describe_page(violation, more)
    cause, evidence = guess_cause(violation) if told is None else told
    expected, found = render_expected_found(violation)
    by, reader = _tell_reader(violation)
    position = "" if violation.position is None else f", position {violation.position}"
    facts = [
        Fact(by, (reader + position,)),
        Fact("expected", (expected,)),
        Fact("found", (found,)),
        Fact("last written", (f"by {render_writer(violation)}",)),
    ]
    if violation.hop is not None:
        facts += [
            Fact("went wrong", (quote_clause(violation.hop),)),
            Fact("last good", (quote_clause(violation.last_good or "not known"),)),
        ]
    if violation.owner is not None and violation.owner_since is not None:
        holder = f"request {quote(violation.owner)}, on row {violation.owner_row} since step {violation.owner_since}"
        facts.append(Fact("held by", (holder,)))
    clauses = tuple(f"- {quote_clause(clause)}" for clause in evidence[:MAX_CLAUSES])
    facts.append(Fact("likely cause", (quote_clause(cause), *clauses)))
    if violation.neighbours:
        facts.append(Fact("around it", draw_strip(violation.neighbours, violation.slot), is_drawing=True))
    title = quote_clause(violation.title)
    return Block(
        title=f"{title} in {render_place(violation)}",
        explanation=EXPLANATIONS.get(violation.kind, UNKNOWN_KIND),
        facts=(*facts, *more),
        summary=f"{title} {_name_pool(violation.pool)} slot={violation.slot}"
        + ("" if violation.layer is None else f" layer={violation.layer} half={quote_clause(violation.half or '')}")
        + ("" if violation.position is None else f" position={violation.position}"),
    )


def _describe_page(violation: TierViolation, more: Sequence[Fact]) -> Block:
    check = tier.CHECK_OF_KIND.get(violation.kind)
    title = quote_clause(violation.kind if check is None else f"{check}/{violation.kind}")
    page, hop = quote(violation.page_key), quote_clause(violation.hop)
    facts = (
        Fact("page", (page,)),
        Fact("kept in", (quote_clause(violation.place),)),
        Fact("went wrong", (hop,)),
        Fact("last good", (quote_clause(violation.last_good),)),
    )
    return Block(
        title=f"{title} on {hop} of page {page} (pool {quote_name(violation.pool)}, rank {violation.rank})",
        explanation=tier.EXPLANATIONS.get(violation.kind, UNKNOWN_KIND),
        facts=(*facts, *more),
        summary=f"{title} {_name_pool(violation.pool)} tier={quote(violation.tier)} page={page}",
    )


def _name_pool(pool: str) -> str:
    return pool if re.fullmatch(r"[\w./:@-]{1,80}", pool, re.ASCII) else quote_name(pool)


def render_block(violation: Violation | Block) -> str:
    """A framed block: kind and place, who reads, what was expected and found, who wrote, one line for grep."""
    block = violation if isinstance(violation, Block) else describe(violation)
    lines = [RULE, f"KVCANARY: {block.title}", f"  {block.explanation}"]
    for fact in block.facts:
        for index, line in enumerate(fact.lines):
            label = fact.label if index == 0 else ""
            lines.append(f"  {label:<{INDENT - 3}} {line}")
    return "\n".join((*lines, f"SUMMARY: kvcanary: {block.summary}", RULE))
