"""Rows that leave the pool as copies and come back: their records wait with the copy, and go when it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .space import Space


def find_tensor(copy: object) -> torch.Tensor | None:
    """The first tensor within nested lists, tuples and mappings."""
    if isinstance(copy, torch.Tensor):
        return copy
    parts = copy.values() if isinstance(copy, Mapping) else copy if isinstance(copy, list | tuple) else ()
    return next((found for part in parts if (found := find_tensor(part)) is not None), None)


class Copies:
    """Records of rows outside the pool, known by a tensor of their copy."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        self._spaces = spaces
        self._records = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """None of the copies will come back, or nobody knows with what."""
        self._records.clear()

    def note_copied(self, slots: torch.Tensor, copy: object) -> None:
        """The rows of main slots (n,) were copied out as ``copy``, in which SGLang keeps tensors."""
        key = find_tensor(copy)
        if key is not None:
            self._records[key] = [space.copy_records(slots) for space in self._spaces]

    def note_loaded(self, slots: torch.Tensor, copy: object) -> None:
        """``copy`` came back into main slots (n,): its records too, and the rows are compared with them."""
        key = find_tensor(copy)
        if key is not None and key in self._records:
            for space, records in zip(self._spaces, self._records[key], strict=True):
                space.restore(slots, records)
