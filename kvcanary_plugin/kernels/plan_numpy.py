"""Lay a batch out as CSR. The CPU backend, in numpy."""

from __future__ import annotations

import numpy as np
import torch

from .mixing import as_array


def plan_offsets(
    prefix_lens: torch.Tensor,
    write_lens: torch.Tensor,
    *,
    verify_offsets: torch.Tensor,
    write_offsets: torch.Tensor,
) -> None:
    """See :func:`.plan_reference.plan_offsets`."""
    for lengths, offsets in ((prefix_lens, verify_offsets), (write_lens, write_offsets)):
        out = as_array(offsets)
        out[0] = 0
        np.maximum(as_array(lengths), 0).cumsum(out=out[1:])
