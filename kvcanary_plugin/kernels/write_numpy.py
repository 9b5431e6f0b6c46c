"""Make chain records of the tokens a forward stores. The CPU backend, in numpy."""

from __future__ import annotations

import numpy as np
import torch

from . import record as r
from .mixing import POSITION_SHIFT, as_array, mix_array
from .violations import ViolationBuffer
from .write_reference import write_chain as write_and_report


def write_chain(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    offsets: torch.Tensor,
    seeds: torch.Tensor,
    step: int,
    first_slot: int,
    violations: ViolationBuffer,
    is_partial: bool = False,
) -> None:
    """See :func:`.write_reference.write_chain`, which also reports slots outside the pool once there are any."""
    kept, target = as_array(records), as_array(slots)
    n = len(target)
    if n == 0:
        return
    # Seen as unsigned, an id below the first slot lies far above the last one.
    if (target.view(np.uint64) - np.uint64(first_slot)).max() >= len(kept) - first_slot:
        write_and_report(
            records=records,
            writers=writers,
            slots=slots,
            tokens=tokens,
            rows=rows,
            prefix_lens=prefix_lens,
            offsets=offsets,
            seeds=seeds,
            step=step,
            first_slot=first_slot,
            violations=violations,
            is_partial=is_partial,
        )
        return
    starts, seed = as_array(offsets), as_array(seeds)
    stamps = (as_array(rows) & r.WRITER_ROW_MASK) | step << r.WRITER_ROW_BITS
    lengths = starts[1:] - starts[:-1]
    words = as_array(tokens) & r.TOKEN_MASK
    if n == len(lengths) and lengths.min() == 1:  # a decode step: nothing to spread over spans
        words |= as_array(prefix_lens) << POSITION_SHIFT
        chain = mix_array(words.view(np.uint64)).view(np.int64) + seed
    else:
        request = np.repeat(np.arange(len(lengths)), lengths)
        words |= (as_array(prefix_lens) - starts[:-1])[request] + np.arange(n) << POSITION_SHIFT
        sums = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(mix_array(words.view(np.uint64)).view(np.int64), out=sums[1:])
        chain = sums[1:] + (seed - sums[starts[:-1]])[request]
        stamps = stamps[request]
    kept[target, r.CHAIN] = chain
    kept[target, r.IDENTITY] = words | r.LIVE_BIT
    as_array(writers)[target] = stamps
