"""Mode ``quarantine``: end the requests that read damaged KV, forget their prefixes, withhold the slots, serve on.

Verdicts are collected while they are read. They are acted upon at one point of every step, before its output is used,
and by all ranks alike: whatever decides is agreed upon first, so a rank that has found nothing, or whose guard has
detached, does the same as the others.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..report.reporter import Reporter
from ..report.text import quote
from .burst import Burst
from .consensus import Consensus
from .finding import CHECKS, NOWHERE, ROW_FAULTS, Finder, Finding, describe, explain
from .step import Step
from .taint import Taints
from .violation import Violation
from .withheld import Withheld

if TYPE_CHECKING:
    from .guard import Guard

logger = logging.getLogger("kvcanary")

# By number, because ranks exchange numbers. In these the bytes of the slot are wrong for whoever reads it; in the
# others it is the row of one request that is wrong, or what it was made for.
MAX_LISTED = 32
MAX_REMEMBERED = 65536


@dataclass(frozen=True, slots=True)
class Levers:
    """What is to be done to SGLang, and what must be known of its requests, in one release.

    Attributes:
        held_by: request row and tokens stored there; None if the request holds no KV.
        is_over: it has its final answer already, or goes back to the queue and starts again.
        is_in_prefill: a chunk of its prompt is under way that is not the last one.
        end: end it with an error at the next result of its own; its KV is not cached, nor a token it gets from now on.
        keep_out: do not cache its KV.
        take_free: pass the allocator's free pages through a function that leaves out what must not be handed out.
        count_free: slots on its free list; None if it is an allocator of another kind than those.
        evict: let the prefix cache free that many slots, of prefixes that no request holds.
    """

    held_by: Callable[[Any], tuple[int, int] | None]
    is_over: Callable[[Any], bool]
    is_in_prefill: Callable[[Any], bool]
    end: Callable[[Any, str], None]
    keep_out: Callable[[Any], None]
    take_free: Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], None]
    count_free: Callable[[Any], int | None]
    evict: Callable[[Any, int], None]


class Quarantine:
    """The policy of one scheduler process.

    Attributes:
        allocator: SGLang's object that hands out the slots of the guarded pool.
        truth: the true prefix hashes; of use here also after the guard they belong to has detached.
        taints: prefixes that are not to be reused.
        withheld: slots that are out of circulation.
    """

    def __init__(
        self,
        guard: Guard,
        reporter: Reporter,
        levers: Levers,
        consensus: Consensus,
        prefix_cache: Any,
        burst: Burst | None = None,
    ) -> None:
        pool = guard.pool
        self.allocator = pool.allocator
        self.truth = guard.truth
        self.taints = Taints(guard.truth)
        is_possible = levers.count_free(pool.allocator) is not None
        self.withheld = Withheld(pool.page_size, pool.slot_count, pool.req_to_token.device, is_possible=is_possible)
        self._guard = guard
        self._pool = pool
        self._finder = Finder(guard)
        self._reporter = reporter
        self._levers = levers
        self._consensus = consensus
        self._prefix_cache = prefix_cache
        self._burst = burst or Burst()
        self._live: dict[int, Any] = {}
        self._latest: list[Any] = []
        self._named: dict[int, str] = {}
        self._findings: set[Finding] = set()
        self._known: set[Finding] = set()
        self._ending: dict[int, tuple[Any, str]] = {}
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ended = 0
        self._flushed_at = 0
        self._is_stopped = False

    @property
    def is_alone(self) -> bool:
        """There is no other rank that waits for what this one does."""
        return self._consensus.size == 1

    @property
    def is_degraded(self) -> bool:
        """There is more damage than can be reported piece by piece."""
        return self._burst.is_on

    @property
    def totals(self) -> dict[str, Any]:
        """What is out of use since the start or the last flush, and how many requests were ended."""
        return {
            "state": "degraded" if self._burst.is_on else "normal",
            "ended_total": self._ended,
            "withheld_slots": len(self.withheld),
            "refused_slots": self.withheld.refused,
            "tainted_points": len(self.taints),
        }

    def stop(self) -> None:
        """Look at nothing new. What is out of circulation stays so."""
        self._is_stopped = True
        self._live.clear()

    def note_launched(self, requests: Sequence[Any]) -> None:
        """A forward of these requests was launched."""
        if requests == self._latest or self._is_stopped:
            return
        self._latest = list(requests)
        if len(self._live) > 2 * len(requests) + 64:
            self._live = {key: request for key, request in self._live.items() if self._levers.held_by(request)}
        self._live.update((id(request), request) for request in requests)

    def admit(self, request: Any) -> None:
        """``request`` is about to look for cached KV."""
        if not self.taints.is_empty and not self._is_stopped and self._levers.held_by(request) is None:
            self.taints.admit(request)

    def judge(self, step: Step, violations: Sequence[Violation]) -> None:
        """Take note of the verdict of ``step``. Nothing is done before :meth:`act`."""
        seated = dict(zip(step.rows, step.requests, strict=True))
        for violation in violations:
            if violation.check == "order":  # all that the forward has read and stored may be wrong
                for reader in step.requests:
                    self._named.setdefault(id(reader), describe(violation))
            row = violation.request_row
            request = seated.get(row) if row is not None else None
            if request is None and step.number <= self._flushed_at:
                continue  # under overlap the last forward before a flush is judged behind it
            if request is not None:
                if violation.kind in ROW_FAULTS and id(request) in self._named:
                    continue  # its first wrong entry says it all
                self._named[id(request)] = self._named.get(id(request)) or describe(violation)
            self._findings.add(self._finder.find(violation, request))
        if step.hidden:  # nobody knows whose those are
            for request, length in zip(step.requests, step.prefix_lens, strict=True):
                if length:
                    self._named.setdefault(id(request), "more violations in one forward than can be described")
            self._findings.add(NOWHERE)

    def act(self) -> None:
        """Do what the verdicts since the last call ask for, all ranks alike. Once for every result processed."""
        if self._is_stopped:
            return
        own, named = self._findings, self._named
        room, is_named = self._consensus.highest([len(own), int(bool(named))])
        for request, why in list(self._ending.values()):
            self._end(request, why)
        if self._burst.ends():
            self._say("recovered", "no new damage for a while", {})
        if not room and not is_named:
            return
        self._findings, self._named = set(), {}
        findings = [Finding(*words) for words in self._consensus.union(own, room, len(Finding._fields))]
        live = [request for request in self._live.values() if not self._is_over(request)]
        readers = self._read_by(live, {finding.slot: finding for finding in findings if finding.is_spoiled})
        reasons = [named.get(id(request)) or readers.get(id(request)) for request in live]
        damaged = self._consensus.highest([int(reason is not None) for reason in reasons])
        fresh = [finding for finding in findings if finding not in self._known]
        self._contain(fresh)
        ended = []
        for request, reason, is_damaged in zip(live, reasons, damaged, strict=True):
            if is_damaged:
                ended += self._end(request, reason or "found on another rank")
            elif self.taints.is_passed_by(request):
                # The cache would give it damaged slots in place of its own when it takes those in.
                if self._levers.is_in_prefill(request):
                    ended += self._end(request, "another copy of its prefix is cached")
                else:
                    self._levers.keep_out(request)
        if fresh or ended:
            self._report(fresh, ended)

    def keep_back(self, allocator: object, ids: torch.Tensor, *, are_pages: bool = False) -> torch.Tensor:
        """What of the slots or pages that are being freed may go back into circulation."""
        return self.withheld.keep_back(ids, are_pages=are_pages) if allocator is self.allocator else ids

    def less_pending(self, allocator: object, available: int) -> int:
        """Of ``available`` slots of ``allocator``, how many may be counted on: those still held make up for the rest.

        So the pool is smaller from the moment of the damage, whoever holds the slots, and what SGLang plans with, free
        plus evictable, is what it can get.
        """
        return available - self.withheld.pending if allocator is self.allocator else available

    def make_room(self, allocator: object, slots: int) -> None:
        """``slots`` are about to be handed out; SGLang has evicted for them, but withheld ones did not come free."""
        while allocator is self.allocator and self.withheld.pending:
            free = self._levers.count_free(allocator)
            if free is None or free >= slots:
                return
            self._levers.evict(self._prefix_cache, slots - free)
            if self._levers.count_free(allocator) == free:
                return  # there is nothing left to evict

    def lift(self, allocator: object) -> None:
        """``allocator`` was flushed: everything circulates again, and nothing cached is left to be wary of."""
        if allocator is not self.allocator:
            return
        self._flushed_at = self._guard.forwards
        self._findings.clear()
        self.taints.clear()
        self._burst.clear()
        self._known.clear()
        if count := self.withheld.clear():
            logger.warning("kvcanary: the cache was flushed; %d slots are back in circulation", count)
            self._reporter.event("lifted", {"slot_count": count})

    def _read_by(self, live: Sequence[Any], spoiled: dict[int, Finding]) -> dict[int, str]:
        """Which of ``live`` hold one of the slots, and why they are to end. Waits for the device."""
        read: dict[int, str] = {}
        slots = torch.tensor(list(spoiled), device=self._pool.req_to_token.device)
        for request in live if spoiled else ():
            held = self._levers.held_by(request)
            if held is None:
                continue
            row, length = held
            entries = self._pool.req_to_token[row, :length]
            hits = entries[torch.isin(entries, slots)]
            if len(hits):
                found = spoiled[int(hits[0])]
                read[id(request)] = f"check {CHECKS[found.check]}, slot {found.slot}, position {found.position}"
        return read

    def _contain(self, fresh: Sequence[Finding]) -> None:
        """Taint and withhold, for findings that nobody has acted upon yet."""
        if len(self._known) > MAX_REMEMBERED:
            self._known.clear()
        self._known.update(fresh)
        if any(finding.is_everywhere for finding in fresh):
            self.taints.disown_all()
        self.taints.add([finding.point for finding in fresh if finding.is_tainted])
        if self.withheld.add(finding.slot for finding in fresh if finding.is_withheld):
            self._levers.take_free(self.allocator, lambda pages: self.withheld.keep_back(pages, are_pages=True))
        if self._burst.note(finding.slot for finding in fresh if finding.is_withheld):
            self._say("degraded", "damage at many places; from now on it is counted, not listed", {})

    def _end(self, request: Any, why: str) -> list[Any]:
        """End it, or remember to. Returns a list of it, empty where that is old news."""
        is_news = request not in self._told
        self._told.add(request)
        if self._is_over(request):
            self._ending.pop(id(request), None)
        elif self._levers.is_in_prefill(request):
            self._ending.setdefault(id(request), (request, why))  # SGLang can end it once its last chunk is under way
        else:
            self._ending.pop(id(request), None)
            self._levers.end(request, explain(why))
        self._ended += is_news
        return [request] if is_news else []

    def _is_over(self, request: Any) -> bool:
        return self._levers.is_over(request) or self._levers.held_by(request) is None

    def _report(self, fresh: Sequence[Finding], ended: Sequence[Any]) -> None:
        if not self._burst.may_write():
            return
        slots = sorted({finding.slot for finding in fresh if finding.is_withheld})
        rids = [request.rid for request in ended]
        shown = f" ({', '.join(map(quote, rids[:4]))}{', ...' if len(rids) > 4 else ''})" if rids else ""
        words = f"{len(slots)} damaged slots, {len(rids)} requests end with an error{shown}"
        self._say("quarantined", words, {"requests": rids[:MAX_LISTED], "slots": slots[:MAX_LISTED]})

    def _say(self, event: str, words: str, fields: dict[str, Any]) -> None:
        refused = self.withheld.refused
        logger.error(
            "kvcanary: %s: %s; %d requests ended since the start, %d slots out of circulation%s",
            event,
            words,
            self._ended,
            len(self.withheld),
            f", {refused} more are not because too many already are: flush or restart" if refused else "",
        )
        self._reporter.event(event, {**fields, **self.totals})
