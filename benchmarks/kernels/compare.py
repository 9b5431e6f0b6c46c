"""SGLang's in-tree kv-canary kernels beside ours: same slots, same tokens, same clock, in device graphs on both sides.

Part of ``run.py``; ``python benchmarks/kernels/compare.py`` prints this table alone. A case that fails becomes a line
of the table that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from cases import DEVICE, POOL_SLOTS, ROW_BYTES, SOURCES, TRITON, make_pool, verify_arguments
from kernel_cases import Batch, make_batch, make_offsets, rows_of
from timing import Clock

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.violations import ViolationBuffer

if TYPE_CHECKING:
    from in_tree import InTreeCanary

FEW = 5  # repetitions of what takes a tenth of a second each
MESSAGE_LENGTH = 800

Line = tuple[str, float, float]


def _require(sound: bool, what: str) -> None:
    if not sound:
        raise RuntimeError(f"kvcanary: {what}")


def _adopt(batch: Batch) -> tuple[InTreeCanary, torch.Tensor, torch.Tensor]:
    """An in-tree canary of the same pool, without records yet; tokens and slots of the batch, (bs, length)."""
    from in_tree import InTreeCanary

    slots = batch.req_to_token[batch.rows, : batch.lengths[0]].long()
    tokens = batch.records[slots, r.IDENTITY] & r.TOKEN_MASK
    return InTreeCanary(batch.req_to_token, batch.rows, tokens, batch.records.shape[0]), tokens, slots


def compare_write(clock: Clock, bs: int, stored: int, new: int) -> Iterator[Line]:
    """Records of ``new`` tokens of each request, behind ``stored`` that are there."""
    batch = make_batch([stored + new] * bs, DEVICE)
    canary, tokens, slots = _adopt(batch)
    canary.store(0, stored)
    canary.store(stored, new)
    canary.confirm()
    canary.make_plan(stored, new)()
    in_tree = clock.graph(canary.make_write(stored, new))
    canary.confirm()

    violations = ViolationBuffer(8, DEVICE)
    before = batch.records.clone()
    arguments = {
        "records": batch.records,
        "writers": batch.writers,
        "slots": slots[:, stored:].flatten().contiguous(),
        "tokens": tokens[:, stored:].flatten().contiguous(),
        "rows": batch.rows,
        "prefix_lens": torch.full_like(batch.rows, stored),
        "offsets": make_offsets([new] * bs, DEVICE),
        "seeds": batch.records[slots[:, stored - 1], r.CHAIN] if stored else batch.anchors,
        "step": 7,
        "first_slot": 1,
        "violations": violations,
    }
    batch.records[slots[:, stored:]] = 0
    TRITON.write_chain(**arguments)
    same = [r.CHAIN, r.IDENTITY]
    _require(torch.equal(before[:, same], batch.records[:, same]), "records differ from the reference")
    _require(rows_of(batch.verify(TRITON)) == (0, []), "violations on sound data")
    ours = clock.graph(lambda: TRITON.write_chain(**arguments))
    _require(int(violations.count) == 0, "violations on sound data")
    behind = f" behind {stored} stored" if stored else ""
    yield f"chain records, {bs} x {new}{behind}, no bytes", in_tree, ours


def compare_verify(clock: Clock, bs: int, length: int) -> Iterator[Line]:
    """Every position of every request, with and without the plan that the in-tree kernel reads."""
    batch = make_batch([length] * bs, DEVICE)
    canary, _, _ = _adopt(batch)
    canary.store(0, length)
    canary.confirm()
    plan = canary.make_plan(length, 0)

    def plan_and_verify() -> None:
        plan()
        canary.verify()

    _require(rows_of(batch.verify(TRITON)) == (0, []), "violations on sound data")
    violations = ViolationBuffer(256, DEVICE)
    arguments = verify_arguments(batch, violations)
    ours = clock.graph(lambda: TRITON.verify_prefixes(**arguments), flush=True)
    _require(int(violations.count) == 0, "violations on sound data")

    in_tree = clock.graph(plan_and_verify, flush=True)
    canary.confirm()
    yield f"verify, {bs} x {length}, L2 flushed: in-tree plan and verify", in_tree, ours
    in_tree = clock.graph(canary.verify, flush=True)
    canary.require_silence()
    yield f"verify, {bs} x {length}, L2 flushed: in-tree verify alone, its plan ready", in_tree, ours


def compare_bytes(clock: Clock, count: int) -> Iterator[Line]:
    """The bytes of one prefill. The in-tree kernel reads one source, ours all of them."""
    from in_tree import InTreeCanary

    table, records, writers = make_pool()
    slots = torch.randperm(POOL_SLOTS - 1, device=DEVICE)[:count] + 1
    tokens = torch.randint(0, 128_000, (1, count), device=DEVICE)
    req_to_token = torch.zeros((2, count), dtype=torch.int32, device=DEVICE)
    req_to_token[1] = slots
    rows = torch.ones(1, dtype=torch.int64, device=DEVICE)
    offsets, prefix_lens = make_offsets([count], DEVICE), torch.zeros_like(rows)
    violations = ViolationBuffer(8, DEVICE)

    def seal() -> None:
        TRITON.seal_slots(records=records, table=table, slots=slots)

    def write_and_seal() -> None:
        TRITON.write_chain(
            records=records,
            writers=writers,
            slots=slots,
            tokens=tokens[0],
            rows=rows,
            prefix_lens=prefix_lens,
            offsets=offsets,
            seeds=rows,
            step=7,
            first_slot=1,
            violations=violations,
        )
        seal()

    write_and_seal()
    TRITON.check_slots(records=records, writers=writers, table=table, slots=slots, violations=violations)
    _require(int(violations.count) == 0, "violations on sound data")
    sealed, written = clock.graph(seal), clock.graph(write_and_seal)
    _require(int(violations.count) == 0, "violations on sound data")

    layer = torch.randint(0, 256, (POOL_SLOTS, ROW_BYTES), dtype=torch.uint8, device=DEVICE)
    canary = InTreeCanary(req_to_token, rows, tokens, POOL_SLOTS, layer)
    canary.store(0, count)
    canary.confirm()
    canary.make_plan(0, count)()
    in_tree = clock.graph(canary.make_write(0, count), repetitions=FEW)
    canary.confirm()
    work = f"bytes, {count} slots: in-tree 1 source x {ROW_BYTES} B (K of one layer) and records; kvcanary "
    yield f"{work}{SOURCES} sources x {ROW_BYTES} B", in_tree, sealed
    yield f"{work}{SOURCES} sources x {ROW_BYTES} B and records", in_tree, written


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return text if len(text) <= MESSAGE_LENGTH else f"{text[: MESSAGE_LENGTH // 2]} ... {text[-MESSAGE_LENGTH // 2 :]}"


def print_comparison(clock: Clock) -> None:
    """The table, or one line where SGLang's kernels cannot be imported."""
    try:
        from in_tree import VERSION
    except Exception as error:
        print(f"\nSGLang's in-tree canary was not timed: {_one_line(error)}", flush=True)
        return
    cases: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("chain records, 1 x 8192", lambda: compare_write(clock, 1, 0, 8192)),
        ("verify, 64 x 8192", lambda: compare_verify(clock, 64, 8192)),
        ("verify, 256 x 2048", lambda: compare_verify(clock, 256, 2048)),
        ("chain records, 64 x 1", lambda: compare_write(clock, 64, 1024, 1)),
        ("bytes, 8192 slots", lambda: compare_bytes(clock, 8192)),
    ]
    print(f"\nThe in-tree kernels of SGLang {VERSION} beside ours, both in device graphs, medians:\n")
    print("| work | in-tree, us | kvcanary, us | in-tree / kvcanary |")
    print("|---|---|---|---|", flush=True)
    for name, case in cases:
        try:
            for work, in_tree, ours in case():
                print(f"| {work} | {in_tree:.1f} | {ours:.1f} | {in_tree / ours:.1f} |", flush=True)
        except Exception as error:
            print(f"| {name}: not timed, {_one_line(error)} | | | |", flush=True)


if __name__ == "__main__":
    print_comparison(Clock(DEVICE))
