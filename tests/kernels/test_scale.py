"""Every backend where numbers are large: rows past 2^31 entries, positions up to the last, 2^24 slots, late steps."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch
from kernel_cases import make_offsets, poisoned_violations, random_words, rows_of

from kvcanary_plugin.kernels import ledger as g
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import NUMPY, REFERENCE, Backend, load_triton
from kvcanary_plugin.kernels.plan import launch_plan_offsets_kernel
from kvcanary_plugin.kernels.violations import ViolationBuffer
from kvcanary_plugin.pool_patcher.sources import SourceTable, make_row_source

SLOTS = 1 << 24
CONTEXT = 1 << 20
LAST_STEP = (1 << 39) - 1
LAST_SERIAL = (1 << g.SERIAL_BITS) - 1
HIGH_ROW = 4096  # its entries begin 2^32 past those of row 0


pytestmark = pytest.mark.filterwarnings(  # of the interpreter, see conftest.py
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
)

CPU = torch.device("cpu")
WAYS = ["torch", "numpy", "interpreter", pytest.param("gpu", marks=pytest.mark.gpu)]
SLOW_WAYS = ["torch", "numpy", pytest.param("interpreter", marks=pytest.mark.slow), WAYS[-1]]


def pick(way: str) -> tuple[Backend, torch.device]:
    """A backend and where it runs; skips what this process cannot run."""
    is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if way == "interpreter" and not is_interpreting:
        pytest.skip("set TRITON_INTERPRET=1 to run the Triton kernels without a GPU")
    if way == "gpu" and (is_interpreting or not torch.cuda.is_available()):
        pytest.skip("needs a GPU and no TRITON_INTERPRET")
    if way in ("interpreter", "gpu"):
        return load_triton(), torch.device("cuda" if way == "gpu" else "cpu")
    return {"torch": REFERENCE, "numpy": NUMPY}[way], CPU


def sparse(device: torch.device, *shape: int, dtype: type = np.int64) -> torch.Tensor:
    """Zeros of which, on a CPU, only the pages that somebody writes to take memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.from_numpy(np.empty(0, dtype=dtype)).dtype, device=device)
    memory = mmap.mmap(-1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=dtype).reshape(shape))


class Rows:
    """One request on a high row, its slots the last ones of the pool, with sound records."""

    def __init__(self, device: torch.device, length: int, row: int = HIGH_ROW) -> None:
        self.device = device
        self.records, self.writers = sparse(device, SLOTS, r.RECORD_WORDS), sparse(device, SLOTS)
        self.table = sparse(device, row + 1, CONTEXT, dtype=np.int32)
        self.slots = torch.arange(SLOTS - length, SLOTS, device=device).flip(0)
        self.table[row, :length] = self.slots.int()
        self.rows, self.offsets = torch.tensor([row], device=device), make_offsets([length], device)
        self.anchors = random_words(1, device=device, seed=3)
        self.tokens = torch.randint(0, 1 << 17, (length,), generator=torch.Generator().manual_seed(0)).to(device)
        self.write(REFERENCE)
        self.end_points = self.records[self.slots[-1:], r.CHAIN]

    def write(self, backend: Backend, step: int = 7, prefix: int = 0) -> ViolationBuffer:
        violations = poisoned_violations(8, self.device)
        backend.write_chain(
            records=self.records,
            writers=self.writers,
            slots=self.slots,
            tokens=self.tokens,
            rows=self.rows,
            prefix_lens=torch.tensor([prefix], device=self.device),
            offsets=self.offsets,
            seeds=self.anchors,
            step=step,
            first_slot=1,
            violations=violations,
        )
        return violations

    def verify(self, backend: Backend, **options: int) -> tuple[int, list[list[int]]]:
        violations = poisoned_violations(64, self.device)
        backend.verify_prefixes(
            records=self.records,
            writers=self.writers,
            req_to_token=self.table,
            rows=self.rows,
            offsets=self.offsets,
            anchors=self.anchors,
            end_points=self.end_points,
            total=len(self.slots),
            first_slot=1,
            violations=violations,
            **options,
        )
        return rows_of(violations)


