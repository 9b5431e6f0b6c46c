"""Fold slots again and compare with what was sealed. Torch reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import record as r
from .fold_reference import fold_slots, seal_slots
from .violations import ViolationBuffer

if TYPE_CHECKING:
    from ..pool_patcher.sources import SourceTable


def check_slots(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor,
    request: int = -1,
    violations: ViolationBuffer,
) -> None:
    """Report every live slot of ``slots`` whose bytes no longer give the sealed digest and locator.

    Args:
        records: int64 (slot_count, RECORD_WORDS).
        writers: int64 (slot_count,).
        slots: int64 (n,). Ids outside the pool are left to the chain check, which reports them.
        request: index in the batch of the request they are checked for, -1 for none.
    """
    n = slots.numel()
    if n == 0 or not table.sources:
        return
    inside = torch.where((slots < 0) | (slots >= records.shape[0]), 0, slots)
    found = torch.empty((2, n), dtype=torch.int64, device=records.device)
    fold_slots(table, inside, digest=found[0], locator=found[1])
    report_slots(records, writers, inside, found, request, violations)


def scrub_range(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    table: SourceTable,
    start: int,
    count: int,
    violations: ViolationBuffer,
) -> None:
    """``check_slots`` of the contiguous slots ``start`` .. ``start + count - 1``; ids past the pool are left out."""
    stop = min(start + count, records.shape[0])
    slots = torch.arange(start, stop, device=records.device)
    check_slots(records=records, writers=writers, table=table, slots=slots, violations=violations)


def seal_and_scrub(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor,
    start: int,
    count: int,
    step: int,
    violations: ViolationBuffer,
    expects: torch.Tensor | None = None,
) -> None:
    """``seal_slots`` of ``slots``, then ``scrub_range`` of what was written before ``step``.

    The other backends do both in one fold or launch, where nobody can tell whether a slot that is just being sealed has
    its seal by now. It is known by its writer: ``slots`` were stored by forward ``step``.
    """
    seal_slots(records=records, writers=writers, table=table, slots=slots, expects=expects, violations=violations)
    older = torch.arange(start, min(start + count, records.shape[0]), device=records.device)
    older = older[(writers[older] >> r.WRITER_ROW_BITS) != step]
    check_slots(records=records, writers=writers, table=table, slots=older, violations=violations)


def report_slots(
    records: torch.Tensor,
    writers: torch.Tensor,
    slots: torch.Tensor,
    found: torch.Tensor,
    request: int,
    violations: ViolationBuffer,
) -> None:
    """Report the live slots among ``slots`` whose record differs from ``found`` (int64 (2, n): digest, locator)."""
    kept = records.index_select(0, slots)
    differs = (kept[:, r.DIGEST : r.LOCATOR + 1] != found.t()).any(1)
    bad = differs & ((kept[:, r.IDENTITY] & r.LIVE_BIT) != 0)
    if records.device.type == "cpu" and not bool(bad.any()):
        return
    violations.append(
        bad,
        {
            r.ROW_KIND: int(r.Kind.CONTENT),
            r.ROW_REQUEST: request,
            r.ROW_POSITION: (kept[:, r.IDENTITY] >> 32) & r.POSITION_MASK,
            r.ROW_SLOT: slots,
            r.ROW_IDENTITY: kept[:, r.IDENTITY],
            r.ROW_CHAIN: kept[:, r.CHAIN],
            r.ROW_DIGEST: kept[:, r.DIGEST],
            r.ROW_LOCATOR: kept[:, r.LOCATOR],
            r.ROW_FOUND_DIGEST: found[0],
            r.ROW_FOUND_LOCATOR: found[1],
            r.ROW_WRITER: writers[slots],
        },
    )
