"""Trees of draft tokens: from the forward that verifies them until the accepted path is committed.

The forward stores every node of a tree. Which path was accepted is known on the device only, and only then does SGLang
move the rows of that path to the front. Records are made for every node and sealed before the move, go with the rows,
and become live where the accepted tokens are expected: what does not fit there was moved wrongly, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import GuardError
from ..kernels.backend import Backend
from .batch import Batch
from .space import Space
from .step import Step


@dataclass(frozen=True, slots=True)
class Trees:
    """What the verifying forward knows of the drafts, tensors of SGLang's that it does not change.

    Attributes:
        positions: (bs * nodes or more,) of each node.
        lengths: (bs,), tokens committed before.
        first_child, next_sibling: (bs, nodes), places within the request, -1 for none.
    """

    positions: torch.Tensor
    lengths: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor


class Drafts:
    """The trees of one guard.

    Attributes:
        tails: int64 (row_count,), the chain behind what is committed of each row, as the device has come to know it.
        step: the forward whose trees wait for :meth:`commit`, else None.
    """

    def __init__(self, backend: Backend, space: Space, row_count: int, device: torch.device) -> None:
        """``space``: the main one of the guard, which has no other."""
        self.tails = torch.zeros(row_count, dtype=torch.int64, device=device)
        self.step: Step | None = None
        self._backend = backend
        self._space = space
        self._room = torch.zeros(2 * 16, dtype=torch.int64, device=device)
        self._base = self._room[:0].view(2, 0)

    @property
    def resident_bytes(self) -> int:
        """Device bytes kept beside the pool."""
        return (self.tails.numel() + self._room.numel()) * 8

    @property
    def lengths(self) -> torch.Tensor:
        """Int64 (bs,), tokens that were committed before the latest trees."""
        return self._base[1]

    def stamp(self, step: Step, batch: Batch, trees: Trees | None) -> None:
        """Make the records of what the forward is to store. Enqueued ahead of it.

        Raises:
            GuardError: the forward carries other trees than were announced.
        """
        bs, nodes = len(step.requests), step.nodes
        shapes = None if trees is None else (trees.first_child.shape, trees.next_sibling.shape, trees.lengths.shape)
        if trees is None or shapes != ((bs, nodes), (bs, nodes), (bs,)) or trees.positions.shape[0] < bs * nodes:
            raise GuardError(f"step {step.number} was announced with trees of {nodes} tokens but carries others")
        if self._room.numel() < 2 * bs:
            self._room = self._room.new_zeros(4 * bs)
        self._base = self._room[: 2 * bs].view(2, bs)
        records, fields = self._space.records, batch.fields
        self._backend.stamp_tree(
            records=records.hot,
            writers=records.writers,
            tails=self.tails,
            slots=batch.slots,
            tokens=batch.tokens,
            positions=trees.positions[: bs * nodes].contiguous(),
            rows=batch.forward_rows,
            known_lens=fields.prefix_lens,
            known_chains=fields.chains,
            lengths=trees.lengths.contiguous(),
            first_child=trees.first_child.contiguous(),
            next_sibling=trees.next_sibling.contiguous(),
            base=self._base,
            step=step.number,
            first_slot=records.first_slot,
            violations=self._space.violations,
        )

    def commit(self, batch: Batch, accept_lens: torch.Tensor, accepted: torch.Tensor) -> None:
        """The path was chosen and its rows were moved; see ``commit_path``. Enqueued behind the move.

        Args:
            batch: the forward's.
            accept_lens: int (bs,), tokens of each path, the root included.
            accepted: int (bs * nodes,), the token sampled behind each of them, packed to the front.

        Raises:
            GuardError: they are of another batch.
        """
        bs, written = self._base.shape[1], batch.slots.shape[0]
        if accept_lens.shape[0] != bs or accepted.numel() != written:
            raise GuardError(
                f"{written} draft tokens of {bs} requests were verified, but {accepted.numel()} results of "
                f"{accept_lens.shape[0]} came back"
            )
        records = self._space.records
        self._backend.commit_path(
            records=records.hot,
            writers=records.writers,
            tails=self.tails,
            slots=batch.slots,
            tokens=batch.tokens,
            rows=batch.forward_rows,
            base=self._base,
            accept_lens=accept_lens.contiguous(),
            accepted=accepted.contiguous(),
            first_slot=records.first_slot,
            check=self._space.verifies,
            violations=self._space.violations,
        )
