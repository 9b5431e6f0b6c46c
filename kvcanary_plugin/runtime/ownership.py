"""What a raw row of the ownership check means: who holds the slot, who else laid hands on it, and what led there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ..kernels import ledger as g
from ..kernels import record as r
from .ledger import Ledger
from .step import Step
from .tenancy import Event, Trail
from .violation import Violation

MAX_TOLD = 32
_BY_DELTA = {g.Op.ALLOC: "alloc", g.Op.FREE: "free", g.Op.INSERT: "insert"}
_WRITES = (r.Kind.DOUBLE_ALLOC, r.Kind.WRITE_NOT_OWNED, r.Kind.WRITE_TWICE)
_DONE = {
    g.Op.ALLOC: "given out",
    g.Op.FREE: "freed",
    g.Op.INSERT: "inserted into the radix tree",
    g.Op.QUARANTINE: "quarantined",
    g.Op.HOLD: "held for a transfer",
    g.Op.LAND: "let go by a transfer",
    g.Op.TRIM: "freed for the sliding window",
    g.Op.UNTRIM: "given back to the sliding window",
    g.Op.AIM: "handed to a transfer between servers",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation of ownership, explained. None means not applicable or not known."""

    kind: str
    phase: str  # alloc, free, insert: what was called ahead of the forward; write, read: what the forward is to do
    step: int
    slot: int
    page: int | None
    position: int | None
    request: str | None  # who reads or stores, or for whom it was called
    request_row: int | None
    state: str  # of the slot, as it was found
    owner: str | None  # who holds the slot, or held it last
    owner_row: int | None
    owner_since: int | None
    neighbours: str
    evidence: tuple[str, ...]
    writer_stamp: int


def explain_rows(ledger: Ledger, step: Step, rows: Sequence[Sequence[int]], page_size: int) -> list[Finding]:
    """Findings of ``step`` from the raw rows of this check, without those that only follow from another.

    Waits for the device, and runs only when something is wrong. Of a flood, the first are told with evidence.
    """
    taken = {row[r.ROW_SLOT] for row in rows if row[r.ROW_KIND] == r.Kind.DOUBLE_ALLOC and row[r.ROW_REQUEST] >= 0}
    freed = {row[r.ROW_SLOT] for row in rows if row[r.ROW_KIND] == r.Kind.FREE_IN_USE}
    telling = [
        row
        for row in rows
        # An allocation is named with its taker, if a forward stores to the slot; a free with its victim.
        if not (row[r.ROW_KIND] == r.Kind.DOUBLE_ALLOC and row[r.ROW_REQUEST] < 0 and row[r.ROW_SLOT] in taken)
        and not (row[r.ROW_KIND] == r.Kind.FREED_SLOT and row[r.ROW_SLOT] in freed)
    ]
    trail = ledger.history.look_back() if telling else None
    return [
        _explain(ledger, step, row, page_size, trail if count < MAX_TOLD else None) for count, row in enumerate(telling)
    ]


def _explain(ledger: Ledger, step: Step, row: Sequence[int], page_size: int, trail: Trail | None) -> Finding:
    kind, slot, index = r.Kind(row[r.ROW_KIND]), row[r.ROW_SLOT], row[r.ROW_REQUEST]
    word, actor = row[g.ROW_WORD], row[g.ROW_ACTOR]
    owner, caller = ledger.tenants.find(word), ledger.tenants.find(actor)
    is_inside, forward = 0 <= slot < ledger.words.numel(), index >= 0
    phase = _BY_DELTA[g.Op(row[g.ROW_OP])] if not forward else "write" if kind in _WRITES else "read"
    evidence, neighbours = [], ""
    if is_inside and trail is not None:
        evidence = [_tell(ledger, event) for event in trail.find(slot, page_size, step.number)]
        neighbours = ledger.strip_of(slot)
        if not forward:
            evidence += _tell_taker(ledger, slot, word)
        if _is_tail(ledger, slot, word, actor, page_size):
            evidence.append("the slot lies behind the end of the request in its last page")
    if not forward and caller is None:
        evidence.append("called by the radix tree" if actor == g.TREE else "called for no request")
    sent_for = None
    if kind is r.Kind.REUSED_IN_FLIGHT and ledger.flights is not None:
        sent_for = ledger.flights.find(slot, step.number)
        evidence.insert(0, f"the transfer of {sent_for or 'a request'} may still write it, or read it to send it")
    return Finding(
        kind=kind.name.lower(),
        phase=phase,
        step=step.number,
        slot=slot,
        page=slot // page_size if page_size > 1 else None,
        position=row[r.ROW_POSITION] if forward else None,
        request=step.requests[index].rid if forward else caller.request if caller else None,
        request_row=step.rows[index] if forward else caller.row if caller else None,
        state=_name_state(word) if is_inside else "outside",
        owner=sent_for or (owner.request if owner else None),
        owner_row=owner.row if owner else None,
        owner_since=owner.step if owner else None,
        neighbours=neighbours,
        evidence=tuple(evidence),
        writer_stamp=row[r.ROW_WRITER],
    )


def _name_state(word: int) -> str:
    flags = (("in_flight", g.IN_FLIGHT | g.AIMED), ("contested", g.CONTESTED), ("trimmed", g.TRIMMED))
    return "+".join([g.state_of(word).name.lower(), *(name for name, flag in flags if word & flag)])


def _tell(ledger: Ledger, event: Event) -> str:
    tenant = ledger.tenants.find(event.actor)
    by = f" for {tenant.request} row {tenant.row}" if tenant else " by the radix tree" if event.actor == g.TREE else ""
    return f"{_DONE[event.op]}{by} ahead of step {event.step}"


def _tell_taker(ledger: Ledger, slot: int, word: int) -> list[str]:
    """Who has the slot by now, if not the owner that ``word`` names."""
    now = int(ledger.words[slot])
    taker = ledger.tenants.find(now)
    if taker is None or g.state_of(now) is g.State.FREE or now & g.OWNER_MASK == word & g.OWNER_MASK:
        return []
    return [f"by now {taker.request} row {taker.row} has it"]


def _is_tail(ledger: Ledger, slot: int, word: int, actor: int, page_size: int) -> bool:
    """Whether it is a free slot of a page that belongs to whoever reads or stores."""
    if page_size == 1 or g.state_of(word) is not g.State.FREE:
        return False
    head = int(ledger.words[slot - slot % page_size])
    return g.state_of(head) is g.State.OWNED and head & g.OWNER_MASK == actor & g.OWNER_MASK != 0


def attribute(ledger: Ledger, violations: Sequence[Violation], slot_count: int, page_size: int) -> list[Violation]:
    """The same violations, with what was done to their slots lately and the states around them.

    For slots of the main space that have no evidence yet, the first few of them. Waits for the device.
    """
    trail: Trail | None = None
    told: list[Violation] = []
    for count, violation in enumerate(violations):
        if count < MAX_TOLD and not violation.neighbours and 0 < violation.slot < slot_count:
            trail = ledger.history.look_back() if trail is None else trail
            evidence = tuple(_tell(ledger, event) for event in trail.find(violation.slot, page_size, violation.step))
            strip = ledger.strip_of(violation.slot)
            violation = dataclasses.replace(violation, neighbours=strip, evidence=evidence)
        told.append(violation)
    return told
