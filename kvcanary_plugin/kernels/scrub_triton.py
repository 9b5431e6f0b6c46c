"""Fold slots again and compare with what was sealed: the fold kernel with another ending."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .fold_triton import COMPARE, launch_fold
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
    """See :func:`scrub_reference.check_slots`."""
    _compare(records, writers, table, slots, 0, slots.shape[0], request, violations)


def scrub_range(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    table: SourceTable,
    start: int,
    count: int,
    violations: ViolationBuffer,
) -> None:
    """See :func:`scrub_reference.scrub_range`."""
    _compare(records, writers, table, None, start, min(count, records.shape[0] - start), -1, violations)


def _compare(
    records: torch.Tensor,
    writers: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor | None,
    start: int,
    n: int,
    request: int,
    violations: ViolationBuffer,
) -> None:
    if n <= 0 or not table.sources:
        return
    launch_fold(
        mode=COMPARE,
        table=table,
        slots=slots,
        start=start,
        n=n,
        records=records,
        digest=records,
        locator=records,
        writers=writers,
        request=request,
        violations=violations,
        survivors=None,
        poison=0,
    )
