"""What was injected into a server and what became of it, by kind of fault."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcanary_plugin.demo.story import Outcome
from kvcanary_plugin.report.decoding import decode_fields
from kvcanary_plugin.report.drill import is_consequence, is_hit
from kvcanary_plugin.report.events import Injected, read_violation

BY_SLOT = ("chain", "content")
LATELY = 400  # faults among which the cause of a report is looked for
HEAD = (
    "| fault | injected | found | only by another check | right place, in time | "
    "forwards until found: median, most | promised within |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Recall:
    """One row.

    Attributes:
        fault: its name.
        injected: how many count.
        found: of them.
        elsewise: of those, by another check than the one that is meant to.
        right: of those, in the right pool, layer, half, slot and position, and within the promised forwards.
        forwards: until found, of each that was.
        promised: the most that was promised to any.
        missed: the events of those not found, or not right.
    """

    fault: str
    injected: int
    found: int
    elsewise: int
    right: int
    forwards: tuple[int, ...]
    promised: int
    missed: tuple[dict[str, Any], ...] = field(default=())

    def render(self) -> str:
        """As a row of the table."""
        spread = f"{statistics.median(self.forwards):.0f}, {max(self.forwards)}" if self.forwards else "-"
        cells = (self.fault, self.injected, self.found, self.elsewise, self.right, spread, self.promised)
        return f"| {' | '.join(map(str, cells))} |"


def pair_outcomes(
    events: Iterable[dict[str, Any]],
) -> tuple[list[Outcome], list[Outcome], list[dict[str, Any]]]:
    """Give each violation to the latest fault that explains it.

    Returns:
        The faults; those of them that count, because a guard says the same only once, see :func:`_places`; and the
        violations that no fault explains.
    """
    outcomes: list[tuple[Injected, Outcome]] = []
    fresh, unexplained = [], []
    seen: set[tuple[Any, ...]] = set()
    for event in events:
        if event["event"] == "injected":
            outcomes.append((decode_fields(Injected, event), Outcome(event, [])))
            places = _places(event, event["slots"], [event.get("request"), *event.get("requests", ())])
            if not places & seen:
                fresh.append(outcomes[-1][1])
            seen |= places
        elif event["event"] == "violation":
            violation = read_violation(event).violation
            seen |= _places(event, [event.get("slot")], [event.get("request")])
            lately = outcomes[-1 : -LATELY - 1 : -1]
            for injected, outcome in lately:
                if is_hit(injected, violation):
                    outcome.found.append(event)
                    seen.add((injected.check, injected.fault, event.get("request")))
                    break
                if is_consequence(injected, violation):
                    if event["slot"] in injected.slots:
                        outcome.found.append(event)  # another check of rows saw it in the same place
                    break
            else:
                unexplained.append(event)
    return [outcome for _, outcome in outcomes], fresh, unexplained


def _places(event: dict[str, Any], slots: Iterable[Any], requests: Iterable[Any]) -> set[tuple[Any, ...]]:
    """What a later fault must not hit again to be reported anew: slots, a layer and half of a request, or a request."""
    if event["check"] in BY_SLOT:
        return {(event["check"], slot) for slot in slots}
    if event["check"] == "presence":
        return {("presence", event["layer"], event["half"], request) for request in requests}
    if event["check"] == "identity" and "fault" in event:
        return {("identity", event["fault"], request) for request in requests}
    return set()


def is_right(outcome: Outcome, pool: str) -> bool:
    """Found in time, in that pool, layer, half, slot and position; what the allocator was asked for has no position."""
    injected = outcome.injected
    if not outcome.is_found or outcome.forwards is None or outcome.forwards > injected["bound_forwards"]:
        return False
    positions = dict(zip(injected["slots"], injected["positions"], strict=False))
    place = pool, injected.get("layer"), injected.get("half")
    return all(
        (event["pool"], event["layer"], event["half"]) == place
        and event["position"] in (None, positions.get(event["slot"], event["position"]))
        for event in outcome.found
    )


def count_recall(fault: str, outcomes: Sequence[Outcome], pool: str) -> Recall:
    """The row of one kind of fault, injected into ``pool``."""
    good = [one for one in outcomes if is_right(one, pool)]
    forwards = tuple(one.forwards for one in outcomes if one.is_found and one.forwards is not None)
    promised = max((int(one.injected["bound_forwards"]) for one in outcomes), default=0)
    missed = tuple({"injected": one.injected, "found": one.found} for one in outcomes if one not in good)
    found = [one for one in outcomes if one.is_found]
    elsewise = sum(all(event["check"] != one.injected["check"] for event in one.found) for one in found)
    return Recall(fault, len(outcomes), len(found), elsewise, len(good), forwards, promised, missed)


def count_lines(flips: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """How many of ``flips`` a log of slots explains.

    Args:
        flips: in order, each with ``slots`` and ``line``, where in the log it was made.
        lines: reports, each with ``slot`` and ``line``.

    Returns:
        How many were found, and those.
    """
    found = []
    for index, flip in enumerate(flips):
        (slot,) = flip["slots"]
        later = (other["line"] for other in flips[index + 1 :] if slot in other["slots"])
        end = next(later, None)
        if any(
            line["slot"] == slot and line["line"] > flip["line"] and (end is None or line["line"] < end)
            for line in lines
        ):
            found.append(flip)
    return len(found), found
