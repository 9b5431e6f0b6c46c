"""What one rank has found, agreed upon by all ranks of a replica, because one that acts alone makes the others hang."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Finding = tuple[int, ...]


class Consensus:
    """Reductions over the ranks that serve the same requests, on the CPU. Nothing is sent where there is one rank.

    Every rank makes the same calls in the same order. What it passes is its own; what it gets back is everybody's.
    """

    def __init__(self, group: Any = None) -> None:
        """``group``: a gloo group of those ranks; None for a single one."""
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)

    def highest(self, values: Sequence[int]) -> list[int]:
        """The highest of each value over the ranks, which pass equally many."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor]

    def union(self, findings: Iterable[Finding], room: int, width: int) -> list[Finding]:
        """Every finding of every rank once, sorted.

        Args:
            findings: those of this rank, at most ``room``.
            room: the most that any rank has, as :meth:`highest` gave it.
            width: int64 words a finding has.
        """
        own = sorted(set(findings))
        if self.size == 1 or not room:
            return own
        sent = torch.zeros((room, width + 1), dtype=torch.int64)
        for row, finding in enumerate(own):
            sent[row] = torch.tensor([1, *finding])
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self._group)
        return sorted({tuple(row[1:]) for part in received for row in part.tolist() if row[0]})
