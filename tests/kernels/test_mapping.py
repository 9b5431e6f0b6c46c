"""Companion spaces: slots looked up in a table, and only a window of each prefix looked at."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import make_batch, make_offsets, poisoned_violations, random_words, rows_of

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import NUMPY, REFERENCE, Backend

CPU = torch.device("cpu")
LENGTHS = [300, 1, 0, 64, 65, 7]
WINDOWS = [None, 1, 5, 64, 65, 10**6]
DTYPES = [torch.int64, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_are_looked_up(triton_backend: Backend, device: torch.device, dtype: torch.dtype):
    mapping = torch.tensor([0, 5, -1, 9, 2**31 - 1, 0], dtype=dtype, device=device)
    slots = torch.tensor([1, 3, 4, 0, 2, 5, 6, -1, 2**40, -(2**63)] * 60, device=device)
    outs = []
    for backend in (REFERENCE, triton_backend):
        out = torch.full_like(slots, -77)
        backend.map_slots(slots=slots, mapping=mapping, out=out)
        outs.append(out)
    assert torch.equal(*outs)
    assert outs[0][:10].tolist() == [5, 9, 2**31 - 1, -1, -1, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("ratio", [1, 3, 4, 128])
def test_slots_that_complete_a_group_stand_for_it(triton_backend: Backend, device: torch.device, ratio: int):
    slots = torch.cat((torch.arange(-5, 1300), torch.tensor([2**40, 2**63 - 1, -(2**63)]))).to(device)
    outs = []
    for backend in (REFERENCE, triton_backend):
        out = torch.full_like(slots, -77)
        backend.group_slots(slots=slots, ratio=ratio, first_slot=2 * ratio, slot_count=9 * ratio, out=out)
        outs.append(out)
    assert torch.equal(*outs)
    expected = [
        slot // ratio if slot % ratio == ratio - 1 and 2 * ratio <= slot < 9 * ratio else -1 for slot in slots.tolist()
    ]
    assert outs[0].tolist() == expected
    triton_backend.group_slots(slots=slots[:0], ratio=ratio, first_slot=0, slot_count=9, out=outs[0][:0])


def make(device: torch.device, window: int | None, dtype: torch.dtype = torch.int64, lengths=LENGTHS):
    """A batch whose rows name slots of a main space; its records lie elsewhere, and only those of the window exist."""
    batch = make_batch(lengths, device)
    slot_count = batch.records.shape[0]
    order = torch.randperm(slot_count - 1, generator=torch.Generator().manual_seed(3)).to(device) + 1
    mapping = torch.zeros(slot_count, dtype=dtype, device=device)
    mapping[1:] = order.to(dtype)
    records, writers = torch.empty_like(batch.records), torch.empty_like(batch.writers)
    records[mapping.long()], writers[mapping.long()] = batch.records, batch.writers
    if window is not None:
        for row, length in zip(batch.rows.tolist(), lengths, strict=True):
            gone = batch.req_to_token[row, : max(length - window, 0)].long()
            records[mapping[gone].long()] = 0
            mapping[gone] = 0
    return dataclasses.replace(batch, records=records, writers=writers), mapping


def verify(batch, backend: Backend, mapping: torch.Tensor, window: int | None, **options):
    found = poisoned_violations(4096, batch.records.device)
    backend.verify_prefixes(
        records=batch.records,
        writers=batch.writers,
        req_to_token=batch.req_to_token,
        rows=batch.rows,
        offsets=batch.offsets,
        anchors=batch.anchors,
        end_points=batch.end_points,
        total=batch.total,
        first_slot=1,
        violations=found,
        mapping=mapping,
        window=window,
        **options,
    )
    return rows_of(found)


def damage(batch, mapping: torch.Tensor, window: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(12):
        slot = int(torch.randint(1, batch.records.shape[0], (1,), generator=generator))
        word = (r.CHAIN, r.IDENTITY)[seed % 2]
        batch.records[slot, word] ^= 1 << int(torch.randint(0, 63, (1,), generator=generator))
    for value in (0, -1, batch.records.shape[0], 2**31 - 1):
        mapping[int(torch.randint(1, len(mapping), (1,), generator=generator))] = value
    last = mapping[batch.req_to_token[batch.rows[3], 63].long()].long()
    batch.records[last.clamp(1, batch.records.shape[0] - 1), r.CHAIN] += 1
    batch.req_to_token[batch.rows[0], 290] = 10**6
    batch.req_to_token[batch.rows[3], 60] = -3


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [NUMPY, REFERENCE], ids=["numpy", "torch"])
def test_sound_windows_are_silent(backend: Backend, window: int | None, dtype: torch.dtype):
    batch, mapping = make(CPU, window, dtype)
    assert verify(batch, backend, mapping, window) == (0, [])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", range(4))
def test_numpy_finds_what_the_reference_finds(window: int | None, seed: int):
    batch, mapping = make(CPU, window)
    damage(batch, mapping, window, seed)
    expected = verify(batch, REFERENCE, mapping, window)
    assert expected[0] > 0
    assert verify(batch, NUMPY, mapping, window) == expected


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block", [4, 64, 256])
def test_triton_finds_what_the_reference_finds(
    triton_backend: Backend, device: torch.device, window: int | None, block: int
):
    batch, mapping = make(device, window, DTYPES[block % 8 // 4])
    assert verify(batch, triton_backend, mapping, window, block=block) == (0, [])
    damage(batch, mapping, window, block % 3)
    expected = verify(batch, REFERENCE, mapping, window)
    assert expected[0] > 0
    assert verify(batch, triton_backend, mapping, window, block=block) == expected


@pytest.mark.parametrize("backend", [NUMPY, REFERENCE], ids=["numpy", "torch"])
def test_only_the_window_is_looked_at(backend: Backend):
    batch, mapping = make(CPU, 10)
    slots = mapping[batch.req_to_token[batch.rows[0], :300].long()]
    batch.records[slots[290], r.CHAIN] += 1  # the first place of the window: its own link is not known, the next one is
    _, rows = verify(batch, backend, mapping, 10)
    assert [(row[r.ROW_KIND], row[r.ROW_POSITION]) for row in rows] == [(r.Kind.LINK, 291)]
    mapping[batch.req_to_token[batch.rows[0], 295].long()] = 0
    _, rows = verify(batch, backend, mapping, 10)
    assert (r.Kind.SLOT_RANGE, 0, 295, 0) in [tuple(row[:4]) for row in rows]


@pytest.mark.parametrize("backend", [NUMPY, REFERENCE], ids=["numpy", "torch"])
def test_tokens_without_a_slot_are_left_out(backend: Backend):
    check_partial(backend, CPU)


def test_tokens_without_a_slot_are_left_out_by_triton(triton_backend: Backend, device: torch.device):
    check_partial(triton_backend, device)


def check_partial(backend: Backend, device: torch.device) -> None:
    slots = torch.tensor([-1, -1, 4, 5, 9, -1, 100], device=device)
    written = []
    for implementation in (REFERENCE, backend):
        records = random_words(10, r.RECORD_WORDS, device=device, seed=1)
        writers = random_words(10, device=device, seed=2)
        found = poisoned_violations(8, device)
        implementation.write_chain(
            records=records,
            writers=writers,
            slots=slots,
            tokens=torch.arange(7, device=device),
            rows=torch.tensor([1, 2], device=device),
            prefix_lens=torch.tensor([3, 0], device=device),
            offsets=make_offsets([5, 2], device),
            seeds=torch.tensor([7, 8], device=device),
            step=3,
            first_slot=1,
            violations=found,
            is_partial=True,
        )
        assert [row[r.ROW_SLOT] for row in rows_of(found)[1]] == [100]
        written.append((records, writers))
    assert torch.equal(written[0][0], written[1][0])
    assert torch.equal(written[0][1], written[1][1])
