"""Digests of everything a pool holds, and what changed between two of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvcanary_plugin.kernels.fold_numpy import fold_ids
from kvcanary_plugin.pool_patcher.adapters import draft_pool
from kvcanary_plugin.pool_patcher.adapters.draft import PoolDraft, StateDraft

from .cases import Built

Place = tuple[str, int, int, str]  # space, slot, layer, half


class Folding:
    """All spaces of a pool, folded whole.

    Attributes:
        draft: what the adapters say of the pool.
        storages: the memory that any source reads, whole, as bytes.
    """

    def __init__(self, built: Built, *, states: bool = True) -> None:
        self.draft: PoolDraft = draft_pool(built.pool, built.allocator, built.rows, built.window)
        drafts = (self.draft.main, *self.draft.companions, *(self.draft.states if states else ()))
        self.tables = [(draft.finish("all", torch.device("cpu")).table, draft.name) for draft in drafts]
        self._splits = [draft.split if isinstance(draft, StateDraft) else 1 for draft in drafts]
        parts = [part for draft in drafts for part in draft.parts]
        storages = {part.rows.untyped_storage().data_ptr(): part.rows for part in parts}
        self.storages = [
            torch.empty(0, dtype=torch.uint8).set_(rows.untyped_storage(), 0, (rows.untyped_storage().nbytes(),), (1,))
            for rows in storages.values()
        ]

    def fold(self) -> list[np.ndarray]:
        """int64 (2, slots) for each space: digest and locator."""
        return [np.stack(fold_ids(table, np.arange(table.slot_count))) for table, _ in self.tables]

    def changed_slots(self, before: list[np.ndarray], after: list[np.ndarray]) -> Iterator[tuple[int, int, int]]:
        """Space, row of its table and slot of every difference."""
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            for row in np.flatnonzero((old != new).any(0)).tolist():
                yield index, row, row // self._splits[index]

    def changes(self, before: list[np.ndarray], after: list[np.ndarray]) -> Iterator[Place]:
        """Where the digests differ, found as the guard's diagnosis does."""
        for index, row, slot in self.changed_slots(before, after):
            table, name = self.tables[index]
            digest, locator = (after[index] - before[index])[:, row]
            weights = np.arange(len(table.sources), dtype=np.int64) * 2 + 1
            found = {table.names[source] for source in np.flatnonzero(weights * digest == locator).tolist()}
            assert len(found) == 1, f"{name} slot {slot}: {len(found)} places fit"
            yield (name, slot, *found.pop())
