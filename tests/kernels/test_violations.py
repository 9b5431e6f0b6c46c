from __future__ import annotations

import torch
from kernel_cases import make_batch, rows_of

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.kernels.violations import ViolationBuffer


def verify_all(backend: Backend, violations: ViolationBuffer, device: torch.device, length: int) -> None:
    """Verify one request of which every slot is dead: as many violations as positions."""
    batch = make_batch([length], device)
    batch.records[:, r.IDENTITY] &= ~r.LIVE_BIT
    backend.verify_prefixes(
        records=batch.records,
        writers=batch.writers,
        req_to_token=batch.req_to_token,
        rows=batch.rows,
        offsets=batch.offsets,
        anchors=batch.anchors,
        end_points=batch.end_points,
        total=length,
        first_slot=1,
        violations=violations,
    )


def check_counts(backend: Backend, device: torch.device, length: int, times: int) -> None:
    violations = ViolationBuffer(8, device)
    for turn in range(times):
        verify_all(backend, violations, device, length)
        assert int(violations.count) == (turn + 1) * length
    kept = rows_of(violations)[1]
    assert len(kept) == 8
    assert {row[r.ROW_KIND] for row in kept} == {r.Kind.DEAD_SLOT}
    # Detail continues after a drain, in one copy of the block.
    drained = violations.block.clone()
    violations.reset()
    assert int(drained[0, 0]) == times * length
    assert sorted(drained[1:].tolist()) == kept
    verify_all(backend, violations, device, 3)
    count, rows = rows_of(violations)
    assert count == 3
    assert [row[r.ROW_POSITION] for row in rows] == [0, 1, 2]


def test_reference_counts_on():
    check_counts(REFERENCE, torch.device("cpu"), 1000, 2)


def test_triton_counts_on(triton_backend: Backend, device: torch.device):
    check_counts(triton_backend, device, 1000 if device.type == "cpu" else 500_000, 3)
