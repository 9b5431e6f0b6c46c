"""One forward that stores a million tokens of one request, on the last row of a table of more than 2^31 entries."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.runtime.truth import true_chains
from tests.large import CHUNK, MILLION, LargeEngine

ROWS = 2050
KINDS: dict[str, dict[str, int]] = {"tokens": {}, "pages": {"page_size": 64}, "latent": {"latent": 8}}


def make_engine(kind: str) -> LargeEngine:
    engine = LargeEngine(size=MILLION + 4096, rows=ROWS, **KINDS[kind])
    engine.leave_last_row()
    return engine


@pytest.fixture(params=[(kind, chunk) for kind in KINDS for chunk in (MILLION, CHUNK)], ids=lambda p: f"{p[0]}-{p[1]}")
def stored(request: pytest.FixtureRequest) -> tuple[LargeEngine, Any]:
    """A million tokens, stored by one forward or chunk by chunk."""
    kind, chunk = request.param
    engine = make_engine(kind)
    long = engine.request(MILLION)
    engine.prefill_in_chunks(long, chunk)
    assert engine.guard.forwards == MILLION // chunk
    return engine, long


def test_a_million_tokens_of_one_request(stored: tuple[LargeEngine, Any]):
    engine, long = stored
    table = engine.rows.req_to_token
    assert long.req_pool_idx * table.stride(0) > 1 << 31
    engine.run(long, steps=2)
    engine.settle_scrub()
    assert engine.violations == []
    assert engine.guard.stored == MILLION + 2

    slots = table[long.req_pool_idx, :MILLION].long()
    records = engine.guard.records.hot[slots]
    truth = true_chains(long, engine.guard.truth.anchor_of(long), MILLION)
    assert torch.equal(records[:, r.CHAIN], torch.from_numpy(truth.view("int64")))
    assert torch.equal(records[:, r.IDENTITY] >> 32, torch.arange(MILLION) | r.LIVE)

    slot = int(slots[-1])
    engine.guard.records.hot[slot, r.CHAIN] ^= 1 << 63
    buffer = engine.pool.kv_buffer[0] if hasattr(engine.pool, "kv_buffer") else engine.pool.v_buffer[0]
    buffer.view(torch.int16)[int(slots[-2]), 0, 5] ^= 1
    engine.decode(long)
    engine.settle_scrub()
    found = {(v.check, v.slot, v.position) for v in engine.violations}
    assert found == {("chain", slot, MILLION - 1), ("content", int(slots[-2]), MILLION - 2)}


@contextmanager
def counting_lines() -> Iterator[list[int]]:
    """Lines of the package that run within it, in a list of one number."""
    lines = [0]

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if "kvcanary_plugin" not in frame.f_code.co_filename:
            return None
        lines[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("kind", KINDS)
def test_no_python_runs_for_each_token(kind: str):
    """Of a forward that stores a million tokens, nor of the one that reads them: one line for blocks of them only."""
    counts = []
    for length in (MILLION >> 3, MILLION):
        engine = make_engine(kind)
        request = engine.request(length)
        with counting_lines() as stored:
            engine.prefill(request, upto=length)
        with counting_lines() as read:
            engine.decode(request)
        assert engine.violations == []
        counts.append((stored[0], read[0]))
    (few_stored, few_read), (many_stored, many_read) = counts
    assert few_stored > 100, "the package was traced"
    assert many_stored - few_stored < MILLION // 64
    assert many_read - few_read < MILLION // 1024


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_a_long_forward_is_linear_in_its_tokens(kind: str):
    peaks = []
    for length in (MILLION >> 2, MILLION >> 1):
        engine = make_engine(kind)
        request = engine.request(length)
        engine.rows.alloc([request])
        slots = engine._allocate([request], [0], [length])
        engine.rows.req_to_token[request.req_pool_idx, :length] = slots.int()
        tokens, row = torch.tensor(request.origin_input_ids), torch.tensor([request.req_pool_idx])
        engine.guard.ledger.note_alloc(slots)
        tracemalloc.start()
        engine.guard.announce([request], row.tolist(), [0], [length])
        engine.guard.before(tokens, slots, row)
        engine.store(slots)
        engine.guard.after()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        engine.guard.note_launched(engine)
        engine.guard.settle(engine)
        assert engine.violations == []
    assert peaks[1] / peaks[0] < 2.1
    assert peaks[1] / (MILLION >> 1) < 256, "bytes a token"
