from __future__ import annotations

import pytest
import torch
from kernel_cases import Batch, make_batch, rows_of

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend

SHAPES = [[1], [2], [255], [256], [257], [0, 3, 0, 70, 1], [1] * 37, [300, 5, 0], [0, 0, 1021]]
GARBAGE = [-1, 0, 10**6, -(2**31), 2**31 - 1]


def compare(batch: Batch, backend: Backend, **options) -> list[list[int]]:
    """Rows that the backend finds, once they are what the reference finds."""
    expected, found = batch.verify(REFERENCE), batch.verify(backend, **options)
    assert rows_of(found) == rows_of(expected)
    return rows_of(found)[1]


@pytest.mark.parametrize("lengths", SHAPES, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_sound_batches_are_silent(triton_backend: Backend, device: torch.device, lengths: list[int]):
    batch = make_batch(lengths, device)
    assert rows_of(batch.verify(triton_backend)) == (0, [])
    assert rows_of(batch.verify(REFERENCE)) == (0, [])


@pytest.mark.parametrize("block", [1, 4, 64, 1024])
@pytest.mark.parametrize("stride", [None, 400])
def test_every_damage_of_a_record(triton_backend: Backend, device: torch.device, block: int, stride: int | None):
    batch = make_batch([3, 130, 0, 66, 1], device, stride=stride)
    generator = torch.Generator().manual_seed(block)
    for word in (r.CHAIN, r.IDENTITY):
        for bit in (0, 31, 32, 59, 60, 63):
            slot = int(torch.randint(1, batch.total, (1,), generator=generator))
            batch.records[slot, word] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
    kinds = {row[r.ROW_KIND] for row in compare(batch, triton_backend, block=block)}
    assert {r.Kind.LINK, r.Kind.POSITION, r.Kind.DEAD_SLOT} <= kinds


@pytest.mark.parametrize("slot", GARBAGE)
@pytest.mark.parametrize("position", [0, 1, 63, 64, 129])
def test_slots_out_of_range_are_not_followed(triton_backend: Backend, device: torch.device, slot: int, position: int):
    batch = make_batch([7, 130], device)
    batch.req_to_token[batch.rows[1], position] = slot
    rows = compare(batch, triton_backend, block=64)
    assert [r.Kind.SLOT_RANGE, 1, position, slot] in [row[:4] for row in rows]


@pytest.mark.parametrize("row", [-1, 0, 3, 2**31 + 1, 2**62, -(2**63)])
def test_rows_out_of_range_are_not_followed(triton_backend: Backend, device: torch.device, row: int):
    batch = make_batch([70, 5], device)
    batch.rows[0] = row
    assert [found[:4] for found in compare(batch, triton_backend, block=16)] == [[r.Kind.ROW_RANGE, 0, 0, row]]


def test_positions_past_a_row_are_not_followed(triton_backend: Backend, device: torch.device):
    batch = make_batch([9, 70], device)
    batch.lengths = [9, 90]
    batch.offsets[2] += 20
    rows = compare(batch, triton_backend, block=16)
    past = [row[r.ROW_POSITION] for row in rows if row[r.ROW_KIND] == r.Kind.SLOT_RANGE and row[r.ROW_SLOT] == -1]
    assert set(range(73, 90)) <= set(past)


def test_exchanged_slots_and_prefixes(triton_backend: Backend, device: torch.device):
    batch = make_batch([40, 40, 40], device)
    first, second, third = batch.rows.tolist()
    batch.req_to_token[first, [3, 9]] = batch.req_to_token[first, [9, 3]]
    batch.req_to_token[[second, third]] = batch.req_to_token[[third, second]]
    kinds = [row[r.ROW_KIND] for row in compare(batch, triton_backend)]
    assert kinds.count(r.Kind.POSITION) == 2
    # Each of the others reads a prefix that is whole but not its own: the first link, from another anchor, and the end.
    assert kinds.count(r.Kind.END_POINT) == 2


def test_end_points(triton_backend: Backend, device: torch.device):
    batch = make_batch([5, 0, 64, 65], device)
    batch.end_points += 1
    rows = compare(batch, triton_backend, block=64)
    assert [row[:3] for row in rows] == [[r.Kind.END_POINT, 0, 4], [r.Kind.END_POINT, 2, 63], [r.Kind.END_POINT, 3, 64]]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[8192] * 64, [1] * 5000, [99_991], [37, 1024, 0, 4099] * 40])
def test_large_batches(lengths: list[int]):
    from kvcanary_plugin.kernels.backend import load_triton

    batch = make_batch(lengths, torch.device("cuda"))
    assert rows_of(batch.verify(load_triton())) == (0, [])
    damaged = torch.randperm(batch.total, device="cuda")[:50] + 1
    batch.records[damaged, r.CHAIN] += 1
    compare(batch, load_triton())
