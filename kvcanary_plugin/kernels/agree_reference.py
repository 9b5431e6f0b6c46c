"""Check that the entries of whole groups of positions are those of the slots a forward reads. Torch reference."""

from __future__ import annotations

import torch

from . import record as r
from .mixing import POSITION_SHIFT
from .plan_reference import expand_offsets
from .violations import ViolationBuffer


def verify_groups(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    main: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    total: int,
    ratio: int,
    first_slot: int,
    main_first_slot: int,
    violations: ViolationBuffer,
) -> None:
    """Verify the entry of every group of ``ratio`` positions that lies whole within the positions of a request.

    It is stored with the last position of its group, so its record must be that of the slot which the row names there,
    digest and locator aside. Where that slot is not the one of a live token of that position, and where the row does
    not exist, there is nothing to compare with: :func:`.verify_reference.verify_prefixes` reports those.

    Args:
        records: int64 (slot_count, RECORD_WORDS), of the entries.
        writers: int64 (slot_count,), only copied into violation rows.
        main: int64 (main_slot_count, RECORD_WORDS), of the slots that rows name. The entry of slot s is s // ratio.
        req_to_token: int32 (row_count, context), rows contiguous.
        rows: int64 (bs,).
        offsets: int64 (bs + 1,), CSR over the positions 0 .. length - 1 of each request.
        total: at least ``offsets[-1]``, known to the host.
        ratio: positions a group.
        first_slot, main_first_slot: entries and slots below them are padding.
    """
    n = total // ratio
    if n == 0:
        return
    row_count, context = req_to_token.shape
    row_bad = (rows < 1) | (rows >= row_count)
    lengths = (offsets[1:] - offsets[:-1]).clamp(max=context)
    groups = torch.zeros_like(offsets)
    torch.cumsum(torch.where(row_bad, 0, lengths // ratio), 0, out=groups[1:])
    request = expand_offsets(groups, n)
    index = torch.arange(n, device=records.device)
    chosen = index < groups[-1]
    position = torch.where(chosen, (index - groups[request] + 1) * ratio - 1, 0)
    slots = req_to_token[torch.where(row_bad, 0, rows)[request], position].to(torch.int64)

    held = chosen & (slots >= main_first_slot) & (slots < main.shape[0])
    wanted = main.index_select(0, torch.where(held, slots, 0))
    place = position + r.LIVE  # flags and position a record must have here
    held &= (wanted[:, r.IDENTITY] >> POSITION_SHIFT) == place
    entries = torch.where(held, slots // ratio, -1)
    known = (entries >= first_slot) & (entries < records.shape[0])
    inside = torch.where(known, entries, 0)
    found = torch.where(known[:, None], records.index_select(0, inside), 0)
    bad = held & (~known | (found[:, r.IDENTITY] != wanted[:, r.IDENTITY]) | (found[:, r.CHAIN] != wanted[:, r.CHAIN]))
    # On the CPU looking is free and there is nearly never anything to see. A GPU would have to be waited for.
    if records.device.type == "cpu" and not bool(bad.any()):
        return
    identity = found[:, r.IDENTITY]
    kind = torch.where((identity >> POSITION_SHIFT) == place, int(r.Kind.LINK), int(r.Kind.POSITION))
    kind = torch.where((identity & r.LIVE_BIT) == 0, int(r.Kind.DEAD_SLOT), kind)
    violations.append(
        bad,
        {
            r.ROW_KIND: torch.where(known, kind, int(r.Kind.SLOT_RANGE)),
            r.ROW_REQUEST: request,
            r.ROW_POSITION: position,
            r.ROW_SLOT: entries,
            r.ROW_IDENTITY: identity,
            r.ROW_CHAIN: found[:, r.CHAIN],
            r.ROW_DIGEST: found[:, r.DIGEST],
            r.ROW_LOCATOR: found[:, r.LOCATOR],
            r.ROW_WRITER: torch.where(known, writers[inside], 0),
        },
    )
