"""Entries that stand for whole groups of positions: the record of each is that of the last slot of its group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from kernel_cases import make_offsets, poisoned_violations, random_words, rows_of

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.kernels.violations import ViolationBuffer

CPU = torch.device("cpu")
SPARE = 3
SHAPES = {
    "one token": (4, [1]),
    "one group": (4, [4]),
    "a group and nothing": (4, [0, 4, 0]),
    "none whole": (128, [127, 1, 0]),
    "around a group": (4, [3, 4, 5, 7, 8, 9]),
    "of 128": (128, [128, 300, 0, 127, 129, 256]),
    "of three": (3, [10, 2, 3, 100]),
    "of one": (1, [5, 0, 1]),
    "many requests": (4, [i % 13 for i in range(70)]),
    "long": (4, [1500, 1, 0, 257]),
}


@dataclass
class Grouped:
    """Requests whose slots lie in whole groups, with sound records of all slots and of the entries of their groups."""

    ratio: int
    lengths: list[int]
    main: torch.Tensor
    records: torch.Tensor
    writers: torch.Tensor
    req_to_token: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor

    def verify(self, backend: Backend, *, spare: int = 0, capacity: int = 4096, **options) -> tuple[int, list]:
        found = poisoned_violations(capacity, self.records.device)
        backend.verify_groups(
            records=self.records,
            writers=self.writers,
            main=self.main,
            req_to_token=self.req_to_token,
            rows=self.rows,
            offsets=self.offsets,
            total=sum(self.lengths) + spare,
            ratio=self.ratio,
            first_slot=1,
            main_first_slot=self.ratio,
            violations=found,
            **options,
        )
        return rows_of(found)

    def slot_of(self, request: int, position: int) -> int:
        return int(self.req_to_token[self.rows[request], position])

    def entry_of(self, request: int, position: int) -> int:
        return self.slot_of(request, position) // self.ratio


def make(ratio: int, lengths: list[int], device: torch.device, seed: int = 0) -> Grouped:
    generator = torch.Generator().manual_seed(seed)
    bs, context, total = len(lengths), max(lengths) + 2, sum(lengths)
    groups = sum(-(-length // ratio) for length in lengths)
    order = (torch.randperm(groups + SPARE, generator=generator) + 1).to(device)  # the first is padding
    table = torch.randint(-(2**31), 2**31 - 1, (bs + 1, context + 5), dtype=torch.int32).to(device)[:, :context]
    rows = (torch.randperm(bs, generator=generator) + 1).to(device)
    offsets = make_offsets(lengths, device)
    slots = torch.zeros(total, dtype=torch.int64, device=device)
    taken = 0
    for row, (start, stop) in zip(rows.tolist(), pairwise(offsets.tolist()), strict=True):
        position = torch.arange(stop - start, device=device)
        own = order[taken + position // ratio] * ratio + position % ratio
        taken += -(-(stop - start) // ratio)
        slots[start:stop] = own
        table[row, : stop - start] = own.to(torch.int32)
    count = groups + SPARE + 1
    entries = torch.full_like(slots, -77)
    REFERENCE.group_slots(slots=slots, ratio=ratio, first_slot=ratio, slot_count=count * ratio, out=entries)
    kept = []
    for places, size in ((slots, count * ratio), (entries, count)):
        records = random_words(size, r.RECORD_WORDS, device=device, seed=seed + len(kept))
        records[:, r.IDENTITY] &= ~r.LIVE_BIT
        writers = random_words(size, device=device, seed=seed + 9)
        REFERENCE.write_chain(
            records=records,
            writers=writers,
            slots=places,
            tokens=torch.randint(0, 2**17, (total,), generator=torch.Generator().manual_seed(seed)).to(device),
            rows=rows,
            prefix_lens=torch.zeros(bs, dtype=torch.int64, device=device),
            offsets=offsets,
            seeds=random_words(bs, device=device, seed=seed + 2),
            step=7,
            first_slot=1,
            violations=ViolationBuffer(1, device),
            is_partial=True,
        )
        kept.append((records, writers))
    return Grouped(ratio, lengths, kept[0][0], *kept[1], table, rows, offsets)


def damage(case: Grouped, seed: int) -> None:
    """Everything that may be wrong with either side, at random places."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    for records in (case.records, case.main):
        for word in (r.CHAIN, r.IDENTITY):
            for _ in range(6):
                records[draw(records.shape[0]), word] ^= 1 << draw(63)
        for _ in range(3):
            records[draw(records.shape[0]), r.IDENTITY] ^= r.LIVE_BIT
    for value in (0, -1, -(2**31), 2**31 - 1, case.main.shape[0], case.ratio - 1, case.main.shape[0] - 1):
        case.req_to_token[draw(case.req_to_token.shape[0]), draw(case.req_to_token.shape[1])] = value
    case.records = case.records[: case.records.shape[0] - draw(3)].clone()  # and some slots have no entry at all
    for value in (0, -1, 10**9, case.req_to_token.shape[0]):
        if draw(2):
            case.rows[draw(len(case.lengths))] = value