@pytest.mark.parametrize("way", SLOW_WAYS)
def test_a_million_positions_on_a_high_row(way: str) -> None:
    backend, device = pick(way)
    case, last = Rows(device, CONTEXT), CONTEXT - 1
    # Interpreted, what is sound is quick in large blocks and what is not in small ones.
    large, small = ({"block": 1 << bits} if way == "interpreter" else {} for bits in (15, 11))
    assert case.verify(backend, **large) == (0, [])

    row = case.table[HIGH_ROW]
    row[[last - 1, last]] = row[[last, last - 1]]
    case.records[case.slots[600_000], r.CHAIN] ^= 1 << 63
    count, found = case.verify(backend, **small)
    assert {(line[r.ROW_KIND], line[r.ROW_POSITION], line[r.ROW_SLOT]) for line in found} == {
        (r.Kind.POSITION, last - 1, SLOTS - CONTEXT),
        (r.Kind.POSITION, last, SLOTS - CONTEXT + 1),
        (r.Kind.END_POINT, last, SLOTS - CONTEXT + 1),
        (r.Kind.LINK, 600_000, SLOTS - 1 - 600_000),
        (r.Kind.LINK, 600_001, SLOTS - 2 - 600_000),
    }
    assert count == len(found)
    assert (count, found) == case.verify(REFERENCE)


@pytest.mark.parametrize("way", WAYS[2:])
def test_a_program_past_all_positions_does_nothing(way: str) -> None:
    """A launch for an upper bound of positions has such; 2^32 past the first one their place looks like the first."""
    backend, device = pick(way)
    case = Rows(device, 64)
    case.offsets -= 1 << 32
    violations = poisoned_violations(8, case.device)
    backend.verify_prefixes(
        records=case.records,
        writers=case.writers,
        req_to_token=case.table,
        rows=case.rows,
        offsets=case.offsets,
        anchors=case.anchors,
        end_points=case.end_points,
        total=1,
        first_slot=1,
        violations=violations,
    )
    assert rows_of(violations) == (0, [])


@pytest.mark.parametrize("way", WAYS)
def test_records_at_the_last_position_of_the_last_step(way: str) -> None:
    backend, device = pick(way)
    case, prefix = Rows(device, 100, row=5), r.POSITION_MASK - 99
    case.rows[0] = r.WRITER_ROW_MASK
    assert rows_of(case.write(backend, step=LAST_STEP, prefix=prefix)) == (0, [])
    identity = case.records[case.slots, r.IDENTITY]
    assert (identity >> 32).tolist() == [r.LIVE | position for position in range(prefix, r.POSITION_MASK + 1)]
    assert (identity & r.TOKEN_MASK).tolist() == case.tokens.tolist()
    assert set((case.writers[case.slots] >> r.WRITER_ROW_BITS).tolist()) == {LAST_STEP}
    assert set((case.writers[case.slots] & r.WRITER_ROW_MASK).tolist()) == {r.WRITER_ROW_MASK}

    other = Rows(device, 100, row=5)
    other.write(REFERENCE, prefix=prefix)
    assert torch.equal(case.records[case.slots], other.records[other.slots])


def test_a_window_at_the_last_position() -> None:
    """On a CPU only what lies within the window is looked at, so that this takes no time."""
    length, window = r.POSITION_MASK + 1, 64
    case = Rows(CPU, window, row=1)
    case.write(NUMPY, prefix=length - window)
    case.end_points = case.records[case.slots[-1:], r.CHAIN]
    case.table = sparse(CPU, 2, length, dtype=np.int32)
    case.table[1, -window:] = case.slots.int()
    case.offsets = torch.tensor([0, length])
    violations = poisoned_violations(8, case.device)
    NUMPY.verify_prefixes(
        records=case.records,
        writers=case.writers,
        req_to_token=case.table,
        rows=case.rows,
        offsets=case.offsets,
        anchors=case.anchors,
        end_points=case.end_points,
        total=length,
        first_slot=1,
        violations=violations,
        window=window,
    )
    assert rows_of(violations) == (0, [])


