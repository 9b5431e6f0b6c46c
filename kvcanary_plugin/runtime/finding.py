"""What a violation means for those who read the slot, in five words that ranks can exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..kernels import record as r
from ..kernels.mixing import POSITION_SHIFT, as_int64
from .taint import Point
from .truth import Request, true_chains
from .violation import Violation

if TYPE_CHECKING:
    from .guard import Guard

CHECKS = ("chain", "content", "presence", "ownership", "identity", "order")  # by number: the order must not change
# The bytes of the slot are wrong for whoever reads it. Elsewhere it is the row of one request that is wrong.
_SPOILING = ("content", "presence", "ownership", "order")
# Something is wrong with the slot or with whoever handed it out. Elsewhere it was made for something else.
_WITHHELD = ("chain", "content", "presence", "ownership")
# Kinds of the above in which a row names good slots of others, often many of them.
ROW_FAULTS = ("foreign_slot", "freed_slot", "quarantined_slot", "trimmed_slot")
_SPOILED, _TAINTED, _WITHHOLD, _EVERYWHERE = 1, 2, 4, 8


class Finding(NamedTuple):
    """One piece of damage.

    Attributes:
        slot: of the main space, -1 if it is not known there.
        position, chain: the point of the prefix that is tainted by it, the chain as int64; -1 and 0 for none.
        flags: see the properties.
        check: number of the check.
    """

    slot: int
    position: int
    chain: int
    flags: int
    check: int

    @property
    def is_spoiled(self) -> bool:
        """Whoever holds the slot reads wrong KV."""
        return bool(self.flags & _SPOILED)

    @property
    def is_tainted(self) -> bool:
        """No prefix that passes the point may be reused."""
        return bool(self.flags & _TAINTED)

    @property
    def is_withheld(self) -> bool:
        """The slot is not to be handed out again."""
        return bool(self.flags & _WITHHOLD)

    @property
    def is_everywhere(self) -> bool:
        """Nobody knows whose prefix is damaged."""
        return bool(self.flags & _EVERYWHERE)

    @property
    def point(self) -> Point:
        """What is tainted."""
        return self.position, self.chain & ((1 << 64) - 1)


NOWHERE = Finding(-1, -1, 0, _EVERYWHERE, 0)


class Finder:
    """Makes findings of the violations in one pool."""

    def __init__(self, guard: Guard) -> None:
        self._pool = guard.pool
        self._spaces = {space.title: space for space in guard.spaces}
        self._records = guard.records
        self._truth = guard.truth

    def find(self, violation: Violation, request: Request | None) -> Finding:
        """What follows from ``violation``, which names ``request`` if it names one. May wait for the device."""
        check = CHECKS.index(violation.check)
        space = self._spaces.get(violation.pool)
        slot = -1 if space is None else space.main_slot_of(violation.slot)
        if not self._records.first_slot <= slot < self._pool.slot_count:
            slot = -1
        flags, point = 0, None
        if slot >= 0 and violation.kind not in ROW_FAULTS:
            flags |= _WITHHOLD if violation.check in _WITHHELD else 0
            flags |= _SPOILED if violation.check in _SPOILING else 0
        if request is not None:
            point = self._point_of(request, violation.position)
        elif slot >= 0:
            point = self._point_in(slot, violation.stored_position)
            if point is None:
                flags &= ~_SPOILED  # freed or written anew since: nobody reads what was damaged
        elif violation.tier == "device":  # what is wrong in host memory is found again where it is loaded
            flags |= _EVERYWHERE
        if point is None:
            return Finding(slot, -1, 0, flags, check)
        return Finding(slot, point[0], as_int64(point[1]), flags | _TAINTED, check)

    def _point_of(self, request: Request, position: int | None) -> Point | None:
        """Where ``position`` is in the prefix of ``request``, as far as its tokens are known."""
        last = len(request.origin_input_ids) + len(request.output_ids) - 1
        if position is None or position < 0 or last < 0:
            return None
        position = min(position, last)
        return position, int(true_chains(request, self._truth.anchor_of(request), position + 1)[-1])

    def _point_in(self, slot: int, stored_position: int | None) -> Point | None:
        """Where the token of ``slot`` is in its prefix, from its record; None if it is another one by now."""
        chain, identity = self._records.hot[slot, [r.CHAIN, r.IDENTITY]].tolist()
        position = (identity >> POSITION_SHIFT) & r.POSITION_MASK
        return (position, chain) if identity & r.LIVE_BIT and stored_position in (None, position) else None


def describe(violation: Violation) -> str:
    """Where the damage is, for the client whose request ends."""
    place = [f"check {violation.check}"]
    if violation.layer is not None:
        place.append(f"layer {violation.layer} {violation.half}")
    if violation.slot >= 0:
        place.append(f"slot {violation.slot}")
    if violation.position is not None:
        place.append(f"position {violation.position}")
    return ", ".join(place)


def explain(why: str) -> str:
    """What a client is told, and what to do."""
    return (
        f"kvcanary: the KV cache of this request is damaged ({why}), so it was ended. Discard what it has returned and "
        "send it again: its prefix was dropped from the cache and will be computed afresh. The server's log says more."
    )
