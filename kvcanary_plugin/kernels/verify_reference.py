"""Check every slot a forward is about to read against the prefix it must hold. Torch reference."""

from __future__ import annotations

import torch

from . import record as r
from .mixing import POSITION_SHIFT, mix_
from .plan_reference import expand_offsets
from .violations import ViolationBuffer


def verify_prefixes(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    anchors: torch.Tensor,
    end_points: torch.Tensor,
    total: int,
    first_slot: int,
    violations: ViolationBuffer,
    mapping: torch.Tensor | None = None,
    window: int | None = None,
) -> None:
    """Verify positions 0 .. length - 1 of every request: slot in range, live, right position, linked to the one before.

    Links plus end point prove the whole prefix: with ``chain[-1] = anchor`` the links telescope, so an intact chain
    whose last element is the true prefix hash can only have been made from the true tokens.

    Args:
        records: int64 (slot_count, RECORD_WORDS).
        writers: int64 (slot_count,), only copied into violation rows.
        req_to_token: int32 (row_count, context), rows contiguous. A position past a row counts as slot -1.
        rows: int64 (bs,). One outside [1, row_count) is reported and nothing behind it is followed.
        offsets: int64 (bs + 1,), CSR over the positions to verify.
        anchors, end_points: int64 (bs,), the true chain before the first and after the last of these positions.
        total: ``offsets[-1]``, known to the host.
        first_slot: slots below it are padding; a live row that names one is damaged.
        mapping: int64 or int32 (m,), the slot of these records for each slot that a row names; None where they are the
            same. A slot that is no index of it counts as slot -1.
        window: only the last ``window`` positions of a request are looked at, and the first of them not for its link;
            None for all.
    """
    if total == 0:
        return
    lengths = offsets[1:] - offsets[:-1]
    request = expand_offsets(offsets, total)
    index = torch.arange(total, device=records.device)

    row_bad = (rows < 1) | (rows >= req_to_token.shape[0])
    row_starts = torch.where(row_bad, 0, rows) * req_to_token.stride(0)
    row_count, context = req_to_token.shape
    table = req_to_token.as_strided(((row_count - 1) * req_to_token.stride(0) + context,), (1,))
    entries = (row_starts - offsets[:-1]).index_select(0, request).add_(index)
    if bool((lengths > context).any()):  # garbage: nothing behind the end of a row is followed
        past_row = index - offsets[request] >= context
        slots = table.index_select(0, entries.masked_fill_(past_row, 0)).masked_fill_(past_row, -1)
    else:
        slots = table.index_select(0, entries)
    if mapping is not None:
        known = (slots >= 0) & (slots < mapping.shape[0])
        slots = torch.where(known, mapping[torch.where(known, slots, 0).long()].long(), -1)
        slots = slots.clamp(-1, (1 << 31) - 1)
    inside = slots.clamp(first_slot, records.shape[0] - 1)
    chain = records[:, r.CHAIN].index_select(0, inside)
    identity = records[:, r.IDENTITY].index_select(0, inside)

    place = (r.LIVE - offsets[:-1]).index_select(0, request).add_(index)  # flags and position a record must have here
    before = torch.empty_like(chain)
    before[1:] = chain[:-1]
    before = torch.where(place == r.LIVE, anchors.index_select(0, request), before)
    words = identity & r.MIX_INPUT_MASK
    link_bad = mix_(words, torch.empty_like(words)).add_(before) != chain
    place_bad = (identity >> POSITION_SHIFT) != place
    slot_bad = slots != inside
    if window is not None:
        first = (lengths - window).clamp_(min=0).index_select(0, request)
        position = place - r.LIVE
        link_bad &= (position != first) | (first == 0)
        outside = position < first
        slot_bad, place_bad, link_bad = slot_bad & ~outside, place_bad & ~outside, link_bad & ~outside
    bad = slot_bad | place_bad | link_bad

    ends = (offsets[1:] - 1).clamp_(min=0)
    end_bad = (chain.index_select(0, ends) != end_points) & (lengths > 0)
    # On the CPU looking is free and there is nearly never anything to see. A GPU would have to be waited for.
    if records.device.type == "cpu" and not bool(torch.cat((bad, end_bad, row_bad)).any()):
        return
    slots, positions = slots.to(torch.int64), place & r.POSITION_MASK
    found = records.index_select(0, inside)

    behind_bad_row = row_bad[request]
    dead = ((identity >> POSITION_SHIFT) & r.LIVE) == 0
    kind = torch.where(place_bad, torch.where(dead, int(r.Kind.DEAD_SLOT), int(r.Kind.POSITION)), int(r.Kind.LINK))
    kind = torch.where(slot_bad, int(r.Kind.SLOT_RANGE), kind)
    violations.append(row_bad & (lengths > 0), {r.ROW_KIND: int(r.Kind.ROW_RANGE), r.ROW_SLOT: rows, **_request(rows)})
    violations.append(
        bad & ~behind_bad_row,
        {
            r.ROW_KIND: kind,
            r.ROW_REQUEST: request,
            r.ROW_POSITION: positions,
            **_record(slots, found, writers[inside]),
        },
    )
    violations.append(
        end_bad & ~row_bad,
        {
            r.ROW_KIND: int(r.Kind.END_POINT),
            r.ROW_POSITION: lengths - 1,
            **_request(rows),
            **_record(slots[ends], found[ends], writers[inside[ends]]),
        },
    )


def _request(rows: torch.Tensor) -> dict[int, torch.Tensor | int]:
    return {r.ROW_REQUEST: torch.arange(rows.numel(), device=rows.device)}


def _record(slots: torch.Tensor, found: torch.Tensor, writers: torch.Tensor) -> dict[int, torch.Tensor | int]:
    return {
        r.ROW_SLOT: slots,
        r.ROW_IDENTITY: found[:, r.IDENTITY],
        r.ROW_CHAIN: found[:, r.CHAIN],
        r.ROW_DIGEST: found[:, r.DIGEST],
        r.ROW_LOCATOR: found[:, r.LOCATOR],
        r.ROW_WRITER: writers,
    }
