"""Updates of the weights under a running server: what was made before one is not what is made after it."""

from __future__ import annotations

import logging

from ..kernels import record as r
from ..pool_patcher.records import ShadowRecords
from ..report.reporter import Reporter
from ..report.text import quote_clause
from .diagnosis import Diagnosis
from .step import Step
from .truth import TruthTable

logger = logging.getLogger("kvcanary")


class WeightUpdates:
    """Gives KV another identity after each update, and says what of the old is still about."""

    def __init__(
        self, truth: TruthTable, records: ShadowRecords, reporter: Reporter, diagnosis: Diagnosis, *, is_strict: bool
    ) -> None:
        """``is_strict``: requests that run through an update are violations."""
        self._truth = truth
        self._records = records
        self._reporter = reporter
        self._diagnosis = diagnosis
        self._is_strict = is_strict
        self._is_news = False

    def replace(self, version: str, *, is_flushed: bool) -> None:
        """The weights were updated in place: KV made from now on is of another identity. May wait for the device.

        Says how much KV of older versions is still reachable: none, if the cache was flushed with the update.
        """
        self._truth.identities.replace_weights(version)
        self._is_news = True
        live = (self._records.hot[:, r.IDENTITY] & r.LIVE_BIT) != 0
        reachable = 0 if is_flushed else int(live.sum())
        logger.info(
            "kvcanary: weights are now version %s; %d slots hold KV of older ones", quote_clause(version), reachable
        )
        self._reporter.event("weights", {"version": version, "flushed": is_flushed, "older_slots": reachable})

    def note_mixed(self, step: Step) -> None:
        """Ahead of a forward: after an update, requests that go on mix versions, as was asked for. Said once."""
        if not self._is_news:
            return
        self._is_news = False
        pairs = zip(step.requests, step.rows, strict=True)
        mixed = [(request, row) for request, row in pairs if self._truth.is_running(request)]
        if not mixed:
            return
        version = self._truth.identities.weights
        logger.warning(
            "kvcanary: %d running requests go on with KV of weights before version %s",
            len(mixed),
            quote_clause(version),
        )
        rids = [request.rid for request, _ in mixed]
        self._reporter.event("mixed_weights", {"step": step.number, "version": version, "requests": rids})
        if self._is_strict:
            step.found += [self._diagnosis.mixed(step, request, row, version) for request, row in mixed]
