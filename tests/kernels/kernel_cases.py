"""Pools, batches and sound records of any shape for the kernel tests, all contents random."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE
from kvcanary_plugin.kernels.violations import ViolationBuffer
from kvcanary_plugin.pool_patcher.sources import (
    SourceTable,
    make_packed_source,
    make_row_source,
    make_source,
    view_slots,
)

INT64 = torch.iinfo(torch.int64)


def random_words(*shape: int, device: torch.device, seed: int) -> torch.Tensor:
    """int64 words, every bit random."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(INT64.min, INT64.max, shape, generator=generator, dtype=torch.int64).to(device)


def random_bytes(*shape: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)


def make_table(
    widths: list[int],
    slot_count: int,
    device: torch.device,
    *,
    apart: int = 0,
    page_size: int = 1,
    groups: int = 1,
    seed: int = 0,
):
    """A table with one source for each width in bytes.

    Args:
        apart: unused bytes between two rows, or behind a page.
        page_size: above 1, pages hold that many slots.
        groups: above 1, the slots of a page lie in that many groups: the first of each group, then the second of each.
    """
    named = []
    for index, width in enumerate(widths):
        if page_size == 1:
            buffer = random_bytes(slot_count, width + apart, device=device, seed=seed + index)[:, :width]
            (source,) = make_row_source(layer_buffer=buffer, read_bytes=width)
        else:
            pages = -(-slot_count // page_size)
            buffer = random_bytes(pages, page_size * width + apart, device=device, seed=seed + index)
            if groups > 1:
                lanes = buffer[:, : page_size * width].unflatten(1, (page_size // groups, groups, width))
                (rows,) = view_slots(lanes, slot_axes=(2, 1))
                source = make_source(rows, width)
            else:
                (source,) = make_packed_source(
                    page_buffer=buffer, page_size=page_size, bytes_per_token=width, read_bytes=width
                )
        named.append(((index // 2, "KV"[index % 2]), source))
    return SourceTable(named, slot_count, device)


@dataclass
class Batch:
    """Requests with sound records of all their prefixes; tests damage what they like."""

    records: torch.Tensor
    writers: torch.Tensor
    req_to_token: torch.Tensor
    rows: torch.Tensor
    lengths: list[int]
    offsets: torch.Tensor
    anchors: torch.Tensor
    end_points: torch.Tensor

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def verify(self, backend, capacity: int = 4096, **options) -> ViolationBuffer:
        violations = poisoned_violations(capacity, self.records.device)
        backend.verify_prefixes(
            records=self.records,
            writers=self.writers,
            req_to_token=self.req_to_token,
            rows=self.rows,
            offsets=self.offsets,
            anchors=self.anchors,
            end_points=self.end_points,
            total=self.total,
            first_slot=1,
            violations=violations,
            **options,
        )
        return violations


def make_offsets(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], device=device)


def make_batch(
    lengths: list[int], device: torch.device, *, spare: int = 8, stride: int | None = None, seed: int = 0
) -> Batch:
    """A batch whose request i has ``lengths[i]`` positions in permuted slots, with records made by the reference."""
    generator = torch.Generator().manual_seed(seed)
    total, bs, context = sum(lengths), len(lengths), max([*lengths, 1]) + 3
    slot_count = total + 1 + spare
    slots = (torch.randperm(slot_count - 1, generator=generator)[:total] + 1).to(device)
    wide = torch.randint(-(2**31), 2**31 - 1, (bs + 1, max(context, stride or 0)), dtype=torch.int32).to(device)
    table = wide[:, :context]
    rows = (torch.randperm(bs, generator=generator) + 1).to(device)
    offsets = make_offsets(lengths, device)
    for row, (start, stop) in zip(rows.tolist(), pairwise(offsets.tolist()), strict=True):
        table[row, : stop - start] = slots[start:stop].to(torch.int32)
    records = random_words(slot_count, r.RECORD_WORDS, device=device, seed=seed)
    records[:, r.IDENTITY] &= ~r.LIVE_BIT
    writers = random_words(slot_count, device=device, seed=seed + 1)
    anchors = random_words(bs, device=device, seed=seed + 2)
    REFERENCE.write_chain(
        records=records,
        writers=writers,
        slots=slots,
        tokens=torch.randint(0, 2**17, (total,), generator=generator).to(device),
        rows=rows,
        prefix_lens=torch.zeros(bs, dtype=torch.int64, device=device),
        offsets=offsets,
        seeds=anchors,
        step=7,
        first_slot=1,
        violations=ViolationBuffer(1, device),
    )
    ends = torch.where(offsets[1:] > offsets[:-1], offsets[1:] - 1, 0)
    chains = records[slots[ends], r.CHAIN] if total else anchors
    return Batch(records, writers, table, rows, lengths, offsets, anchors, chains)


def poisoned_violations(capacity: int, device: torch.device) -> ViolationBuffer:
    violations = ViolationBuffer(capacity, device)
    violations.rows.fill_(-0x5A5A5A5A5A5A5A5B)
    return violations


def rows_of(violations: ViolationBuffer) -> tuple[int, list[list[int]]]:
    """Count and the sorted raw rows: their order on a GPU is that of arrival."""
    count = int(violations.count)
    return count, sorted(violations.rows[: min(count, violations.capacity)].tolist())
