"""What a CPU server runs equals the torch references, bit for bit, clean and damaged."""

import pytest
import torch

from kvcanary_plugin.faults.library import bytes_of
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import NUMPY, REFERENCE
from kvcanary_plugin.kernels.violations import ViolationBuffer
from kvcanary_plugin.pool_patcher.sources import (
    SourceTable,
    make_packed_source,
    make_row_source,
    make_source,
    view_slots,
)

SLOTS = 700
LENGTHS = {
    "decode": ([30, 1, 77], [1, 1, 1]),
    "prefill": ([0, 0], [129, 1]),
    "mixed": ([16, 0, 63, 0], [1, 40, 1, 17]),
    "one": ([0], [1]),
    "uneven": ([5, 0], [0, 2]),
}


def make_table():
    """Rows of whole words, of odd width, packed pages with a gap behind them, and pages of groups."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    whole = [make_row_source(layer_buffer=noise(SLOTS, 64), read_bytes=64)[0] for _ in range(3)]
    odd = [make_row_source(layer_buffer=noise(SLOTS, 13), read_bytes=13)[0] for _ in range(2)]
    packed = make_packed_source(
        page_buffer=noise(SLOTS // 4, 4 * 24 + 8), page_size=4, bytes_per_token=24, read_bytes=24
    )
    grouped = [make_source(rows, 16) for rows in view_slots(noise(SLOTS // 20, 1, 5, 4, 16), slot_axes=(3, 2))]
    named = [((index, "K"), source) for index, source in enumerate([*whole, *odd, *packed, *grouped])]
    return SourceTable(named, SLOTS, torch.device("cpu"))


def run(backend, lengths, damage):
    """A chain for the prefixes, then verify, write, seal and scrub; returns everything that was written or found."""
    prefix_lens, write_lens = (torch.tensor(column) for column in lengths)
    bs, table, found = len(prefix_lens), make_table(), ViolationBuffer(512, "cpu")
    generator = torch.Generator().manual_seed(1)
    records = torch.randint(-(2**62), 2**62, (SLOTS, r.RECORD_WORDS), generator=generator) & ~r.LIVE_BIT
    writers = torch.full((SLOTS,), -7)
    req_to_token = torch.full((bs + 2, 200), -3, dtype=torch.int32)
    free = torch.randperm(SLOTS - 1, generator=generator) + 1
    seeds = torch.randint(-(2**62), 2**62, (bs,), generator=generator)
    rows = torch.arange(1, bs + 1)
    offsets = torch.full((2, bs + 1), -9)
    backend.plan_offsets(prefix_lens, write_lens, verify_offsets=offsets[0], write_offsets=offsets[1])
    total, new = int(offsets[0, -1]), int(offsets[1, -1])
    for index, length in enumerate(prefix_lens.tolist()):
        start = int(offsets[0, index])
        req_to_token[index + 1, :length] = free[start : start + length].int()
    common = {"records": records, "writers": writers, "first_slot": 1, "violations": found}
    tokens = torch.randint(0, 2**31, (total + new,), generator=generator)
    backend.write_chain(
        slots=free[:total],
        tokens=tokens[:total],
        rows=rows,
        prefix_lens=torch.zeros_like(prefix_lens),
        offsets=offsets[0],
        seeds=seeds,
        step=5,
        **common,
    )
    backend.seal_slots(records=records, table=table, slots=free[:total])
    last = [int(free[int(end) - 1]) if length else -1 for end, length in zip(offsets[0, 1:], prefix_lens, strict=True)]
    ends = torch.where(prefix_lens > 0, records[last, r.CHAIN], seeds)
    damage(records, req_to_token, table, rows, free)
    backend.verify_prefixes(
        req_to_token=req_to_token, rows=rows, offsets=offsets[0], anchors=seeds, end_points=ends, total=total, **common
    )
    backend.write_chain(
        slots=free[total : total + new],
        tokens=tokens[total:],
        rows=rows,
        prefix_lens=prefix_lens,
        offsets=offsets[1],
        seeds=ends,
        step=6,
        **common,
    )
    scan = {"table": table, "records": records, "writers": writers, "violations": found}
    backend.seal_and_scrub(slots=free[total : total + new], start=1, count=SLOTS - 1, step=6, **scan)
    backend.check_slots(slots=free[:total], request=1, **scan)
    backend.scrub_range(start=SLOTS - 50, count=100, **scan)
    return records[1:], writers[1:], offsets, found.count, found.rows


def nothing(records, req_to_token, table, rows, free):
    """The clean twin."""


def flip_bytes(records, req_to_token, table, rows, free):
    for source, slot in zip(table.sources, free[:7].tolist(), strict=True):
        bytes_of(source.rows, slot)[-1] ^= 1


def swap_entries(records, req_to_token, table, rows, free):
    req_to_token[1, [0, 2]] = req_to_token[1, [2, 0]]


def leave_the_pool(records, req_to_token, table, rows, free):
    req_to_token[1, 0], req_to_token[1, 1] = -1, SLOTS


def leave_the_table(records, req_to_token, table, rows, free):
    rows[0] = 2**40


def store_outside(records, req_to_token, table, rows, free):
    free[-1:] = 0
    free[sum_of(req_to_token) : sum_of(req_to_token) + 1] = SLOTS + 5


def sum_of(req_to_token):
    return int((req_to_token[1:] > 0).sum())


def change_token(records, req_to_token, table, rows, free):
    records[free[3], r.IDENTITY] ^= 1


def free_slot(records, req_to_token, table, rows, free):
    records[free[2], r.IDENTITY] &= ~r.LIVE_BIT


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    "damage",
    [nothing, flip_bytes, swap_entries, leave_the_pool, leave_the_table, store_outside, change_token, free_slot],
    ids=lambda damage: damage.__name__,
)
def test_numpy_equals_the_reference(lengths, damage):
    expected, found = run(REFERENCE, lengths, damage), run(NUMPY, lengths, damage)

    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    if damage is nothing:
        assert int(found[3]) == 0
    elif lengths == LENGTHS["decode"]:
        assert int(found[3]) > 0
