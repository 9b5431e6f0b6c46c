"""A violation: one frozen record. The log line, the JSON line and the report are renderings of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from ..kernels import record as r
from .cause import guess_cause

CHECK_OF_KIND = {
    r.Kind.ROW_RANGE: "chain",
    r.Kind.SLOT_RANGE: "chain",
    r.Kind.DEAD_SLOT: "chain",
    r.Kind.POSITION: "chain",
    r.Kind.LINK: "chain",
    r.Kind.END_POINT: "chain",
    r.Kind.WRITE_RANGE: "chain",
    r.Kind.CONTENT: "content",
    r.Kind.DRAFT_PATH: "chain",
    r.Kind.NOT_STORED: "presence",
    r.Kind.UNORDERED_FORWARD: "order",
    r.Kind.UNORDERED_BATCH: "order",
}


@dataclass(frozen=True, slots=True)
class Writer:
    """Who stored a slot last: the step and request row of its forward, and the request if it is still remembered."""

    step: int
    row: int
    request: str | None


@dataclass(frozen=True, slots=True)
class Violation:
    """One damaged slot seen by one check. Hashes are unsigned 64-bit; None means not applicable or not known."""

    check: str
    kind: str
    pool: str
    rank: int
    step: int
    # read: a forward was about to read it; start: prefix of a new request; scrub: rotating pass; write;
    # alloc, free, insert: what the allocator or the radix tree was asked for ahead of the forward
    # load: it has come back from host memory; host: what the host pool was asked for
    # arrival: it has come from a prefill server
    phase: str
    slot: int
    page: int | None = None
    position: int | None = None
    request: str | None = None
    request_row: int | None = None
    stored_token: int | None = None
    expected_token: int | None = None
    stored_position: int | None = None
    stored_hash: int | None = None
    expected_hash: int | None = None
    layer: int | None = None
    half: str | None = None
    writer: Writer | None = None
    differs: tuple[tuple[str, str, str], ...] = ()  # tag, expected and found value of each identity field that differs
    state: str | None = None  # of the slot, where its ownership is in question
    owner: str | None = None  # request that holds the slot, or held it last
    owner_row: int | None = None
    owner_since: int | None = None
    neighbours: str = ""  # states of the slots around it
    evidence: tuple[str, ...] = ()  # what led there, one clause each
    tier: str = "device"  # where the damage was found or made: device, host
    hop: str | None = None  # on which way the bytes went wrong, as far as that is known
    last_good: str | None = None  # where and when they were right for the last time
    host_slot: int | None = None  # from which they came

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two violations the same damage: one report each, then counted."""
        # The step and row of the writer, because its name is forgotten after a while.
        writer = (self.writer.step, self.writer.row) if self.writer else None
        damage = (self.check, self.pool, self.rank, self.slot)
        if self.kind in ("row_range", "slot_range", "write_range", "unmapped"):
            return (*damage, self.request)  # there is no slot: it is the row of that request which is damaged
        if self.check == "chain":
            return (*damage, self.kind, self.position, writer)
        if self.kind in ("foreign_slot", "freed_slot"):
            # A row that names slots of somebody else does so for a stretch: one fault, however many entries.
            return (self.check, self.kind, self.pool, self.rank, self.request, self.owner)
        if self.check == "ownership":
            return (*damage, self.kind, self.request)
        if self.check == "identity":
            return (self.check, self.kind, self.pool, self.rank, self.request, self.differs)
        if self.check == "presence":
            # A layer that is not stored is one fault, however many tokens it concerns.
            return (self.check, self.pool, self.rank, self.layer, self.half, self.request)
        if self.host_slot is not None:  # it may be loaded again and again, each time to another slot
            return (self.check, self.pool, self.rank, self.tier, self.host_slot, self.hop, writer)
        return (*damage, writer)

    @property
    def title(self) -> str:
        """Check and kind, once where they are the same word."""
        return self.check if self.kind == self.check else f"{self.check}/{self.kind}"

    @property
    def explanation(self) -> str:
        """One sentence."""
        return EXPLANATIONS[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; hashes as 16 hex digits, because JSON numbers lose 64-bit integers."""
        fields = dataclasses.asdict(self)
        fields["cause"], fields["evidence"] = guess_cause(self)
        for name in ("stored_hash", "expected_hash"):
            if fields[name] is not None:
                fields[name] = f"{fields[name]:016x}"
        return fields


EXPLANATIONS: Final = {
    "double_alloc": "the allocator gave out a slot that another request or the radix tree holds",
    "double_free": "a free slot was freed once more, so the allocator will give it out twice",
    "free_in_use": "a slot was freed that the row of a running request names",
    "free_in_tree": "a slot was freed that the radix tree holds, and not by the radix tree",
    "free_in_flight": "a slot was freed that a transfer uses",
    "reused_in_flight": "the allocator gave out a slot that a transfer between two servers still uses",
    "host_free_in_flight": "a host slot was freed that a transfer uses",
    "host_double_free": "a host slot was freed that is not given out",
    "host_slot_free": "a transfer uses a host slot that is not given out",
    "host_slot_empty": "a host slot was loaded to which nothing was ever copied",
    "insert_not_owned": "the radix tree took a slot that is free, another request's, or in the tree already",
    "write_not_owned": "the forward is to store to a slot that its request does not own",
    "write_twice": "the forward is to store two tokens to one slot",
    "foreign_slot": "the row names a slot that another request owns",
    "freed_slot": "the row names a slot that was freed, or never given out",
    "quarantined_slot": "the row names a slot that was taken out of circulation",
    "trimmed_slot": "the row names a slot within the sliding window whose window part was freed",
    "delta_range": "the allocator or the radix tree handled a slot outside the pool",
    "row_range": "the batch names a request row that does not exist",
    "slot_range": "the row names a slot outside the pool",
    "unmapped": "the position lies within the window, but its window slot is gone",
    "dead_slot": "the row names a slot that holds no live token (never written, or freed since)",
    "position": "the slot holds a token of another position",
    "link": "the slot holds another token, or a token of another prefix",
    "link_behind": "the slot is intact, but the slots before it hold another prefix",
    "end_point": "the slots hold a prefix that is consistent in itself but belongs to another request",
    "write_range": "the forward stores to a slot outside the pool",
    "other_identity": "the slots hold this prefix, but it was made for something else",
    "mixed_weights": "the weights were updated while the request was running: its KV is of several versions",
    "not_stored": "the forward left this row as it was: nothing was stored for this token",
    "partly_stored": "the forward stored only a part of this row",
    "unordered_forward": "the forward ran before the one ahead of it had ended, for which it did not wait",
    "unordered_batch": "the forward ran before the scheduler's stream had come to it, for which it did not wait",
    "unordered_load": "the forward used a layer that was still on its way from host memory",
    "unordered_backup": "a row was copied to host memory before the forward that stores it had ended",
    "state": "the state of the request is not what its last forward left",
    "content": "the bytes of the slot are not the ones that were written",
}
