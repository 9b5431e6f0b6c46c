"""The most likely class of fault behind a violation, in words, with what speaks for it. A guess, and said as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .violation import Violation

TO_HOST = "L1 device -> L2 host, or in L2 host"
TO_DEVICE = "L2 host -> L1 device"
BEFORE_STORAGE = "L1 device -> L2 host -> L3 storage, or in L2 host since it came back"
ROUND_TRIP = "L1 device -> L2 host -> L1 device"

_BY_KIND = {
    "row_range": "the scheduler or a kernel wrote garbage into the batch: the row does not exist",
    "slot_range": "the row was overwritten with garbage, or was never filled at this position",
    "write_range": "the forward was given garbage for its slots: a wrong allocation, or padding taken for tokens",
    "unmapped": "the part of a slot that the window still needs was freed too early",
    "end_point": "the row points at the prefix of another request: a stale row, or a cache match under a wrong key",
    "link_behind": "what lies before this slot is wrong; the slot itself is intact",
    "other_identity": "KV was reused across a boundary that its key does not carry",
    "mixed_weights": "the weights were updated in place under a running request, as was asked for",
    "not_stored": "a layer skipped its store, or stored somewhere else",
    "partly_stored": "a kernel stored a part of the row only: some heads, or a wrong row width",
    "state": "something wrote to the state of the request between two of its forwards",
    "double_alloc": "a slot was freed twice, or while it was in use, and given out again",
    "double_free": "two paths free the same slots: an abort or retraction beside the normal end",
    "free_in_use": "a release that counts too many tokens, or came too early",
    "free_in_tree": "a request freed what it had already handed to the prefix cache",
    "free_in_flight": "a slot was freed while a transfer still used it",
    "reused_in_flight": "a transfer was given up, and its slots went on before the other server had let go of them",
    "host_free_in_flight": "host memory was given back while it was still being read or written",
    "host_double_free": "two paths free the same host slots",
    "host_slot_free": "a node of the prefix cache names host slots that it has given back",
    "host_slot_empty": "a node of the prefix cache names host slots that were never filled, or were given out anew",
    "insert_not_owned": "the prefix cache took slots that were freed or belong to somebody else",
    "write_not_owned": "the forward stores by a stale allocation, or a dummy batch stores for real",
    "write_twice": "the batch was built with the same slot twice",
    "foreign_slot": "the row was filled from another request's slots",
    "freed_slot": "the row kept an entry of a slot that was freed",
    "quarantined_slot": "a slot was handed on that had been taken out of circulation",
    "trimmed_slot": "the part of a slot that the window still needs was freed too early",
    "unordered_forward": "forwards were launched on several streams without a wait between them",
    "unordered_batch": "the wait of the forward's stream for the scheduler's was dropped",
    "unordered_load": "the wait for a layer that is loaded was dropped, or its event stood for another load",
    "unordered_backup": "a copy to host memory did not wait for the forward that stores the rows",
    "draft_path": "the rows of the accepted draft tokens were not moved to their places, or the wrong ones were",
    "delta_range": "the allocator or the prefix cache handled a slot id that does not exist",
}


def guess_cause(violation: Violation) -> tuple[str, tuple[str, ...]]:
    """What most likely happened, and the evidence for it, one clause each."""
    if violation.kind == "dead_slot":
        return _dead(violation)
    if violation.kind in ("position", "link"):
        return _foreign(violation)
    if violation.kind == "content":
        return _content(violation) if violation.hop is None else _travelled(violation)
    return _BY_KIND.get(violation.kind, "not known"), violation.evidence


def _dead(violation: Violation) -> tuple[str, tuple[str, ...]]:
    if violation.writer is None:
        return "the row names a slot that nobody ever stored to: an entry that was never filled", violation.evidence
    writer = f"last stored in step {violation.writer.step}, not live since"
    if violation.writer.request == violation.request:
        return "the slot was freed while its own request still reads it", (writer, *violation.evidence)
    return "the row names a slot that another request left behind", (writer, *violation.evidence)


def _foreign(violation: Violation) -> tuple[str, tuple[str, ...]]:
    writer = violation.writer
    if writer is None or violation.request is None:
        return "the row names a slot of somebody else", violation.evidence
    if writer.request == violation.request:
        return "entries of the row were exchanged or shifted: the slot holds another token of this request", (
            f"it holds position {violation.stored_position}, stored by this request in step {writer.step}",
            *violation.evidence,
        )
    return "the slot went to another request, or the row was filled from another's", (
        f"it holds position {violation.stored_position} of another request, stored in step {writer.step}",
        *violation.evidence,
    )


def _travelled(violation: Violation) -> tuple[str, tuple[str, ...]]:
    cause = {
        TO_DEVICE: "the copy to the device was not complete, went to the wrong slot, or was overtaken by another store",
        BEFORE_STORAGE: "the row was damaged before it was stored, or in host memory after it came back",
        TO_HOST: "the row was copied before it was complete, or host memory was overwritten",
    }.get(violation.hop or "", "the row was changed in host memory, or on the way there or back")
    where = () if violation.layer is None else (f"only {violation.half} of layer {violation.layer} differs",)
    return cause, (f"it came from host slot {violation.host_slot}", *where, *violation.evidence)


def _content(violation: Violation) -> tuple[str, tuple[str, ...]]:
    record = "the record of the slot is intact, so no guarded forward stored there"
    if violation.layer is None:
        return "the slot was overwritten in several layers: a stray store, or a copy to the wrong slot", (
            record,
            *violation.evidence,
        )
    return "a flipped bit, or a stray write into one part of one layer", (
        record,
        f"only {violation.half} of layer {violation.layer} differs",
        *violation.evidence,
    )
