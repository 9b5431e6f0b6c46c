"""Which violations are the doing of a fault that was injected on purpose."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..runtime.violation import Violation
from .events import Injected

MAX_REMEMBERED = 256
_ROW_CHECKS = ("chain", "ownership")


def is_hit(injected: Injected, violation: object) -> bool:
    """Whether the check that must find a fault names a slot of it, or one of its requests where it has no slots."""
    if not isinstance(violation, Violation):
        return False
    if violation.check != injected.check or violation.step < injected.step:
        return False
    if injected.slots:
        return violation.slot in injected.slots or _is_in_stretch(injected, violation)
    place = injected.layer, injected.half
    who = {*injected.requests, injected.request} - {None}
    return (violation.layer, violation.half) == place and (violation.request in who or injected.check == "order")


def is_consequence(injected: Injected, violation: object) -> bool:
    """Whether another check saw the fault too.

    What damages a row concerns several checks: where one has to report it, others may say so as well, of the same slots
    or requests and in the same forward or the next.
    """
    if not isinstance(violation, Violation):
        return False
    is_near = 0 <= violation.step - injected.step <= 1
    if injected.check == "identity":  # all who go on from a prefix that was made anew
        return is_near and (violation.check, violation.kind) == ("chain", "link_behind")
    if violation.check not in _ROW_CHECKS or injected.check not in _ROW_CHECKS:
        return False
    who = {injected.request, injected.other} - {None}
    return is_near and (violation.slot in injected.slots or violation.request in who)


def _is_in_stretch(injected: Injected, violation: Violation) -> bool:
    """On a device the row is right again by the time its verdict is read, which then names the end of the stretch."""
    if injected.entries is None or violation.position is None or violation.request != injected.request:
        return False
    first = injected.positions[0] if injected.positions else 0
    return first <= violation.position < first + injected.entries


@dataclass(frozen=True, slots=True)
class Drill:
    """The fault behind a finding, in which step it was injected, and within how many forwards it had to be found."""

    fault: str
    step: int
    bound_forwards: int


class Drills:
    """The faults that were injected lately in one process."""

    def __init__(self) -> None:
        self._injected: deque[Injected] = deque(maxlen=MAX_REMEMBERED)

    def note(self, injected: Injected) -> None:
        """A fault was injected."""
        self._injected.append(injected)

    def find(self, violation: object) -> Drill | None:
        """The fault that ``violation`` comes from, the latest first.

        Only within the time in which it has to be found: damage that turns up in the same slot later is real.
        """
        for injected in reversed(self._injected):
            if is_consequence(injected, violation) or (
                is_hit(injected, violation) and _is_in_time(injected, violation)
            ):
                return Drill(injected.fault, injected.step, injected.bound_forwards)
        return None


def _is_in_time(injected: Injected, violation: object) -> bool:
    return isinstance(violation, Violation) and violation.step <= injected.step + max(injected.bound_forwards, 1)
