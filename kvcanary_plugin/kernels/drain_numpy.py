"""Nothing found is what there is to say nearly always."""

from __future__ import annotations

import torch

from .drain_reference import drain as drain_rows
from .mixing import as_array
from .violations import ViolationBuffer


def drain(violations: ViolationBuffer, ring: torch.Tensor, step: torch.Tensor) -> None:
    """See :func:`drain_reference.drain`."""
    if violations.count_on_host():
        drain_rows(violations, ring, step)
        return
    as_array(ring)[as_array(step)[0] % ring.shape[0], 0, 0] = 0
