"""Fold slots again and compare with what was sealed. The CPU backend, in numpy."""

from __future__ import annotations

import numpy as np
import torch

from ..pool_patcher.sources import SourceTable
from . import record as r
from .fold_numpy import fold_slots
from .mixing import as_array
from .scrub_reference import report_slots
from .violations import ViolationBuffer


def check_slots(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor,
    request: int = -1,
    violations: ViolationBuffer,
) -> None:
    """See :func:`.scrub_reference.check_slots`."""
    inside = torch.where((slots < 0) | (slots >= records.shape[0]), 0, slots)
    found = torch.empty((2, slots.numel()), dtype=torch.int64)
    fold_slots(table, inside, digest=found[0], locator=found[1])
    _compare(records, writers, inside, found, request, violations)


def scrub_range(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    table: SourceTable,
    start: int,
    count: int,
    violations: ViolationBuffer,
) -> None:
    """See :func:`.scrub_reference.scrub_range`."""
    slots = torch.arange(start, min(start + count, records.shape[0]))
    check_slots(records=records, writers=writers, table=table, slots=slots, violations=violations)


def seal_and_scrub(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    table: SourceTable,
    slots: torch.Tensor,
    start: int,
    count: int,
    violations: ViolationBuffer,
) -> None:
    """See :func:`.scrub_reference.seal_and_scrub`."""
    kept, new = as_array(records), as_array(slots)
    n = len(new)
    if n and new.view(np.uint64).max() >= len(kept):
        new = np.where((new < 0) | (new >= len(kept)), 0, new)
    live = np.flatnonzero(kept[start : start + count, r.IDENTITY] & r.LIVE_BIT) + start
    chosen = torch.from_numpy(np.concatenate((new, live)))
    found = torch.empty((2, n + len(live)), dtype=torch.int64)
    fold_slots(table, chosen, digest=found[0], locator=found[1])
    kept[new, r.DIGEST : r.LOCATOR + 1] = as_array(found)[:, :n].T
    _compare(records, writers, chosen[n:], found[:, n:], -1, violations)


def _compare(
    records: torch.Tensor,
    writers: torch.Tensor,
    slots: torch.Tensor,
    found: torch.Tensor,
    request: int,
    violations: ViolationBuffer,
) -> None:
    kept = as_array(records).take(as_array(slots), axis=0)
    differs = (kept[:, r.DIGEST : r.LOCATOR + 1] != as_array(found).T).any(1)
    if (differs & ((kept[:, r.IDENTITY] & r.LIVE_BIT) != 0)).any():
        report_slots(records, writers, slots, found, request, violations)
