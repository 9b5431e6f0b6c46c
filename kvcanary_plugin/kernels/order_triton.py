"""A few words, one program."""

from __future__ import annotations

import torch
import triton.language as tl

from . import record as r
from .launch import jit, launch
from .mixing_triton import append_rows
from .violations import ViolationBuffer

_FIRST_KIND = tl.constexpr(int(r.Kind.UNORDERED_FORWARD))
_BLOCK = 8


@jit
def _check_order(tickets_ptr, due_ptr, n: tl.int64, rows_ptr, count_ptr, capacity: tl.int64, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    # Another stream may be writing it: never from a cache.
    ticket = tl.load(tickets_ptr + i, mask=i < n, other=0, volatile=True)
    due = tl.load(due_ptr + i, mask=i < n, other=0)
    kind = i.to(tl.int64) + _FIRST_KIND
    append_rows(
        rows_ptr, count_ptr, capacity, (i < n) & (ticket < due), kind, -1, -1, -1, 0, due, ticket, 0, 0, 0, 0
    )  # fmt: skip


def check_order(*, tickets: torch.Tensor, due: torch.Tensor, violations: ViolationBuffer) -> None:
    """See :func:`order_reference.check_order`."""
    launch(
        _check_order,
        1,
        (tickets, due, tickets.shape[0], violations.rows, violations.count, violations.capacity),
        (_BLOCK,),
        device=tickets.device,
        warps=1,
    )
