from __future__ import annotations

import pytest
import torch
from kernel_cases import make_table, poisoned_violations, random_words, rows_of

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.kernels.violations import ViolationBuffer
from kvcanary_plugin.pool_patcher.sources import SourceTable

SLOTS = 60
STEP = 2**31 + 3


class Pool:
    """A pool with sound seals on all slots and every third slot dead."""

    def __init__(self, device: torch.device, widths: list[int]) -> None:
        self.table: SourceTable = make_table(widths, SLOTS, device)
        self.records = random_words(SLOTS, r.RECORD_WORDS, device=device, seed=1)
        self.records[:, r.IDENTITY] |= r.LIVE_BIT
        self.records[::3, r.IDENTITY] &= ~r.LIVE_BIT
        self.writers = random_words(SLOTS, device=device, seed=2)
        every = torch.arange(SLOTS, device=device)
        REFERENCE.seal_slots(records=self.records, table=self.table, slots=every)

    def damage(self, *places: tuple[int, int]) -> None:
        for source, slot in places:
            self.table.sources[source].rows[slot, 0, -1] ^= 0x10

    def run(self, operation, **arguments) -> ViolationBuffer:
        violations = poisoned_violations(16, self.records.device)
        operation(records=self.records, writers=self.writers, table=self.table, violations=violations, **arguments)
        return violations


@pytest.fixture(params=[[64, 64, 13], [8] * 5], ids=str)
def pool(request: pytest.FixtureRequest, device: torch.device) -> Pool:
    return Pool(device, request.param)


def test_sound_slots_are_silent(triton_backend: Backend, pool: Pool):
    assert rows_of(pool.run(triton_backend.scrub_range, start=0, count=SLOTS)) == (0, [])


@pytest.mark.parametrize(("start", "count"), [(0, SLOTS), (1, 1), (7, 31), (59, 10), (60, 4), (10, 0)])
def test_ranges(triton_backend: Backend, pool: Pool, start: int, count: int):
    pool.damage((0, 1), (1, 10), (2, 10), (0, 9), (2, 59), (1, 30))  # 9 and 30 are dead
    expected = rows_of(pool.run(REFERENCE.scrub_range, start=start, count=count))
    assert rows_of(pool.run(triton_backend.scrub_range, start=start, count=count)) == expected
    assert {row[r.ROW_SLOT] for row in expected[1]} == {1, 10, 59} & set(range(start, start + count))


def test_listed_slots(triton_backend: Backend, pool: Pool, device: torch.device):
    pool.damage((0, 5), (1, 7), (0, 3))
    slots = torch.tensor([7, 3, -1, 5, SLOTS, 2**33, 8], device=device)
    expected = rows_of(pool.run(REFERENCE.check_slots, slots=slots, request=2))
    assert rows_of(pool.run(triton_backend.check_slots, slots=slots, request=2)) == expected
    assert [row[:4:3] for row in expected[1]] == [[r.Kind.CONTENT, 5], [r.Kind.CONTENT, 7]]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("count", [0, 20])
def test_seal_and_scrub(triton_backend: Backend, device: torch.device, count: int, on_device: bool):
    """Slots sealed by the same launch are never compared with what they held before; those of other forwards are."""
    results = []
    for backend in (REFERENCE, triton_backend):
        pool = Pool(device, [64, 13, 64])
        pool.damage(*((0, slot) for slot in range(10, 22)))
        slots = torch.tensor([11, 13, 50, SLOTS, -1], device=device)
        pool.writers[slots[:3]] = (STEP << r.WRITER_ROW_BITS) + 5
        pool.writers[[10, 14]] = ((STEP - 1) << r.WRITER_ROW_BITS) + r.WRITER_ROW_MASK
        start, step = 10, STEP
        if on_device and backend is triton_backend:
            start, step = torch.tensor([[start], [step]], device=device)
        violations = pool.run(backend.seal_and_scrub, slots=slots, start=start, count=count, step=step)
        results.append((rows_of(violations), pool.records[1:]))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    reported = {row[r.ROW_SLOT] for row in results[0][0][1]}
    assert reported == ({10, 14, 16, 17, 19, 20} if count else set())


@pytest.mark.gpu
@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_being_sealed_is_never_reported(triton_backend: Backend, device: torch.device, is_told: bool):
    """Thousands of programs seal and compare the same slots at the same time. Without the step they cannot know."""
    count, step = 8192, 1
    table = make_table([256] * 8, count, device)
    records = torch.zeros((count, r.RECORD_WORDS), dtype=torch.int64, device=device)
    records[:, r.IDENTITY] = r.LIVE_BIT
    writers = torch.zeros(count, dtype=torch.int64, device=device)
    violations = poisoned_violations(16, device)
    triton_backend.seal_slots(records=records, table=table, slots=torch.arange(count, device=device))
    for step in range(1, 20_001):
        slots = torch.randint(count, (64,), device=device).unique()
        for source in table.sources:
            source.rows[slots, 0] ^= 1
        writers[slots] = step << r.WRITER_ROW_BITS
        triton_backend.seal_and_scrub(
            records=records,
            writers=writers,
            table=table,
            slots=slots,
            start=0,
            count=count,
            step=step if is_told else 0,
            violations=violations,
        )
        if step % 2000 == 0 and int(violations.count):
            break
    assert (int(violations.count) == 0) == is_told
