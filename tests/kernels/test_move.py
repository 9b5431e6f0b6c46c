from __future__ import annotations

import pytest
import torch
from kernel_cases import random_words

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.kernels.move_reference import MOVED_WORDS

SLOTS = 700


def moved(backend: Backend, device: torch.device, target: torch.Tensor, source: torch.Tensor):
    records = random_words(SLOTS, r.RECORD_WORDS, device=device, seed=1)
    writers = random_words(SLOTS, device=device, seed=2)
    scratch = random_words(len(target) * MOVED_WORDS + 3, device=device, seed=3)
    backend.move_records(
        records=records, writers=writers, target=target.to(device), source=source.to(device), scratch=scratch
    )
    return records, writers


def pairs(count: int, seed: int = 0):
    """Slots of which many are targets and sources at once, and some are none."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randperm(SLOTS - 1, generator=generator)[:count] + 1
    source = torch.randint(1, SLOTS, (count,), generator=generator)
    target[::7], source[::5] = 0, 0
    target[3::11], source[4::13] = SLOTS, -3
    return target, source


@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 640])
def test_equals_the_reference(triton_backend: Backend, device: torch.device, count: int):
    target, source = pairs(count)
    for found, expected in zip(
        moved(triton_backend, device, target, source), moved(REFERENCE, device, target, source), strict=True
    ):
        assert torch.equal(found, expected)


def test_all_is_read_before_anything_is_written():
    """Compaction: each slot takes the record of the next, which is overwritten itself."""
    here = torch.device("cpu")
    before = random_words(SLOTS, r.RECORD_WORDS, device=here, seed=1)
    target = torch.arange(1, 300)
    records, _ = moved(REFERENCE, here, target, target + 1)
    assert torch.equal(records[1:300], before[2:301])
    assert torch.equal(records[300:], before[300:])
    assert torch.equal(records[0], before[0])


def test_ids_outside_are_left_out():
    here = torch.device("cpu")
    target, source = torch.tensor([0, 5, SLOTS, 6, -1]), torch.tensor([7, 0, 7, SLOTS, 7])
    assert torch.equal(moved(REFERENCE, here, target, source)[0], random_words(SLOTS, 4, device=here, seed=1))