@pytest.mark.parametrize("shape", SHAPES)
def test_sound_groups_are_silent(shape: str):
    assert make(*SHAPES[shape], CPU).verify(REFERENCE) == (0, [])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [4, 64])
def test_triton_is_silent_too(triton_backend: Backend, device: torch.device, shape: str, block: int):
    case = make(*SHAPES[shape], device)
    for spare in (0, 1, 700):  # a recorded launch has room for more
        assert case.verify(triton_backend, spare=spare, block=block) == (0, [])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_triton_finds_what_the_reference_finds(triton_backend: Backend, device: torch.device, shape: str, seed: int):
    case = make(*SHAPES[shape], device, seed)
    damage(case, seed)
    expected = case.verify(REFERENCE)
    assert case.verify(triton_backend, block=(2, 4, 16, 64, 64)[seed]) == expected
    assert case.verify(REFERENCE, spare=1000) == expected


def test_damage_is_found_at_all():
    found = 0
    for seed in range(5):
        case = make(*SHAPES["long"], CPU, seed)
        damage(case, seed)
        found += case.verify(REFERENCE)[0]
    assert found > 10


def test_rows_without_room_are_counted(triton_backend: Backend, device: torch.device):
    case = make(4, [400], device)
    case.records[1:, r.CHAIN] += 1
    for backend in (REFERENCE, triton_backend):
        count, rows = case.verify(backend, capacity=16)
        assert (count, len(rows)) == (100, 16)
        assert {tuple(row) for row in rows} <= {tuple(row) for row in case.verify(REFERENCE)[1]}


def kinds_of(case: Grouped) -> list[tuple[int, int, int, int]]:
    count, rows = case.verify(REFERENCE)
    assert count == len(rows)
    return [tuple(row[:4]) for row in rows]


def test_each_kind_is_named():
    case = make(4, [3, 40, 8], CPU)
    case.records[case.entry_of(1, 7), r.CHAIN] += 1
    assert kinds_of(case) == [(r.Kind.LINK, 1, 7, case.entry_of(1, 7))]
    case.records[case.entry_of(1, 7), r.CHAIN] -= 1

    case.records[case.entry_of(1, 11), r.IDENTITY] ^= 5  # another token
    assert kinds_of(case) == [(r.Kind.LINK, 1, 11, case.entry_of(1, 11))]
    case.records[case.entry_of(1, 11), r.IDENTITY] ^= 5

    case.records[case.entry_of(1, 39)] = case.records[case.entry_of(2, 3)]
    assert kinds_of(case) == [(r.Kind.POSITION, 1, 39, case.entry_of(1, 39))]
    case.records[case.entry_of(1, 39), r.IDENTITY] &= ~r.LIVE_BIT
    assert kinds_of(case) == [(r.Kind.DEAD_SLOT, 1, 39, case.entry_of(1, 39))]

    case = make(4, [4, 8], CPU)
    last = max(case.entry_of(0, 3), case.entry_of(1, 3), case.entry_of(1, 7))
    case.records = case.records[:last]
    assert [(kind, slot) for kind, _, _, slot in kinds_of(case)] == [(r.Kind.SLOT_RANGE, last)]


def test_an_entry_that_is_padding_is_not_followed():
    case = make(4, [8], CPU)
    case.main[:4] = case.main[torch.tensor([case.slot_of(0, position) for position in range(4, 8)])]
    case.req_to_token[case.rows[0], 7] = 3  # the padding's, which holds just the right record
    assert case.verify(REFERENCE) == (0, [])  # verify_prefixes says that this slot may not be read
    case.records[0] = -1
    assert case.verify(REFERENCE) == (0, [])


def test_what_is_wrong_with_the_slots_is_left_to_their_own_check():
    case = make(4, [40], CPU)
    wrong = {7: (r.IDENTITY, r.LIVE_BIT), 11: (r.IDENTITY, 1 << 33)}
    for position, (word, bits) in wrong.items():
        case.main[case.slot_of(0, position), word] ^= bits
    case.req_to_token[case.rows[0], 15] = 10**6
    case.req_to_token[case.rows[0], 19] = case.slot_of(0, 23)
    assert case.verify(REFERENCE) == (0, [])
    case.main[case.slot_of(0, 27), r.CHAIN] += 1  # still a live token of that position: now they disagree
    assert [position for _, _, position, _ in kinds_of(case)] == [27]
