"""Fold slots again and compare with what was sealed: the fold kernel with another ending."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .fold_triton import COMPARE, SEAL, launch_fold
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
    launch_fold(
        COMPARE, table=table, slots=slots, records=records, writers=writers, request=request, violations=violations
    )


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
    count = max(0, min(count, records.shape[0] - start))
    launch_fold(COMPARE, table=table, start=start, count=count, records=records, writers=writers, violations=violations)


def seal_and_scrub(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor,
    start: int | torch.Tensor,
    count: int,
    step: int | torch.Tensor,
    violations: ViolationBuffer,
    expects: torch.Tensor | None = None,
) -> None:
    """See :func:`scrub_reference.seal_and_scrub`.

    ``start`` and ``step`` may both be int64 tensors (1,) on the device, so that a captured launch serves every step.
    """
    if isinstance(start, int):
        count = max(0, min(count, records.shape[0] - start))
    launch_fold(
        SEAL,
        table=table,
        slots=slots,
        start=start,
        count=count,
        step=step,
        records=records,
        writers=writers,
        violations=violations,
        expects=expects,
    )
