from __future__ import annotations

import pytest
import torch
from kernel_cases import make_batch, rows_of

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, load_triton
from kvcanary_plugin.kernels.captured import CapturedLaunches
from kvcanary_plugin.kernels.violations import ViolationBuffer

pytestmark = pytest.mark.gpu


def test_one_capture_serves_smaller_batches():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda")
    batch = make_batch([700, 1, 299], device)
    violations = ViolationBuffer(64, device)
    offsets, anchors, end_points = (torch.zeros_like(x) for x in (batch.offsets, batch.anchors, batch.end_points))

    def verify(backend, into: ViolationBuffer, total: int) -> None:
        backend.verify_prefixes(
            records=batch.records,
            writers=batch.writers,
            req_to_token=batch.req_to_token,
            rows=batch.rows,
            offsets=offsets,
            anchors=anchors,
            end_points=end_points,
            total=total,
            first_slot=1,
            violations=into,
        )

    verify(load_triton(), violations, batch.total)  # compiles
    captured = CapturedLaunches(lambda: verify(load_triton(), violations, batch.total), device)
    assert int(violations.count) == 0
    anchors.copy_(batch.anchors)
    for lengths in ([700, 1, 299], [700, 0, 0], [3, 1, 0], [0, 0, 5]):
        ends = torch.tensor([0, *lengths]).cumsum(0)
        offsets.copy_(ends)
        last = torch.tensor(lengths).sub(1).clamp(min=0).to(device)
        end_points.copy_(batch.records[batch.req_to_token[batch.rows, last].long(), r.CHAIN])
        captured.replay()
        assert rows_of(violations) == (0, [])
        end_points.add_(1)
        captured.replay()
        expected = ViolationBuffer(64, device)
        verify(REFERENCE, expected, sum(lengths))
        assert rows_of(violations) == rows_of(expected)
        violations.reset()
