"""The host's part of a forward: what it will read and store, written where it is uploaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .batch import BatchBuffers, HostFields
from .diagnosis import RowHistory
from .images import NO_MARKS, locate_marks
from .launches import MAX_CAPTURED_REQUESTS, CapturedDecode
from .ledger import Ledger
from .step import Step
from .truth import Request, TruthTable
from .weights import WeightUpdates


class Opening:
    """Opens the steps of one guard."""

    def __init__(
        self,
        truth: TruthTable,
        history: RowHistory,
        ledger: Ledger | None,
        weights: WeightUpdates,
        captured: CapturedDecode | None,
        device: torch.device,
        companions: int,
    ) -> None:
        """``companions``: numberings of slots beside the main one."""
        self._truth = truth
        self._history = history
        self._ledger = ledger
        self._weights = weights
        self._captured = captured
        self._batch = BatchBuffers(device, companions)

    def open(
        self,
        step: Step,
        requests: Sequence[Request],
        rows: Sequence[int],
        prefix_lens: Sequence[int],
        write_lens: Sequence[int],
        nodes: int,
    ) -> HostFields:
        """Fill ``step`` with the next forward; the arguments are those of :meth:`Guard.announce`."""
        # A copy, because SGLang extends its list in place.
        step.requests, step.rows, step.prefix_lens = list(requests), rows, prefix_lens
        step.verify_total, step.write_total, step.started = sum(prefix_lens), sum(write_lens), ()
        step.marks, step.found = NO_MARKS, []
        # Every request stores at least one token.
        step.nodes = nodes
        is_even = not nodes and 0 < step.write_total == len(requests)
        step.is_decode = is_even and len(requests) <= MAX_CAPTURED_REQUESTS and self._captured is not None
        if step.is_decode and self._captured is not None:
            batch = self._captured.batch_of(len(requests))
        else:
            batch = self._batch.batch_of(len(requests), step.write_total)
        self._weights.note_mixed(step)
        truth = self._truth.advance(requests, rows, prefix_lens, is_even=not nodes)
        step.started = truth.started
        if not nodes and not self._truth.is_generating:  # an image may end with the one token of a chunk
            step.marks = locate_marks(requests, prefix_lens, write_lens)
        for index in step.started:
            self._history.note(rows[index], step.number, requests[index].rid)
        owners = None
        if self._ledger is not None:
            owners = self._ledger.seat(step.number, step.requests, truth.rows, step.started)
        host = step.open(batch)
        host.fill(step.number, truth, write_lens, owners, is_even=is_even)
        return host