@pytest.mark.parametrize("way", WAYS)
def test_the_ledger_with_the_last_serial_row_and_step(way: str) -> None:
    backend, device = pick(way)
    length, row = 300, HIGH_ROW
    case = Rows(device, length)
    words, seats = sparse(device, SLOTS), sparse(device, 1 << g.ROW_BITS)
    owners = torch.tensor([g.make_owner(LAST_SERIAL, row)], device=device)
    last_owner = g.make_owner(LAST_SERIAL, (1 << g.ROW_BITS) - 1)
    assert last_owner < 1 << 63
    assert (g.serial_of(last_owner), g.row_of(last_owner)) == (LAST_SERIAL, (1 << g.ROW_BITS) - 1)
    words[case.slots] = g.UNCLAIMED
    violations = poisoned_violations(16, words.device)
    shared = {"words": words, "writers": case.writers, "first_slot": 1, "violations": violations}
    claim = {"seats": seats, "rows": case.rows, "owners": owners, "prefix_lens": torch.zeros_like(case.rows), **shared}
    read = {"req_to_token": case.table, "rows": case.rows, "owners": owners, "offsets": case.offsets, **shared}
    read |= {"total": length, "window": 0, "may_share": False}
    free = {"op": g.Op.FREE, "actor": 0, "seats": seats, "records": case.records, "req_to_token": case.table, **shared}

    backend.claim_writes(slots=case.slots, offsets=case.offsets, step=LAST_STEP, **claim)
    backend.check_reads(**read)
    assert rows_of(violations) == (0, [])
    assert (words[case.slots] >= 0).all()

    slot = case.slots[-1:].clone()
    backend.claim_writes(slots=slot, offsets=make_offsets([1], device), step=LAST_STEP, **claim)
    backend.apply_delta(slots=slot, page_size=1, **free)
    backend.check_reads(**read)
    assert [(line[r.ROW_KIND], line[r.ROW_SLOT]) for line in rows_of(violations)[1]] == [
        (kind, int(slot)) for kind in (r.Kind.FREE_IN_USE, r.Kind.WRITE_TWICE, r.Kind.FREED_SLOT)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_kv_past_four_gigabytes_are_folded(way: str) -> None:
    backend, device = pick(way)
    width = 272
    pool = sparse(device, SLOTS, width, dtype=np.uint8)
    slots = torch.tensor([SLOTS - 1, SLOTS // 2 + 1, SLOTS - 2, 1], device=device)
    assert (SLOTS - 1) * width > 1 << 32
    pool[slots] = torch.arange(4 * width).remainder(251).to(torch.uint8).reshape(4, width).to(device)
    table = SourceTable([((0, "K"), make_row_source(layer_buffer=pool, read_bytes=width)[0])], SLOTS, device)
    records, writers, violations = (
        sparse(device, SLOTS, r.RECORD_WORDS),
        sparse(device, SLOTS),
        ViolationBuffer(8, device),
    )
    records[slots, r.IDENTITY] = r.LIVE_BIT
    backend.seal_slots(records=records, table=table, slots=slots)
    digest, locator = torch.zeros((2, 4), dtype=torch.int64, device=device)
    REFERENCE.fold_slots(table, slots, digest=digest, locator=locator)
    assert torch.equal(records[slots, r.DIGEST], digest)
    assert torch.equal(records[slots, r.LOCATOR], locator)

    scrub = {"records": records, "writers": writers, "table": table, "violations": violations}
    backend.scrub_range(start=SLOTS - 20, count=20, **scrub)
    assert int(violations.count) == 0
    pool[SLOTS - 1, width - 1] ^= 0x80
    backend.scrub_range(start=SLOTS - 20, count=20, **scrub)
    assert [(line[r.ROW_KIND], line[r.ROW_SLOT]) for line in rows_of(violations)[1]] == [(r.Kind.CONTENT, SLOTS - 1)]


@pytest.mark.parametrize("way", SLOW_WAYS)
def test_a_thousand_requests_of_a_recorded_step(way: str) -> None:
    """More than one look finds the request of a program among; each stores a token behind what it reads."""
    backend, device = pick(way)
    count, length, total = 1024, 3, 4 * 1024
    slots = torch.randperm(total, generator=torch.Generator().manual_seed(0)).to(device) + 1
    table = torch.zeros((count + 1, length + 1), dtype=torch.int32, device=device)
    table[1:] = slots.view(count, length + 1).int()
    rows, ones = torch.arange(1, count + 1, device=device), [1] * count
    records, writers = sparse(device, total + 1, r.RECORD_WORDS), sparse(device, total + 1)
    seeds = random_words(count, device=device, seed=1)
    violations = poisoned_violations(16, device)
    write = {"records": records, "writers": writers, "rows": rows, "step": 7, "first_slot": 1, "violations": violations}
    for part, prefix, chains in ((table[1:, :length], 0, seeds), (table[1:, length:], length, None)):
        stored = part.reshape(-1).long()
        chains = records[table[1:, length - 1].long(), r.CHAIN].clone() if chains is None else chains
        backend.write_chain(
            slots=stored,
            tokens=stored * 3,
            prefix_lens=torch.full_like(rows, prefix),
            offsets=make_offsets([part.shape[1]] * count if prefix == 0 else ones, device),
            seeds=chains,
            **write,
        )
    read = {key: write[key] for key in ("records", "writers", "rows", "first_slot", "violations")}
    read |= {"req_to_token": table, "offsets": make_offsets([length + 1] * count, device), "anchors": seeds}
    read |= {"end_points": records[table[1:, length].long(), r.CHAIN].clone(), "total": total}
    backend.verify_prefixes(**read)
    assert rows_of(violations) == (0, [])

    for index in (0, 511, 512, count - 1):
        records[table[index + 1, length].long(), r.CHAIN] ^= 1
    backend.verify_prefixes(**read)
    found = rows_of(violations)[1]
    assert {line[r.ROW_REQUEST] for line in found} == {0, 511, 512, count - 1}
    assert {line[r.ROW_POSITION] for line in found} == {length}


@pytest.mark.parametrize("way", WAYS)
def test_offsets_of_a_thousand_rows_of_a_million(way: str) -> None:
    backend, device = pick(way)
    lengths = torch.full((1024,), CONTEXT, device=device)
    verify, write = torch.zeros((2, 1025), dtype=torch.int64, device=device)
    backend.plan_offsets(3 * lengths, torch.ones_like(lengths), verify_offsets=verify, write_offsets=write)
    assert verify.tolist() == [index * 3 * CONTEXT for index in range(1025)]
    assert write.tolist() == list(range(1025))


def test_more_positions_than_their_count_holds_are_refused() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="verify_capacity must be at most 2147483647, got 2147483648"):
        launch_plan_offsets_kernel(
            req_pool_indices=one,
            prefix_lens=one,
            extend_seq_lens=one,
            req_to_token=torch.zeros((2, 4), dtype=torch.int32),
            out_verify_offsets_scratch=torch.zeros(2, dtype=torch.int64),
            out_write_offsets=torch.zeros(2, dtype=torch.int64),
            out_write_seed_slot_indices=one.clone(),
            out_verify_num_valid=one.int(),
            out_verify_enable=one.int(),
            out_write_num_valid_reqs=one.int(),
            verify_capacity=1 << 31,
        )


def test_few_rows_of_many_elements() -> None:
    """Rows are made of what is wrong only, in order, up to what there is room for."""
    violations = poisoned_violations(4, CPU)
    mask = torch.zeros(3_000_000, dtype=torch.bool)
    mask[[7, 2_999_999]] = True
    columns = {r.ROW_KIND: 5, r.ROW_POSITION: torch.arange(3_000_000)}
    violations.append(mask, columns)
    mask[:3] = True
    violations.append(mask, columns)
    assert int(violations.count) == 7
    assert violations.rows[:, r.ROW_POSITION].tolist() == [7, 2_999_999, 0, 1]
    assert violations.rows[:, r.ROW_KIND].tolist() == [5] * 4
    assert not violations.rows[:, r.ROW_SLOT].any()
