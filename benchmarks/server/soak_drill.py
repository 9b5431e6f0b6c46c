"""What has to be true of the faults that are injected behind the clean minutes of a soak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from recall_table import pair_outcomes

from kvcanary_plugin.demo.story import Outcome

# What a guard says of itself while nothing is wrong.
QUIET = ("attached", "learned", "weights", "mixed_weights", "heartbeat", "changed", "released", "resumed")
ON_HOST = ("flip_host", "swap_host_pages")
WITH_NEXT_LOAD = "skip_layer_wait"  # lies in wait for it
FIRST_FORWARD, GAP_FORWARDS = 8, 6
SLACK_FORWARDS = 1  # a verdict of the next forward is in time, see :mod:`kvcanary_plugin.report.drill`


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the faults.

    Attributes:
        found, injected: how many, by fault.
        problems: what is not as it should be, a line each; empty if the drill is passed.
    """

    injected: dict[str, int]
    found: dict[str, int]
    problems: tuple[str, ...]

    def render(self) -> str:
        """In one cell."""
        if self.problems:
            return f"failed: {self.problems[0]}"
        return f"{sum(self.found.values())} of {sum(self.injected.values())} found, nothing unexplained"


def make_spec(faults: Sequence[str], seed: str) -> str:
    """The faults in this order, some forwards between two."""
    forwards = range(FIRST_FORWARD, FIRST_FORWARD + GAP_FORWARDS * len(faults), GAP_FORWARDS)
    return ";".join(f"{fault}@{forward}:seed={seed}-{forward}" for fault, forward in zip(faults, forwards, strict=True))


def find_reports(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that a server without damage does not have."""
    return [event for event in events if event["event"] not in (*QUIET, "injected")]


def judge(events: list[dict[str, Any]], faults: Sequence[str]) -> Verdict:
    """Judge ``events``, those since ``faults`` were ordered.

    Every fault of the device must be found, in its place and in time. A damaged page of host memory is found when it is
    loaded, if it ever is, so one of each kind will do. Nothing else may be reported.
    """
    others = [event for event in find_reports(events) if event["event"] != "violation"]
    problems = [f"event {event['event']}: {event.get('why', '')}" for event in others]
    host = [event for event in events if event["event"] == "injected" and event["fault"] in ON_HOST]
    loaded = [event for event in events if event["event"] == "violation" and event.get("host_slot") is not None]
    rest = [event for event in events if event not in host and event not in loaded]
    outcomes, fresh, strange = pair_outcomes(event for event in rest if event["event"] in ("injected", "violation"))

    injected = Counter(outcome.injected["fault"] for outcome in fresh)
    found = Counter(outcome.injected["fault"] for outcome in fresh if outcome.is_found)
    problems += [
        f"{outcome.injected['fault']} at step {outcome.injected['step']} was not found in its place and in time"
        for outcome in fresh
        if not is_placed(outcome)
    ]
    for event in host:
        injected[event["fault"]] += 1
        found[event["fault"]] += any(_is_of_host(event, report) for report in loaded)
    damaged = {report["slot"] for report in loaded}  # the pass may come by before the slot is stored to again
    strange = [event for event in strange if event["check"] != "content" or event["slot"] not in damaged]
    # A row that was damaged on the device may have gone to host memory like that.
    causes = [event for event in events if event["event"] == "injected" and event["check"] == "content"]
    strange += [report for report in loaded if not any(_is_of_host(event, report) for event in causes)]
    problems += [f"unexplained {event['check']}/{event['kind']} of slot {event['slot']}" for event in strange]
    seen = Counter(outcome.injected["fault"] for outcome in outcomes) + Counter(event["fault"] for event in host)
    problems += [f"{fault} was not injected: no batch suited it" for fault in dict.fromkeys(faults) if not seen[fault]]
    problems += [
        f"none of {injected[fault]} {fault} was found" for fault in ON_HOST if injected[fault] and not found[fault]
    ]
    return Verdict(dict(injected), dict(found), tuple(problems))


def is_placed(outcome: Outcome) -> bool:
    """Found in time, in the layer, half and position that were damaged, where the fault names one."""
    injected = outcome.injected
    bound = max(injected["bound_forwards"], SLACK_FORWARDS)
    if not outcome.is_found or outcome.forwards is None:
        return False
    if outcome.forwards > bound and injected["fault"] != WITH_NEXT_LOAD:
        return False
    positions = dict(zip(injected["slots"], injected["positions"], strict=False))
    return all(
        all(event[key] == injected[key] for key in ("layer", "half") if key in injected)
        and event["position"] in (None, positions.get(event["slot"], event["position"]))
        for event in outcome.found
    )


def _is_of_host(injected: dict[str, Any], report: dict[str, Any]) -> bool:
    if report["check"] != "content":
        return False
    if injected["fault"] != "swap_host_pages":
        is_there = injected.get("host_slot", report["host_slot"]) == report["host_slot"]
        return is_there and all(report[key] == injected.get(key) for key in ("layer", "half"))
    firsts = injected["host_slot"], injected["other_host_slot"]
    return any(first <= report["host_slot"] < first + injected["entries"] for first in firsts)
