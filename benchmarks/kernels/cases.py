"""Our kernels at the sizes that the benchmark lists, each held to the reference before it is timed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))

from kernel_cases import Batch, make_batch, make_offsets, rows_of
from timing import Clock

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, pick_backend
from kvcanary_plugin.kernels.violations import ViolationBuffer
from kvcanary_plugin.pool_patcher.sources import SourceTable, make_row_source

DEVICE = torch.device("cuda")
TRITON = pick_backend(DEVICE)
POOL_SLOTS, SOURCES, ROW_BYTES = 50_001, 64, 2048


@dataclass(frozen=True)
class Row:
    """One line of the table; ``goal`` in microseconds, or None where the goal is a share of copy bandwidth."""

    work: str
    stream: float
    graph: float
    goal: float | None
    bound: str
    moved: int = 0


def measure(
    clock: Clock,
    work: str,
    call: Callable[[], None],
    goal: float | None,
    bound: str,
    *,
    moved: int = 0,
    flush: bool = False,
) -> Row:
    return Row(work, clock.stream(call, flush=flush), clock.graph(call, flush=flush), goal, bound, moved)


def check(equal: bool, what: str) -> None:
    if not equal:
        raise SystemExit(f"{what} differs from the reference: nothing was timed")


def bench_write(clock: Clock, lengths: list[int], work: str, goal: float | None, bound: str) -> Row:
    total, bs = sum(lengths), len(lengths)
    batch = {
        "slots": torch.randperm(total + 99, device=DEVICE)[:total] + 1,
        "tokens": torch.randint(0, 128_000, (total,), device=DEVICE),
        "rows": torch.arange(1, bs + 1, device=DEVICE),
        "prefix_lens": torch.randint(0, 8192, (bs,), device=DEVICE),
        "offsets": make_offsets(lengths, DEVICE),
        "seeds": torch.randint(-(2**62), 2**62, (bs,), device=DEVICE),
        "step": 5,
        "first_slot": 1,
    }
    results = []
    for backend in (REFERENCE, TRITON):
        records = torch.zeros((total + 100, r.RECORD_WORDS), dtype=torch.int64, device=DEVICE)
        writers = torch.zeros(total + 100, dtype=torch.int64, device=DEVICE)
        arguments = {**batch, "records": records, "writers": writers, "violations": ViolationBuffer(8, DEVICE)}
        backend.write_chain(**arguments)
        results.append((records, writers))
    check(all(torch.equal(*pair) for pair in zip(*results, strict=True)), work)
    return measure(clock, work, lambda: TRITON.write_chain(**arguments), goal, bound)


def verify_arguments(batch: Batch, violations: ViolationBuffer) -> dict[str, Any]:
    return {
        "records": batch.records,
        "writers": batch.writers,
        "req_to_token": batch.req_to_token,
        "rows": batch.rows,
        "offsets": batch.offsets,
        "anchors": batch.anchors,
        "end_points": batch.end_points,
        "total": batch.total,
        "first_slot": 1,
        "violations": violations,
    }


def bench_verify(clock: Clock, lengths: list[int], work: str) -> Row:
    batch: Batch = make_batch(lengths, DEVICE)
    check(rows_of(batch.verify(TRITON)) == (0, []), work)
    damaged = torch.randperm(batch.total, device=DEVICE)[:97] + 1
    batch.records[damaged, r.CHAIN] += 1
    check(rows_of(batch.verify(TRITON)) == rows_of(batch.verify(REFERENCE)), work)
    batch.records[damaged, r.CHAIN] -= 1
    violations = ViolationBuffer(256, DEVICE)
    arguments = verify_arguments(batch, violations)
    row = measure(
        clock,
        work,
        lambda: TRITON.verify_prefixes(**arguments),
        12,
        "random 32-byte reads, see the gather",
        moved=batch.total * (32 + 4),
        flush=True,
    )
    check(int(violations.count) == 0, work)
    return row


@triton.jit
def _gather(slots_ptr, records_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(records_ptr + tl.load(slots_ptr + i).to(tl.int64) * 4)
    tl.store(out_ptr + tl.program_id(0), tl.sum(words, 0))


def bench_gather(clock: Clock, count: int, work: str) -> Row:
    """What verify cannot beat: nothing but one word of each record, by a list that lies ready."""
    records = torch.randint(-(2**62), 2**62, (count + 1, r.RECORD_WORDS), device=DEVICE)
    slots = torch.randperm(count, device=DEVICE).to(torch.int32)
    sums = torch.zeros(count // 256, dtype=torch.int64, device=DEVICE)
    gather = _gather[(count // 256,)]
    check_rows = records[slots.long(), 0].view(-1, 256).sum(1)
    call = functools.partial(gather, slots, records, sums, BLOCK=256)
    call()
    check(torch.equal(sums, check_rows), work)
    return measure(clock, work, call, -1, "random 32-byte sectors", moved=count * (32 + 4), flush=True)


def make_pool() -> tuple[SourceTable, torch.Tensor, torch.Tensor]:
    buffers = [torch.randint(-(2**62), 2**62, (POOL_SLOTS, ROW_BYTES // 8), device=DEVICE) for _ in range(SOURCES)]
    named = [
        ((b // 2, "KV"[b % 2]), make_row_source(layer_buffer=buffer, read_bytes=ROW_BYTES)[0])
        for b, buffer in enumerate(buffers)
    ]
    records = torch.zeros((POOL_SLOTS, r.RECORD_WORDS), dtype=torch.int64, device=DEVICE)
    records[:, r.IDENTITY] = r.LIVE_BIT
    return SourceTable(named, POOL_SLOTS, DEVICE), records, torch.zeros(POOL_SLOTS, dtype=torch.int64, device=DEVICE)


def bench_folds(clock: Clock) -> list[Row]:
    table, records, writers = make_pool()
    slots = torch.randperm(POOL_SLOTS - 1, device=DEVICE) + 1
    violations = ViolationBuffer(8, DEVICE)
    for count in (8192, 64):
        sums = torch.zeros((4, count), dtype=torch.int64, device=DEVICE)
        REFERENCE.fold_slots(table, slots[:count], digest=sums[0], locator=sums[1])
        TRITON.fold_slots(table, slots[:count], digest=sums[2], locator=sums[3])
        check(torch.equal(sums[:2], sums[2:]), f"fold of {count} slots")
    TRITON.seal_slots(records=records, table=table, slots=slots)

    def fold(count: int) -> Callable[[], None]:
        chosen = slots[:count]
        return lambda: TRITON.seal_slots(records=records, table=table, slots=chosen)

    def scrub() -> None:
        TRITON.scrub_range(records=records, writers=writers, table=table, start=1, count=8192, violations=violations)

    moved = SOURCES * ROW_BYTES
    rows = [
        measure(clock, "fold, 8192 scattered slots x 64 x 2048 B", fold(8192), None, "bytes", moved=8192 * moved),
        measure(
            clock,
            "fold, 64 slots x 64 x 2048 B",
            fold(64),
            8,
            "latency of dependent reads and additions",
            moved=64 * moved,
        ),
        measure(clock, "scrub, 8192 contiguous slots", scrub, None, "bytes", moved=8192 * moved),
    ]
    check(int(violations.count) == 0, "scrub")
    records[:, r.IDENTITY] = 0

    def scrub_dead() -> None:
        TRITON.scrub_range(records=records, writers=writers, table=table, start=1, count=50_000, violations=violations)

    rows.append(measure(clock, "scrub, 50,000 slots, none live", scrub_dead, -1, "launch of the programs"))
    return rows
