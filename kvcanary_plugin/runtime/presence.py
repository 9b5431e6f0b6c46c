"""Whether a forward stores every row of its new slots: poison before it, none left behind it.

Not every source is stored by every model: layers that share the KV of others have rows that stay empty. Which ones is
learned from the first forwards, said once, and remembered for the report.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.poison_reference import FIRST, LAST, edges_of, find_survivors
from ..pool_patcher.sources import SourceTable

LEARNING_FORWARDS = 4


@dataclass(frozen=True, slots=True)
class Learned:
    """What the first forwards showed.

    Attributes:
        tokens: tokens they stored.
        unstored: (layer, half) of sources that none of them stored.
        too_narrow: (layer, half) of sources whose rows are too short to be watched.
    """

    tokens: int
    unstored: tuple[tuple[int, str], ...]
    too_narrow: tuple[tuple[int, str], ...]


class Presence:
    """Which sources of one slot space are poisoned, and which must have been stored.

    Attributes:
        chosen: int64 (source_count,), 1 for sources whose rows are poisoned.
        expects: int64 (source_count,), 1 for sources that every forward stores; all 0 while learning.
        learned: what was learned, None so far.
    """

    def __init__(self, table: SourceTable, device: torch.device) -> None:
        self._table = table
        count = len(table.sources)
        self.chosen = torch.ones(count, dtype=torch.int64, device=device)
        self.expects = torch.zeros(count, dtype=torch.int64, device=device)
        self.learned: Learned | None = None
        self._missed = torch.zeros(count, dtype=torch.int64, device=device)
        self._tokens = 0
        self._forwards = 0

    @property
    def is_learning(self) -> bool:
        """Whether more forwards are to be observed."""
        return self._forwards < LEARNING_FORWARDS

    def observe(self, slots: torch.Tensor) -> None:
        """While learning: count rows of ``slots`` (int64 (n,)) that a forward left as they were. It may wait for it."""
        slots = slots[(slots >= 0) & (slots < self._table.slot_count)]
        if not slots.numel():
            return
        survivors = find_survivors(self._table, slots)
        whole = [FIRST if len(edges_of(source.read_bytes)) < 2 else FIRST | LAST for source in self._table.sources]
        untouched = survivors == torch.tensor(whole, device=slots.device)[:, None]
        self._missed += untouched.sum(1)
        self._tokens += slots.numel()
        self._forwards += 1

    def conclude(self) -> Learned | None:
        """Once enough was observed, and only the first time: what was learned. It may wait for the device."""
        if self.is_learning or self.learned is not None:
            return None
        unstored, too_narrow = [], []
        for index, missed in enumerate(self._missed.tolist()):
            if not edges_of(self._table.sources[index].read_bytes):
                too_narrow.append(index)
            elif missed == self._tokens:
                unstored.append(index)
        self.chosen[unstored + too_narrow] = 0
        self.expects.copy_(self.chosen)
        names = self._table.names
        self.learned = Learned(self._tokens, tuple(names[i] for i in unstored), tuple(names[i] for i in too_narrow))
        return self.learned
