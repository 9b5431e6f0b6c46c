"""What must have happened on the device by now is compared with what has."""

from __future__ import annotations

import torch

from . import record as r
from .violations import ViolationBuffer


def check_order(*, tickets: torch.Tensor, due: torch.Tensor, violations: ViolationBuffer) -> None:
    """Report every ticket that is behind: whoever was to write it has not come to that, and nobody has waited for it.

    Args:
        tickets: int64 (n,), n up to 8: number of the step that each of the writers has come to.
        due: int64 (n,), of which step each has to have come to. A writer may be further.
        violations: takes a row for each that is behind: kind ``UNORDERED_FORWARD`` plus its index, ``ROW_CHAIN`` what
            is due, ``ROW_DIGEST`` what was found, and neither request nor position nor slot.
    """
    index = torch.arange(tickets.shape[0], device=tickets.device)
    columns: dict[int, torch.Tensor | int] = {
        r.ROW_KIND: r.Kind.UNORDERED_FORWARD + index,
        r.ROW_REQUEST: -1,
        r.ROW_POSITION: -1,
        r.ROW_SLOT: -1,
        r.ROW_CHAIN: due,
        r.ROW_DIGEST: tickets,
    }
    violations.append(tickets < due, columns)
