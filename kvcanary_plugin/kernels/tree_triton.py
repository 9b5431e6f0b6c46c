"""Records of a tree of draft tokens on a GPU: one program a request, whose tree it holds as a whole."""

from __future__ import annotations

import torch
import triton.language as tl

from . import record as r
from .launch import block_of, jit, launch
from .mixing_triton import (
    CHAIN,
    IDENTITY,
    LIVE_BIT,
    MIX_INPUT_MASK,
    POSITION_MASK,
    POSITION_SHIFT,
    RECORD_WORDS,
    TOKEN_MASK,
    append_rows,
    mix,
)
from .violations import ViolationBuffer

MAX_NODES = 128  # a program compares every node with every other

_WRITE_RANGE = tl.constexpr(int(r.Kind.WRITE_RANGE))
_DRAFT_PATH = tl.constexpr(int(r.Kind.DRAFT_PATH))
_WRITER_ROW_MASK = tl.constexpr(r.WRITER_ROW_MASK)
_WRITER_ROW_BITS = tl.constexpr(r.WRITER_ROW_BITS)


@jit
def _stamp_tree(
    records_ptr, writers_ptr, tails_ptr, slots_ptr, tokens_ptr, positions_ptr, rows_ptr, known_lens_ptr,
    known_chains_ptr, lengths_ptr, first_child_ptr, next_sibling_ptr, base_ptr, violations_ptr, violation_count_ptr,
    bs: tl.int64, nodes: tl.int64, row_count: tl.int64, slot_count: tl.int64, first_slot: tl.int64, step: tl.int64,
    violation_capacity: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    tail = tl.load(tails_ptr + tl.where((row < 0) | (row >= row_count), 0, row))
    length = tl.load(lengths_ptr + request).to(tl.int64)
    seed = tl.where(length == tl.load(known_lens_ptr + request), tl.load(known_chains_ptr + request), tail)
    tl.store(base_ptr + request, seed)
    tl.store(base_ptr + bs + request, length)

    n = tl.arange(0, BLOCK).to(tl.int64)
    real = n < nodes
    t = request * nodes + n
    token = tl.load(tokens_ptr + t, mask=real, other=0)
    position = tl.load(positions_ptr + t, mask=real, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + t, mask=real, other=-1)
    child = tl.load(first_child_ptr + t, mask=real, other=-1).to(tl.int64)
    sibling = tl.load(next_sibling_ptr + t, mask=real, other=-1).to(tl.int64)
    word = (token & TOKEN_MASK) | ((position & POSITION_MASK) << POSITION_SHIFT)
    own = tl.where(real, mix(word), 0)

    # Down: every node; across: the places that its links may lead to. See the reference for what hangs on what.
    across = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    is_child = (child[:, None] == across) & (across >= 1)
    is_sibling = (sibling[:, None] == across) & (across >= 1)
    above = tl.sum(tl.where(is_child, own[:, None], 0), 0)
    up = tl.sum(tl.where(is_child, n[:, None], 0) + tl.where(is_sibling, n[:, None], 0), 0) % nodes
    reach = tl.full((), 1, tl.int64)
    while reach < nodes:
        is_up = up[:, None] == across
        above += tl.sum(tl.where(is_up, above[None, :], 0), 1)
        up = tl.sum(tl.where(is_up, up[None, :], 0), 1)
        reach *= 2
    chain = above + own + seed

    outside = real & ((slot < first_slot) | (slot >= slot_count))
    sound = real & ~outside
    record = records_ptr + slot * RECORD_WORDS
    tl.store(record + CHAIN, chain, mask=sound)
    tl.store(record + IDENTITY, word, mask=sound)
    tl.store(writers_ptr + slot, (row & _WRITER_ROW_MASK) | (step << _WRITER_ROW_BITS), mask=sound)
    if tl.max(outside.to(tl.int32), 0) > 0:
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, outside,
            _WRITE_RANGE, request, position, slot, word, chain, 0, 0, 0, 0, 0,
        )  # fmt: skip


