"""From raw rows of the device to violations: who, where, and which of them only follow from another."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..kernels import record as r
from ..kernels.mixing import POSITION_SHIFT, locate_source
from ..kernels.poison_reference import FIRST, LAST, edges_of
from ..pool_patcher.spaces import SlotSpace, StateSpace
from .ownership import Finding
from .step import Step
from .transfers import LOADED
from .truth import Request, TruthTable, tokens_between, true_chains
from .violation import CHECK_OF_KIND, Violation, Writer

_U64 = (1 << 64) - 1
_HISTORY_PER_ROW = 16
MAX_REFINED = 16
MAX_ID_LENGTH = 256


class RowHistory:
    """Which request sat on which row from which step on; the last few of each row."""

    def __init__(self) -> None:
        self._rows: dict[int, deque[tuple[int, str]]] = {}

    def note(self, row: int, step: int, request: str) -> None:
        """``request`` takes ``row`` in ``step``."""
        self._rows.setdefault(row, deque(maxlen=_HISTORY_PER_ROW)).append((step, request[:MAX_ID_LENGTH]))

    def writer_of(self, stamp: int) -> Writer | None:
        """Decode a writer stamp; None if nobody wrote."""
        step, row = stamp >> r.WRITER_ROW_BITS, stamp & r.WRITER_ROW_MASK
        if not step:
            return None
        sat = [request for since, request in self._rows.get(row, ()) if since <= step]
        return Writer(step, row, sat[-1] if sat else None)


class Diagnosis:
    """Explains the raw rows of one pool."""

    def __init__(
        self,
        slots: SlotSpace,
        pool_name: str,
        truth: TruthTable,
        history: RowHistory,
        rank: int,
        *,
        checks_identity: bool = True,
    ) -> None:
        self._checks_identity = checks_identity
        self.pool_name = pool_name
        self._slots = slots
        self._truth = truth
        self._history = history
        self._rank = rank

    def explain(self, step: Step, rows: Sequence[Sequence[int]]) -> list[Violation]:
        """Violations of ``step``.

        A link joins two records, so the intact record behind a damaged one fails too; the host can compute the true
        prefix and leaves it out. An end point that differs behind a damaged slot adds nothing either.
        """
        violations = []
        chains: dict[int, npt.NDArray[np.uint64]] = {}
        named: set[tuple[int, int]] = set()
        for row in rows:
            kind, index, position = r.Kind(row[r.ROW_KIND]), row[r.ROW_REQUEST], row[r.ROW_POSITION]
            if kind is r.Kind.CONTENT:
                violations.append(self._content(step, row))
                continue
            if kind is r.Kind.NOT_STORED:
                violations.append(self._presence(step, row))
                continue
            if kind in (r.Kind.UNORDERED_FORWARD, r.Kind.UNORDERED_BATCH):
                violations.append(self._order(step, kind, row))
                continue
            if kind is r.Kind.DRAFT_PATH:
                violations.append(self._draft_path(step, row))
                continue
            if kind is r.Kind.END_POINT and any(index == request for request, _ in named):
                continue
            if kind in (r.Kind.LINK, r.Kind.END_POINT) and index not in chains:
                request = step.requests[index]
                chains[index] = true_chains(request, self._truth.anchor_of(request), step.prefix_lens[index])
            violation = self._chain(step, kind, row, chains.get(index))
            if kind is r.Kind.LINK and self._holds_truth(violation, row):
                if (index, position - 1) in named:
                    continue
                violation = dataclasses.replace(violation, kind="link_behind")
            elif self._checks_identity:
                violation = self._recognise(step.requests[index], violation)
            named.add((index, position))
            violations.append(violation)
        return violations

    def explain_arrival(self, step: Step, rows: Sequence[Sequence[int]]) -> list[Violation]:
        """Violations of KV that has come from another server; who stored it there is not known here."""
        rows = [[*row[: r.ROW_WRITER], 0] for row in rows]
        return [dataclasses.replace(violation, phase="arrival") for violation in self.explain(step, rows)]

    def _order(self, step: Step, kind: r.Kind, row: Sequence[int]) -> Violation:
        due, found = row[r.ROW_CHAIN], row[r.ROW_DIGEST]
        return Violation(
            check="order",
            kind=kind.name.lower(),
            pool=self.pool_name,
            rank=self._rank,
            step=step.number,
            phase="read",
            slot=-1,
            evidence=(f"step {due} was due on the device, and it had come to step {found}",),
        )

    def ownership(self, finding: Finding) -> Violation:
        """A violation of ownership, which explains itself."""
        return Violation(
            check="ownership",
            kind=finding.kind,
            pool=self.pool_name,
            rank=self._rank,
            step=finding.step,
            phase=finding.phase,
            slot=finding.slot,
            page=finding.page,
            position=finding.position,
            request=finding.request,
            request_row=finding.request_row,
            writer=self._history.writer_of(finding.writer_stamp),
            state=finding.state,
            owner=finding.owner,
            owner_row=finding.owner_row,
            owner_since=finding.owner_since,
            neighbours=finding.neighbours,
            evidence=finding.evidence,
        )

    def mixed(self, step: Step, request: Request, row: int, version: str) -> Violation:
        """A running request whose weights were updated under it."""
        return Violation(
            check="identity",
            kind="mixed_weights",
            pool=self.pool_name,
            rank=self._rank,
            step=step.number,
            phase="read",
            slot=-1,
            request=request.rid,
            request_row=row,
            differs=(("weights", version, "an older version"),),
        )

    def _recognise(self, request: Request, violation: Violation) -> Violation:
        """The right tokens behind another anchor are reuse across identities, not damage."""
        expected, stored = violation.expected_hash, violation.stored_hash
        if expected is None or stored is None or violation.stored_token != violation.expected_token:
            return violation
        anchor = self._truth.anchor_of(request)
        differs = self._truth.identities.compare(anchor, (anchor + stored - expected) & _U64)
        if not differs:
            return violation
        return dataclasses.replace(violation, check="identity", kind="other_identity", differs=differs)

    @staticmethod
    def _holds_truth(violation: Violation, row: Sequence[int]) -> bool:
        return (
            violation.stored_token == violation.expected_token
            and violation.stored_hash == violation.expected_hash
            and bool(row[r.ROW_IDENTITY] & r.LIVE_BIT)
        )

    def _chain(self, step: Step, kind: r.Kind, row: Sequence[int], chain: npt.NDArray[np.uint64] | None) -> Violation:
        index, position, identity = row[r.ROW_REQUEST], row[r.ROW_POSITION], row[r.ROW_IDENTITY]
        request = step.requests[index]
        reads_slot = kind not in (r.Kind.ROW_RANGE, r.Kind.WRITE_RANGE)
        is_unmapped = kind is r.Kind.SLOT_RANGE and self._slots.mapping is not None and row[r.ROW_SLOT] <= 0
        has_record = reads_slot and kind is not r.Kind.SLOT_RANGE and identity != 0
        return Violation(
            check=CHECK_OF_KIND[kind],
            kind="unmapped" if is_unmapped else kind.name.lower(),
            pool=self.pool_name,
            rank=self._rank,
            step=step.number,
            phase="write" if kind is r.Kind.WRITE_RANGE else "read",
            slot=row[r.ROW_SLOT],
            page=self._page_of(row[r.ROW_SLOT]),
            position=position if kind is not r.Kind.ROW_RANGE else None,
            request=request.rid,
            request_row=step.rows[index],
            stored_token=_signed_token(identity) if has_record else None,
            expected_token=_true_token(request, position) if reads_slot else None,
            stored_position=(identity >> POSITION_SHIFT) & r.POSITION_MASK if has_record else None,
            stored_hash=row[r.ROW_CHAIN] & _U64 if has_record else None,
            expected_hash=int(chain[position]) if chain is not None else None,
            writer=self._history.writer_of(row[r.ROW_WRITER]) if has_record else None,
        )

    def _draft_path(self, step: Step, row: Sequence[int]) -> Violation:
        """The tokens of this round are not known to the scheduler yet: the device has said what belongs there."""
        index, identity, expected = row[r.ROW_REQUEST], row[r.ROW_IDENTITY], row[r.ROW_FOUND_LOCATOR]
        return Violation(
            check="chain",
            kind="draft_path",
            pool=self.pool_name,
            rank=self._rank,
            step=step.number,
            phase="write",
            slot=row[r.ROW_SLOT],
            page=self._page_of(row[r.ROW_SLOT]),
            position=row[r.ROW_POSITION],
            request=step.requests[index].rid,
            request_row=step.rows[index],
            stored_token=_signed_token(identity),
            expected_token=_signed_token(expected),
            stored_position=(identity >> POSITION_SHIFT) & r.POSITION_MASK,
            stored_hash=row[r.ROW_CHAIN] & _U64,
            expected_hash=row[r.ROW_FOUND_DIGEST] & _U64,
            writer=self._history.writer_of(row[r.ROW_WRITER]),
        )

    def _content(self, step: Step, row: Sequence[int]) -> Violation:
        identity, index = row[r.ROW_IDENTITY], row[r.ROW_REQUEST]
        names = self._slots.table.names
        source = locate_source(
            row[r.ROW_DIGEST], row[r.ROW_LOCATOR], row[r.ROW_FOUND_DIGEST], row[r.ROW_FOUND_LOCATOR], len(names)
        )
        layer, half = names[source] if source is not None else (None, None)
        return Violation(
            check="content",
            kind="content",
            pool=self.pool_name,
            rank=self._rank,
            step=step.number,
            phase={LOADED: "load", -1: "scrub"}.get(index, "start"),
            slot=row[r.ROW_SLOT],
            page=self._page_of(row[r.ROW_SLOT]),
            position=row[r.ROW_POSITION],
            request=step.requests[index].rid if index >= 0 else None,
            request_row=step.rows[index] if index >= 0 else None,
            stored_token=_signed_token(identity),
            stored_position=(identity >> POSITION_SHIFT) & r.POSITION_MASK,
            stored_hash=row[r.ROW_FOUND_DIGEST] & _U64,
            expected_hash=row[r.ROW_DIGEST] & _U64,
            layer=layer,
            half=half,
            writer=self._history.writer_of(row[r.ROW_WRITER]),
        )

    def _presence(self, step: Step, row: Sequence[int]) -> Violation:
        identity, writer = row[r.ROW_IDENTITY], self._history.writer_of(row[r.ROW_WRITER])
        table, source = self._slots.table, row[r.ROW_SOURCE]
        layer, half = table.names[source]
        whole = FIRST if len(edges_of(table.sources[source].read_bytes)) < 2 else FIRST | LAST
        return Violation(
            check="presence",
            kind="not_stored" if row[r.ROW_EDGES] == whole else "partly_stored",
            pool=self.pool_name,
            rank=self._rank,
            step=step.number,
            phase="write",
            slot=row[r.ROW_SLOT],
            page=self._page_of(row[r.ROW_SLOT]),
            position=row[r.ROW_POSITION],
            request=writer.request if writer else None,
            request_row=writer.row if writer else None,
            expected_token=_signed_token(identity),
            layer=layer,
            half=half,
            writer=writer,
        )

    def _page_of(self, slot: int) -> int | None:
        return slot // self._slots.page_size if self._slots.page_size > 1 else None


class StateDiagnosis(Diagnosis):
    """Explains the raw rows of a per-request state, whose slots are rows of a table."""

    def __init__(self, state: StateSpace, pool_name: str, truth: TruthTable, history: RowHistory, rank: int) -> None:
        rows = SlotSpace(state.name, state.table, state.slot_count * state.split, page_size=1)
        super().__init__(rows, pool_name, truth, history, rank)
        self._split = state.split

    def explain(self, step: Step, rows: Sequence[Sequence[int]]) -> list[Violation]:
        """Violations of ``step``."""
        found = [self._content(step, row) for row in rows]
        return [
            dataclasses.replace(violation, kind="state", phase="read", slot=violation.slot // self._split)
            for violation in found
        ]


def _signed_token(identity: int) -> int:
    token = identity & r.TOKEN_MASK
    return token - (1 << 32) if token >> 31 else token


def _true_token(request: Request, position: int) -> int | None:
    tokens = tokens_between(request, position, position + 1) if position >= 0 else []
    return int(tokens[0]) if tokens else None
