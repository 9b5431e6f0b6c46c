"""Make chain records of the tokens a forward stores. Torch reference."""

from __future__ import annotations

import torch

from . import record as r
from .mixing import POSITION_SHIFT, mix
from .plan_reference import expand_offsets
from .violations import ViolationBuffer


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
    """Write chain, identity word and writer stamp of every new token; digest and locator are left to ``seal``.

    The chain is a prefix sum, so all tokens of all requests are computed at once.

    Args:
        records: int64 (slot_count, RECORD_WORDS), updated at ``slots``.
        writers: int64 (slot_count,), updated at ``slots``.
        slots: int64 (n,). One outside [first_slot, slot_count) is reported and not written.
        tokens: int64 (n,), requests one after another.
        rows, prefix_lens, seeds: int64 (bs,). ``seeds`` is the true chain before the first new token.
        offsets: int64 (bs + 1,), CSR over the n tokens.
        is_partial: slot -1 stands for a token that has none, and is left out.
    """
    n = slots.numel()
    if n == 0:
        return
    device = slots.device
    request = expand_offsets(offsets, n)
    positions = torch.arange(n, device=device) + (prefix_lens - offsets[:-1]).index_select(0, request)
    words = (tokens & r.TOKEN_MASK) | (positions << POSITION_SHIFT)
    sums = torch.zeros(n + 1, dtype=torch.int64, device=device)
    torch.cumsum(mix(words), 0, out=sums[1:])
    chain = sums[1:] + (seeds - sums.index_select(0, offsets[:-1])).index_select(0, request)
    words |= r.LIVE_BIT

    outside = (slots < first_slot) | (slots >= records.shape[0])
    # On the CPU looking is free and there is nearly never anything to see.
    if bool(outside.any()):
        missing = (slots == -1) if is_partial else torch.zeros_like(outside)
        columns = {r.ROW_REQUEST: request, r.ROW_POSITION: positions, r.ROW_SLOT: slots, r.ROW_IDENTITY: words}
        violations.append(outside & ~missing, {r.ROW_KIND: int(r.Kind.WRITE_RANGE), r.ROW_CHAIN: chain, **columns})
        slots, chain, words, request = (values[~outside] for values in (slots, chain, words, request))
    records[:, r.CHAIN].index_copy_(0, slots, chain)
    records[:, r.IDENTITY].index_copy_(0, slots, words)
    stamps = (rows & r.WRITER_ROW_MASK) | (step << r.WRITER_ROW_BITS)
    writers.index_copy_(0, slots, stamps.index_select(0, request))