@jit
def _commit_path(
    records_ptr, writers_ptr, tails_ptr, slots_ptr, tokens_ptr, rows_ptr, base_ptr, accept_lens_ptr, accepted_ptr,
    violations_ptr, violation_count_ptr, bs: tl.int64, nodes: tl.int64, row_count: tl.int64, slot_count: tl.int64,
    first_slot: tl.int64, check: tl.int64, violation_capacity: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    seed = tl.load(base_ptr + request)
    length = tl.load(base_ptr + bs + request)
    count = tl.load(accept_lens_ptr + request).to(tl.int64)
    n = tl.arange(0, BLOCK).to(tl.int64)
    real = n < nodes
    kept = real & (n < count)
    root = tl.load(tokens_ptr + request * nodes)
    behind = tl.load(accepted_ptr + request * nodes + n - 1, mask=real & (n > 0), other=0).to(tl.int64)
    token = tl.where(n == 0, root, behind)
    word = (token & TOKEN_MASK) | (((length + n) & POSITION_MASK) << POSITION_SHIFT)
    hashes = tl.where(kept, mix(word), 0)
    chain = seed + tl.cumsum(hashes, 0)
    if (row > 0) & (row < row_count):
        tl.store(tails_ptr + row, seed + tl.sum(hashes, 0))

    slot = tl.load(slots_ptr + request * nodes + n, mask=real, other=-1)
    inside = real & (slot >= first_slot) & (slot < slot_count)
    record = records_ptr + slot * RECORD_WORDS
    identity = tl.load(record + IDENTITY, mask=inside, other=0)
    found = tl.load(record + CHAIN, mask=inside, other=0)
    wrong = kept & inside & (((identity & MIX_INPUT_MASK) != word) | (found != chain)) & (check != 0)
    if tl.max(wrong.to(tl.int32), 0) > 0:
        append_rows(
            violations_ptr, violation_count_ptr, violation_capacity, wrong,
            _DRAFT_PATH, request, word >> POSITION_SHIFT, slot, identity, found, 0, 0, chain, word,
            tl.load(writers_ptr + slot, mask=inside, other=0),
        )  # fmt: skip
    tl.store(record + IDENTITY, tl.where(kept, identity | LIVE_BIT, identity & ~LIVE_BIT), mask=inside)


def stamp_tree(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    tails: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    known_lens: torch.Tensor,
    known_chains: torch.Tensor,
    lengths: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    base: torch.Tensor,
    step: int,
    first_slot: int,
    violations: ViolationBuffer,
) -> None:
    """See :func:`.tree_reference.stamp_tree`. Up to ``MAX_NODES`` nodes a request."""
    bs, nodes = first_child.shape
    block = block_of(nodes, 2, MAX_NODES)
    launch(
        _stamp_tree,
        bs,
        (
            records,
            writers,
            tails,
            slots,
            tokens,
            positions,
            rows,
            known_lens,
            known_chains,
            lengths,
            first_child,
            next_sibling,
            base,
            violations.rows,
            violations.count,
            bs,
            nodes,
            tails.shape[0],
            records.shape[0],
            first_slot,
            step,
            violations.capacity,
        ),
        (block,),
        device=records.device,
        warps=1 if block <= 16 else 4,
    )


def commit_path(
    *,
    records: torch.Tensor,
    writers: torch.Tensor,
    tails: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    base: torch.Tensor,
    accept_lens: torch.Tensor,
    accepted: torch.Tensor,
    first_slot: int,
    check: bool,
    violations: ViolationBuffer,
) -> None:
    """See :func:`.tree_reference.commit_path`."""
    bs = rows.shape[0]
    nodes = slots.shape[0] // bs
    launch(
        _commit_path,
        bs,
        (
            records,
            writers,
            tails,
            slots,
            tokens,
            rows,
            base,
            accept_lens,
            accepted,
            violations.rows,
            violations.count,
            bs,
            nodes,
            tails.shape[0],
            records.shape[0],
            first_slot,
            int(check),
            violations.capacity,
        ),
        (block_of(nodes, 2, MAX_NODES),),
        device=records.device,
        warps=1,
    )
