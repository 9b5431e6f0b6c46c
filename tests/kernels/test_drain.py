from __future__ import annotations

import pytest
import torch
from kernel_cases import poisoned_violations, random_words

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import NUMPY, REFERENCE, Backend
from kvcanary_plugin.kernels.violations import ViolationBuffer

POISON = -0x5A5A5A5A5A5A5A5B
COUNTS = [0, 1, 23, 24, 25, 10**9]
CAPACITY = 24


def drain(backend: Backend, device: torch.device, count: int, step: int) -> tuple[torch.Tensor, ViolationBuffer]:
    violations = poisoned_violations(CAPACITY, device)
    violations.rows.copy_(random_words(CAPACITY, r.ROW_COLUMNS, device=device, seed=count))
    violations.count.fill_(count)
    ring = torch.full((4, CAPACITY + 1, r.ROW_COLUMNS), POISON)
    if device.type == "cuda":
        ring = ring.pin_memory()
    backend.drain(violations, ring, torch.tensor([step], device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return ring, violations


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("step", [1, 2**40 + 3])
def test_equals_the_reference(triton_backend: Backend, device: torch.device, count: int, step: int):
    found, expected = drain(triton_backend, device, count, step), drain(REFERENCE, device, count, step)
    assert torch.equal(found[0], expected[0])
    assert int(found[1].count) == int(expected[1].count) == 0


@pytest.mark.parametrize("count", COUNTS)
def test_numpy_equals_the_reference(count: int):
    device = torch.device("cpu")
    found, expected = drain(NUMPY, device, count, 6), drain(REFERENCE, device, count, 6)
    assert torch.equal(found[0], expected[0])
    assert int(found[1].count) == 0


def test_only_the_block_of_the_step_is_touched_and_rows_past_the_count_stay():
    ring, _ = drain(REFERENCE, torch.device("cpu"), 2, 7)
    assert ring[3, 0, 0] == 2
    assert (ring[3, 1:3] != POISON).all()
    assert (ring[3, 3:] == POISON).all()
    assert (ring[:3] == POISON).all()
