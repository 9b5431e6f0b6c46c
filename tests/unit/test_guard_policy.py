"""The guard (policy) on the real pool, allocator, request table, Req and ForwardBatch of SGLang."""

import pytest

from kvcanary_plugin.config import CHECKS
from kvcanary_plugin.errors import CorruptionError
from kvcanary_plugin.runtime.guard import Guard
from tests.engine import Engine


def test_raise_stops_with_the_violation_in_the_message():
    engine = Engine(mode="raise")
    request = engine.request(30)
    engine.prefill(request)
    engine.rows.req_to_token[request.req_pool_idx, 5] = 0
    with pytest.raises(CorruptionError, match=r"chain/slot_range in slot 0 .* position 5"):
        engine.decode(request)


def test_a_burst_is_described_up_to_a_limit_and_counted_beyond():
    engine = Engine(size=2000)
    requests = [engine.request(200) for _ in range(3)]
    engine.prefill(*requests)
    engine.rows.req_to_token[:, :200] = 0
    engine.decode(*requests)

    assert engine.reporter.counts["chain"] == 256
    assert engine.reporter.counts["unlisted"] == 600 + 3 - 256  # every position, and three end points
    assert len(engine.violations) == 2  # two requests have room in the buffer: one report each


@pytest.mark.parametrize(
    ("size", "layers", "heads", "head_dim"), [(4096, 4, 2, 32), (4096, 12, 12, 64), (512, 3, 2, 16)]
)
def test_everything_resident_stays_within_64_bytes_a_slot(size, layers, heads, head_dim):
    engine = Engine(checks=CHECKS, size=size, layers=layers, heads=heads, head_dim=head_dim)

    assert engine.guard.resident_bytes / engine.guard.pool.slot_count <= 64


def test_only_checks_that_are_in_force_are_named():
    full = Engine(checks=CHECKS).guard
    assert full.checks == tuple(check for check in CHECKS if check != "order")
    assert full.settings.missing == ()  # a CPU does everything in order
    engine = Engine(checks=("chain", "content", "ownership"))
    shared = Guard(engine.guard.pool, engine.guard.config, engine.reporter, has_owners=False)
    assert shared.checks == ("chain", "content")
    assert shared.settings.missing == ("ownership",)
    assert shared.ledger is None
