"""Which slots of a row are wrong, where the device can only say that something is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from ..kernels import record as r
from ..kernels.mixing import POSITION_SHIFT, as_int64, mix
from ..pool_patcher.records import ShadowRecords
from .step import Step
from .truth import Request, token_array

MAX_REFINED = 16
MAX_STRETCHES = 256  # of a row that are named: all that a forward can report


def sort_rows(rows: list[list[int]]) -> list[list[int]]:
    """Rows as a CPU appends them: by request, then by position, the end point last. A GPU has no order."""
    return sorted(rows, key=lambda row: (row[r.ROW_REQUEST], row[r.ROW_KIND] == r.Kind.END_POINT, row[r.ROW_POSITION]))


def refine_chain_rows(
    step: Step,
    rows: list[list[int]],
    records: ShadowRecords,
    req_to_token: torch.Tensor,
    scatter: Callable[..., None],
    anchor_of: Callable[[Request], int],
    window: int | None = None,
) -> list[list[int]]:
    """Replace link and end-point rows by the places that are wrong.

    A stretch of slots that is consistent in itself breaks a link only where it ends, and a whole such prefix breaks
    none. So the row of a request with a broken link or end point is compared with a table of its true tokens, and the
    first slot of each wrong stretch is named. A row that has changed since it was verified is left as it was described.

    Waits for the device, and runs only when something is wrong.

    Args:
        step: the forward that found them.
        rows: raw rows, sorted.
        records: the shadow records.
        req_to_token: int32 (row_count, context).
        scatter: ``scatter_req_token_ids`` of the backend.
        anchor_of: the chain before the first token of a request, unsigned.
        window: positions from the end that the row still holds; None for all.
    """
    loose = (r.Kind.LINK, r.Kind.END_POINT)
    unreadable = {row[r.ROW_REQUEST] for row in rows if row[r.ROW_KIND] == r.Kind.ROW_RANGE}
    unclear = sorted({row[r.ROW_REQUEST] for row in rows if row[r.ROW_KIND] in loose} - unreadable)[:MAX_REFINED]
    kept = [row for row in rows if row[r.ROW_KIND] not in loose or row[r.ROW_REQUEST] not in unclear]
    named = {(row[r.ROW_REQUEST], row[r.ROW_POSITION]) for row in kept}
    if not unclear:
        return kept

    device = records.hot.device
    lengths = [step.prefix_lens[index] for index in unclear]
    tokens = np.concatenate([token_array(step.requests[i], 0, n) for i, n in zip(unclear, lengths, strict=True)])
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    expected = torch.zeros((len(unclear), max(lengths)), dtype=torch.int32, device=device)
    scatter(torch.from_numpy(tokens).to(device), offsets, torch.arange(len(unclear), device=device), expected)
    for line, (index, length) in enumerate(zip(unclear, lengths, strict=True)):
        slots = req_to_token[step.rows[index], :length].to(torch.int64)
        inside = torch.where((slots < 0) | (slots >= records.slot_count), 0, slots)
        found = records.hot[inside]
        positions = torch.arange(length, device=device)
        words = (expected[line, :length].to(torch.int64) & r.TOKEN_MASK) | positions << POSITION_SHIFT
        chain = torch.cumsum(mix(words), 0) + as_int64(anchor_of(step.requests[index]))
        # The chain too: a foreign stretch may hold the right token here and there by chance.
        wrong = (found[:, r.IDENTITY] != words | r.LIVE_BIT) | (found[:, r.CHAIN] != chain)
        if window is not None:
            wrong[: max(0, length - window)] = False
        first = wrong & ~torch.nn.functional.pad(wrong[:-1], (1, 0))
        starts = torch.nonzero(first).flatten()[:MAX_STRETCHES]
        vague = [row for row in rows if row[r.ROW_REQUEST] == index and row[r.ROW_KIND] in loose]
        if not len(starts):
            kept += vague  # the row is not any more what the forward read; what was seen then stands
            continue
        kind = r.Kind.END_POINT if window is None and bool(wrong.all()) else r.Kind.LINK
        seen = (starts, slots[starts], records.writers[inside[starts]], *found[starts][:, [r.CHAIN, r.IDENTITY]].T)
        for position, slot, writer, chain_there, identity in torch.stack(seen, 1).tolist():
            if (index, position) not in named:
                row = [0] * r.ROW_COLUMNS
                row[r.ROW_KIND], row[r.ROW_REQUEST], row[r.ROW_POSITION] = int(kind), index, position
                row[r.ROW_SLOT], row[r.ROW_WRITER] = slot, writer
                row[r.ROW_CHAIN], row[r.ROW_IDENTITY] = chain_there, identity
                kept.append(row)
    return kept
