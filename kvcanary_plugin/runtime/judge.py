"""From the verdict of a forward to what is reported and done about it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ..config import Config
from ..errors import CorruptionError
from ..kernels import record as r
from ..pool_patcher.spaces import GuardedPool
from ..report.reporter import Reporter
from ..report.text import render_line
from .diagnosis import Diagnosis, RowHistory, StateDiagnosis
from .ledger import Ledger
from .ownership import attribute, explain_rows
from .refinement import refine_chain_rows, sort_rows
from .space import Space
from .state import StateWatch
from .step import Step
from .transfers import Transfers
from .truth import TruthTable
from .violation import Violation

logger = logging.getLogger("kvcanary")


MAX_LISTED = 8


class Policy(Protocol):
    """What is done about violations beyond reporting them."""

    @property
    def is_degraded(self) -> bool:
        """There is more damage than can be reported piece by piece."""

    def judge(self, step: Step, violations: Sequence[Violation]) -> None:
        """Act on the violations of ``step``, before its output is used."""


class Judge:
    """Explains what was found, reports it, and hands it to the policy.

    Attributes:
        policy: what is done about violations beyond reporting them; None for nothing.
        diagnosis: that of the main space.
        transfers: to host memory and back; None for none.
        stops: a new violation stops the server.
        muted: checks whose findings are dropped.
    """

    def __init__(
        self,
        pool: GuardedPool,
        spaces: Sequence[Space],
        states: Sequence[StateWatch],
        ledger: Ledger | None,
        truth: TruthTable,
        history: RowHistory,
        config: Config,
        reporter: Reporter,
        scatter: Callable[..., None],
        rank: int,
    ) -> None:
        self.policy: Policy | None = None
        self.transfers: Transfers | None = None
        self.stops = config.mode == "raise"
        self.muted: frozenset[str] = frozenset()
        self._pool = pool
        self._spaces = spaces
        self._ledger = ledger
        self._truth = truth
        self._reporter = reporter
        self._scatter = scatter
        self._on_host = pool.req_to_token.device.type == "cpu"
        recognises = "identity" in config.checks
        self._diagnoses = [
            Diagnosis(space.slots, space.title, truth, history, rank, checks_identity=recognises) for space in spaces
        ]
        self.diagnosis = self._diagnoses[0]
        self._diagnoses += [
            StateDiagnosis(watch.state, f"{pool.name}/{watch.state.name}", truth, history, rank) for watch in states
        ]

    def judge(self, step: Step) -> None:
        """Read the verdict of ``step`` and act on it.

        Raises:
            CorruptionError: something is damaged and the mode is ``raise``.
        """
        count, rows_of_spaces = step.read_verdict()
        if step.is_timed:
            for space in self._spaces:
                if space.scrubber is not None:
                    space.scrubber.observe_forward(step.seconds)
        self._learn()
        if not count and not step.found:
            return
        violations = list(step.found)
        # An idle pass has no verdict on states.
        for diagnosis, rows in zip(self._diagnoses, rows_of_spaces, strict=False):
            if diagnosis is self.diagnosis:
                ownership = [row for row in rows if r.is_ownership(row[r.ROW_KIND])]
                rows = [row for row in rows if not r.is_ownership(row[r.ROW_KIND])]
                if ownership and self._ledger is not None:
                    findings = explain_rows(self._ledger, step, ownership, self._pool.page_size)
                    violations += [diagnosis.ownership(finding) for finding in findings]
                if step.inbox is not None or not self._on_host:
                    # Only to name a place: what the rows said when they were verified decides, not what they say now.
                    rows = self._refine(step, sort_rows(rows))
            explained = diagnosis.explain(step, rows) if step.inbox is None else diagnosis.explain_arrival(step, rows)
            if self.transfers is not None and diagnosis is self.diagnosis:
                explained = self.transfers.trace(explained, step)
            if self._ledger is not None and diagnosis is self.diagnosis and explained:
                explained = attribute(self._ledger, explained, self._pool.slot_count, self._pool.page_size)
            violations += explained
        if self.muted:
            violations = [violation for violation in violations if violation.check not in self.muted]
            if not violations and not step.hidden:
                return
        self._reporter.is_quiet = self.policy is not None and self.policy.is_degraded
        fresh = self._reporter.report(violations)
        if step.hidden:
            self._reporter.count_unlisted(step.hidden, step.number)
        if self.policy is not None:
            self.policy.judge(step, violations)
        if fresh and self.stops:
            raise CorruptionError(render_line(fresh[0]))

    def read_early(self, step: Step) -> None:
        """On a CPU the rows of a request are at hand and still what the forward will read: look closer right away."""
        found = self._spaces[0].violations
        count = int(found.count)
        rows = found.rows[: min(count, found.capacity)].tolist()
        step.early_rows = self._refine(step, rows)
        step.early_hidden = count - len(rows)
        found.reset()

    def _refine(self, step: Step, rows: list[list[int]]) -> list[list[int]]:
        return refine_chain_rows(
            step,
            rows,
            step.inbox or self._spaces[0].records,
            self._pool.req_to_token,
            self._scatter,
            self._truth.anchor_of,
            self._pool.main.window,
        )

    def _learn(self) -> None:
        """Say once what the first forwards showed of the sources they store."""
        for space, diagnosis in zip(self._spaces, self._diagnoses, strict=False):
            learned = space.presence.conclude() if space.presence is not None else None
            if learned is None:
                continue
            if learned.unstored:
                logger.warning(
                    'kvcanary: pool "%s": none of the first %d tokens stored %s, so presence does not watch that; '
                    "right for layers that share the KV of others, a fault otherwise",
                    diagnosis.pool_name,
                    learned.tokens,
                    _list_places(learned.unstored),
                )
            self._reporter.event("learned", {"pool": diagnosis.pool_name, **dataclasses.asdict(learned)})


def _list_places(places: Sequence[tuple[int, str]]) -> str:
    listed = ", ".join(f"layer {layer} {half}" for layer, half in places[:MAX_LISTED])
    return listed if len(places) <= MAX_LISTED else f"{listed} and {len(places) - MAX_LISTED} more"
