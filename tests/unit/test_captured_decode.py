"""Decode steps of as many requests as are recorded, in the padded tensors that a recorded launch works on.

A CPU records nothing. What stands in for a recording here launches the same closures anew, which is all that a recorded
one may rely on: that everything which changes from step to step lies in fixed tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.runtime import launches
from kvcanary_plugin.runtime.launches import MAX_CAPTURED_REQUESTS, CapturedDecode, Launches
from tests.large import LargeEngine

CPU = torch.device("cpu")


class Relaunched:
    """Does at every replay what was recorded at first."""

    def __init__(self, enqueue: Any, device: torch.device) -> None:
        self._enqueue = enqueue
        del device

    def replay(self) -> None:
        self._enqueue()


class Numbers(Launches):
    """Launches on a CPU, where what a device looks up for itself is looked up here."""

    inputs: Any = None

    def prepare(self, batch: Any, source: torch.Tensor, inputs: Any, total: int, step: Any) -> None:
        del inputs, total  # those of the first time, and a bound
        super().prepare(batch, source, self.inputs, int(batch.fields.verify_offsets[-1]), int(step))

    def conclude(self, batch: Any, step: Any, starts: Any, counts: Any) -> None:
        super().conclude(batch, int(step), [int(start) for start in starts], counts)


class Captured(CapturedDecode):
    """A device finds the forward's tensors by their addresses in the header."""

    def prepare(self, batch: Any, host: Any, inputs: Any, total: int) -> None:
        self._launches.inputs = inputs  # type: ignore[attr-defined]
        super().prepare(batch, host, inputs, total)


class CapturedEngine(LargeEngine):
    """The same with recorded decode steps, which ``replays`` counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rows: int) -> None:
        super().__init__(size=1 << 16, rows=rows, context=256)
        monkeypatch.setattr(launches, "CapturedLaunches", Relaunched)
        guard = self.guard
        numbers = Numbers(guard._launches._backend, guard.spaces, guard.ledger)
        self.captured = guard._captured = guard._opening._captured = Captured(numbers, CPU)

    @property
    def recorded(self) -> int:
        return sum(isinstance(graph, Relaunched) for graph in self.captured._graphs.values())


def start(engine: CapturedEngine, count: int) -> list[Any]:
    requests = [engine.request(length) for length in torch.arange(count).remainder(20).add(1).tolist()]
    engine.prefill(*requests, upto=64)
    engine.run(*requests, steps=6)
    return requests


def test_a_thousand_requests_are_recorded(monkeypatch: pytest.MonkeyPatch):
    engine = CapturedEngine(monkeypatch, rows=MAX_CAPTURED_REQUESTS)
    requests = start(engine, MAX_CAPTURED_REQUESTS)
    engine.settle_scrub()
    assert engine.violations == []
    assert engine.recorded >= 2, "what is ahead of the forward, and what is behind it"
    assert set(engine.captured._buffers) == {1024}

    last = max(requests, key=lambda request: (len(request.origin_input_ids), request.req_pool_idx))
    slot = engine.slot_of(last, 3)
    engine.guard.records.hot[slot, r.CHAIN] ^= 1
    engine.decode(*requests)
    (violation,) = engine.violations
    assert (violation.check, violation.slot, violation.request) == ("chain", slot, last.rid)


def test_more_than_a_thousand_are_launched_one_by_one(monkeypatch: pytest.MonkeyPatch):
    engine = CapturedEngine(monkeypatch, rows=MAX_CAPTURED_REQUESTS + 1)
    start(engine, MAX_CAPTURED_REQUESTS + 1)
    assert engine.violations == []
    assert engine.captured._graphs == {}


def test_what_recorded_steps_keep_is_a_few_bytes_a_request():
    batch = CapturedDecode(None, CPU).batch_of(MAX_CAPTURED_REQUESTS)  # type: ignore[arg-type]
    tensors = (batch.fields.block, batch.forward_rows, batch.tokens, batch.slots)
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(stored.values()) < 256 * MAX_CAPTURED_REQUESTS
    assert batch.fields.block.nbytes < 64 * MAX_CAPTURED_REQUESTS, "what is uploaded each step"
