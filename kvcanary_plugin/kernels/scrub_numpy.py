"""Fold slots again and compare with what was sealed. The CPU backend, in numpy."""

from __future__ import annotations

import numpy as np
import torch

from ..pool_patcher.sources import SourceTable
from . import record as r
from .fold_numpy import Array, fold_ids, report_poison
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
    kept, ids = as_array(records), slots.numpy()
    ids = ids[(ids >= 0) & (ids < len(kept))]
    ids = ids[(kept[ids, r.IDENTITY] & r.LIVE_BIT) != 0]
    _compare(records, writers, ids, *fold_ids(table, ids), request, violations)


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
    ids = _live_between(as_array(records), start, count)
    _compare(records, writers, ids, *fold_ids(table, ids), -1, violations)


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
    """See :func:`.scrub_reference.seal_and_scrub`."""
    kept, new = as_array(records), as_array(slots)
    if len(new) and new.view(np.uint64).max() >= len(kept):  # as unsigned, a negative id is too large as well
        new = new[(new >= 0) & (new < len(kept))]
    n, live = len(new), _live_between(kept, start, count)
    if len(live):
        live = live[as_array(writers).take(live) >> r.WRITER_ROW_BITS != step]
    survivors = None if expects is None else np.zeros((len(table.sources), n), dtype=np.int64)
    digest, locator = fold_ids(table, np.concatenate((new, live)), survivors)
    kept[new, r.DIGEST], kept[new, r.LOCATOR] = digest[:n], locator[:n]
    report_poison(records, writers, new, survivors, expects, violations)
    _compare(records, writers, live, digest[n:], locator[n:], -1, violations)


def _live_between(kept: Array, start: int, count: int) -> Array:
    (live,) = (kept[start : start + count, r.IDENTITY] & r.LIVE_BIT).nonzero()
    live += start
    return live


def _compare(
    records: torch.Tensor,
    writers: torch.Tensor,
    ids: Array,
    digest: Array,
    locator: Array,
    request: int,
    violations: ViolationBuffer,
) -> None:
    kept = as_array(records).take(ids, axis=0)
    if (kept[:, r.DIGEST] == digest).all() and (kept[:, r.LOCATOR] == locator).all():
        return
    found = torch.from_numpy(np.stack((digest, locator)))
    report_slots(records, writers, torch.from_numpy(ids), found, request, violations)
