from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernel_cases import make_offsets, poisoned_violations, random_words, rows_of

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend, load_triton

SHAPES = [
    [1],
    [2],
    [63],
    [64],
    [65],
    [257],
    [1] * 67,
    [0, 0, 5, 0],
    [127, 1, 0, 129, 2, 31],
    [0],
    [1021, 3],
]


def write(
    backend: Backend, device: torch.device, lengths: list[int], *, damage: dict[int, int] | None = None, **options
):
    total, bs = sum(lengths), len(lengths)
    slot_count = total + 9
    generator = torch.Generator().manual_seed(total)
    slots = torch.randperm(slot_count - 1, generator=generator)[:total] + 1
    for index, slot in (damage or {}).items():
        slots[index] = slot
    records = random_words(slot_count, r.RECORD_WORDS, device=device, seed=1)
    writers = random_words(slot_count, device=device, seed=2)
    violations = poisoned_violations(64, device)
    backend.write_chain(
        records=records,
        writers=writers,
        slots=slots.to(device),
        tokens=torch.randint(-5, 2**31, (total,), generator=generator).to(device),
        rows=torch.randint(-9, 2**40, (bs,), generator=generator).to(device),
        prefix_lens=torch.randint(0, 2**27, (bs,), generator=generator).to(device),
        offsets=make_offsets(lengths, device),
        seeds=random_words(bs, device=device, seed=3),
        first_slot=1,
        violations=violations,
        **{"step": 2**33, **options},
    )
    return records, writers, violations


@pytest.mark.parametrize("lengths", SHAPES, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_equals_the_reference(triton_backend: Backend, device: torch.device, lengths: list[int]):
    expected, found = write(REFERENCE, device, lengths), write(triton_backend, device, lengths)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert int(found[2].count) == 0


@pytest.mark.parametrize("block", [1, 2, 64, 512])
@pytest.mark.parametrize("earlier", [1, 16, 256])
def test_every_split_gives_the_same(triton_backend: Backend, device: torch.device, block: int, earlier: int):
    lengths = [33, 0, 130, 1, 2]
    expected = write(REFERENCE, device, lengths)
    found = write(triton_backend, device, lengths, block=block, earlier=max(earlier, 1))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("lengths", SHAPES, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
@pytest.mark.parametrize(("tile", "block"), [(16, 16), (64, 16), (256, 64), (16, 64)])
def test_sums_of_tiles_give_the_same(
    triton_backend: Backend, device: torch.device, lengths: list[int], tile: int, block: int
):
    expected = write(REFERENCE, device, lengths)
    found = write(triton_backend, device, lengths, block=block, earlier=16, tile=tile)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert int(found[2].count) == 0


def test_more_tokens_than_one_launch_takes(triton_backend: Backend, device: torch.device):
    lengths = [65_000, 0, 1, 70_000]
    expected, found = write(REFERENCE, device, lengths), write(triton_backend, device, lengths)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def count_hashes(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Hashes of tokens and sums of tiles that a forward of ``count`` tokens looks at, at most, by its launches."""
    launched: list[tuple[int, tuple[int, ...]]] = []

    def launch(kernel: Any, programs: int, arguments: Any, constants: tuple[int, ...], **_: Any) -> None:
        launched.append((programs, constants))

    backend = load_triton()
    monkeypatch.setattr("kvcanary_plugin.kernels.write_triton.launch", launch)
    write(backend, torch.device("cpu"), [count])
    *ahead, (programs, (*_, tile)) = launched
    hashes = programs * (tile + count // tile if tile else count)
    return hashes + sum(others * constants[0] for others, constants in ahead)


def test_a_long_forward_costs_what_its_tokens_cost_and_not_their_square(monkeypatch: pytest.MonkeyPatch):
    few, many, most = (count_hashes(1 << bits, monkeypatch) for bits in (17, 19, 21))
    assert many / few < 4.2
    assert most / many < 4.2
    assert most < 12 << 21


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths",
    [[100_000], [1] * 4096, [8192] * 3, [16381, 7] * 5, [1 << 20], [65_537, 0, 1, 70_000]],
    ids=["long", "many", "wide", "odd", "million", "tiles"],
)
def test_large_batches(lengths: list[int]):
    device = torch.device("cuda")
    expected, found = write(REFERENCE, device, lengths), write(load_triton(), device, lengths)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_the_step_may_lie_on_the_device(triton_backend: Backend, device: torch.device):
    expected = write(REFERENCE, device, [3, 2])
    found = write(triton_backend, device, [3, 2], step=torch.tensor([2**33], device=device))
    assert torch.equal(found[1], expected[1])


def test_slots_out_of_range_are_reported_and_not_written(triton_backend: Backend, device: torch.device):
    lengths = [3, 70, 2]
    damage = {0: -1, 5: 0, 30: sum(lengths) + 9, 40: 2**31 + 5, 41: 2**62, 74: -(2**63)}
    expected, found = (write(backend, device, lengths, damage=damage) for backend in (REFERENCE, triton_backend))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert rows_of(found[2]) == rows_of(expected[2])
    assert rows_of(found[2])[0] == len(damage)
    assert {row[r.ROW_KIND] for row in rows_of(found[2])[1]} == {r.Kind.WRITE_RANGE}


def test_garbage_offsets_write_nothing_outside(triton_backend: Backend, device: torch.device):
    """Offsets come from the device: whatever they hold, nothing outside the tensors may be touched."""
    records = torch.zeros((32, r.RECORD_WORDS), dtype=torch.int64, device=device)
    writers = torch.zeros(32, dtype=torch.int64, device=device)
    garbage = ([5, -3, 2**40], [0, 2**62, 8], [-(2**62), 4, 8], [8, 8, 8])
    for offsets, options in itertools.product(garbage, ({}, {"tile": 16, "block": 16, "earlier": 16})):
        triton_backend.write_chain(
            records=records,
            writers=writers,
            slots=torch.arange(8, device=device) + 1,
            tokens=torch.arange(8, device=device),
            rows=torch.ones(2, dtype=torch.int64, device=device),
            prefix_lens=torch.zeros(2, dtype=torch.int64, device=device),
            offsets=torch.tensor(offsets, device=device),
            seeds=torch.zeros(2, dtype=torch.int64, device=device),
            step=1,
            first_slot=1,
            violations=poisoned_violations(4, device),
            **options,
        )
    assert not records[9:].any()
    assert not records[0].any()
