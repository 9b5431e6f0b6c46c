"""Records of a tree of draft tokens: made for every node before the verifying forward, and kept for the accepted path.

The tree of a request comes as SGLang's sampler walks it: for each node its first child and its next sibling, as places
within the request, -1 for none. Node 0 is the root and stands for the token that was sampled last. Torch reference.
"""

from __future__ import annotations

import torch

from . import record as r
from .mixing import POSITION_SHIFT, mix
from .violations import ViolationBuffer


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
    """Write chain, identity word and writer stamp of every node, not live yet; the chain follows the path to the node.

    Args:
        records: int64 (slot_count, RECORD_WORDS), updated at ``slots``.
        writers: int64 (slot_count,), updated at ``slots``.
        tails: int64 (row_count,), the chain behind the last committed token of each row, as the device has it.
        slots, tokens: int64 (bs * nodes,). A slot outside [first_slot, slot_count) is reported and not written.
        positions: int64 or int32 (bs * nodes,).
        rows: int64 (bs,).
        known_lens, known_chains: int64 (bs,), committed tokens and chain behind them as far as the host knows.
        lengths: int64 or int32 (bs,), committed tokens; where that is more than is known, ``tails`` has the chain.
        first_child, next_sibling: int64 or int32 (bs, nodes).
        base: int64 (2, bs), out: the chain behind the committed tokens, and how many they are.
    """
    bs, nodes = first_child.shape
    device = slots.device
    inside_rows = torch.where((rows < 0) | (rows >= tails.shape[0]), 0, rows)
    base[0] = torch.where(lengths.long() == known_lens, known_chains, tails.index_select(0, inside_rows))
    base[1] = lengths
    words = (tokens & r.TOKEN_MASK) | (positions.long() & r.POSITION_MASK) << POSITION_SHIFT
    hashes = mix(words).view(bs, nodes)
    above = torch.zeros((bs, nodes), dtype=torch.int64, device=device)
    # Where a node hangs: on its parent, whose hash it adds, or on a sibling, whose place it shares.
    ups = torch.zeros((bs, nodes), dtype=torch.int64, device=device)
    every = torch.arange(nodes, device=device).expand(bs, nodes)
    for links, adds in ((first_child, hashes), (next_sibling, torch.zeros_like(hashes))):
        links = links.long()
        # Links to nowhere go to one place more, which is left out.
        places = torch.where((links < 1) | (links >= nodes), nodes, links)
        for into, values in ((above, adds), (ups, every)):
            wide = torch.nn.functional.pad(into, (0, 1))
            into[:] = wide.scatter_add_(1, places, values)[:, :nodes]
    ups %= nodes  # a tree that is none must not lead outside
    reach = 1
    while reach < nodes:
        above += above.gather(1, ups)
        ups = ups.gather(1, ups)
        reach *= 2
    chains = (above + hashes + base[0, :, None]).view(-1)

    requests = torch.arange(bs, device=device).repeat_interleave(nodes)
    outside = (slots < first_slot) | (slots >= records.shape[0])
    violations.append(
        outside,
        {
            r.ROW_KIND: int(r.Kind.WRITE_RANGE),
            r.ROW_REQUEST: requests,
            r.ROW_POSITION: positions.long(),
            r.ROW_SLOT: slots,
            r.ROW_IDENTITY: words,
            r.ROW_CHAIN: chains,
        },
    )
    chosen = slots[~outside]
    records[:, r.CHAIN].index_copy_(0, chosen, chains[~outside])
    records[:, r.IDENTITY].index_copy_(0, chosen, words[~outside])
    stamps = (rows & r.WRITER_ROW_MASK) | (step << r.WRITER_ROW_BITS)
    writers.index_copy_(0, chosen, stamps.index_select(0, requests)[~outside])


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
    """Make the first ``accept_lens[i]`` slots of each request live and move its tail on; nothing else stays live.

    What stands in them by then must be the record of the accepted token at that place; records go where rows go.

    Args:
        records, writers, tails, slots, tokens, rows: see :func:`stamp_tree`.
        base: int64 (2, bs), from :func:`stamp_tree`.
        accept_lens: int64 or int32 (bs,), accepted tokens including the root; more than there are nodes count as all.
        accepted: int64 or int32 (bs * nodes,), the token sampled behind each accepted one, packed to the front.
        check: report slots with another record than that of the accepted token.
    """
    bs = rows.shape[0]
    nodes = slots.shape[0] // bs
    device = slots.device
    place = torch.arange(nodes, device=device).expand(bs, nodes)
    kept = place < accept_lens.long()[:, None]
    path = torch.cat((tokens.view(bs, nodes)[:, :1], accepted.long().view(bs, nodes)[:, :-1]), 1) & r.TOKEN_MASK
    words = path | ((base[1, :, None] + place) & r.POSITION_MASK) << POSITION_SHIFT
    hashes = torch.where(kept, mix(words), 0)
    chains = base[0, :, None] + hashes.cumsum(1)
    sound_rows = (rows > 0) & (rows < tails.shape[0])
    tails[rows[sound_rows]] = chains[sound_rows, -1]

    slots = slots.view(bs, nodes)
    inside = (slots >= first_slot) & (slots < records.shape[0])
    found = records[torch.where(inside, slots, 0)]
    wrong = kept & inside & check
    wrong &= (found[..., r.IDENTITY] & r.MIX_INPUT_MASK != words) | (found[..., r.CHAIN] != chains)
    violations.append(
        wrong.view(-1),
        {
            r.ROW_KIND: int(r.Kind.DRAFT_PATH),
            r.ROW_REQUEST: torch.arange(bs, device=device).repeat_interleave(nodes),
            r.ROW_POSITION: (words >> POSITION_SHIFT).view(-1),
            r.ROW_SLOT: slots.reshape(-1),
            r.ROW_IDENTITY: found[..., r.IDENTITY].reshape(-1),
            r.ROW_CHAIN: found[..., r.CHAIN].reshape(-1),
            r.ROW_FOUND_DIGEST: chains.view(-1),
            r.ROW_FOUND_LOCATOR: words.view(-1),
            r.ROW_WRITER: writers[torch.where(inside, slots, 0)].view(-1),
        },
    )
    live = torch.where(kept, found[..., r.IDENTITY] | r.LIVE_BIT, found[..., r.IDENTITY] & ~r.LIVE_BIT)
    records[:, r.IDENTITY].index_copy_(0, slots[inside], live[inside])
