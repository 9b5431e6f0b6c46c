"""Whether rows are copied to host memory only once the forwards that store them have ended.

A slot has a live record from the end of the forward that stored it, on the device's own word, until it is freed. SGLang
copies on a stream of its own that waits for the scheduler's. Ahead of the copy, on that stream, the slots must all be
live. One that is not holds what was there before its forward, and goes to host memory as if it were whole.

Not seen: a slot that was freed, given out again and copied all between two forwards, as its old record is still live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..kernels import record as r
from .violation import Violation

_NONE = (1 << 63) - 1
_MOST_UNREAD = 256  # copies whose answer has not come: more than a stream holds up


class _Answer(NamedTuple):
    step: int
    first: torch.Tensor  # int64 (1,) in host memory: the lowest slot that was not live, _NONE for none
    is_there: Any  # event behind the copy to it, None on a CPU


class BackupOrder:
    """Copies from one pool to host memory, and what was live when they began."""

    def __init__(self, records: torch.Tensor, describe: Callable[[int, int], Violation]) -> None:
        """``records``: int64 (slot_count, RECORD_WORDS) of the pool; ``describe`` makes a violation of step, slot."""
        self._records = records
        self._describe = describe
        self._module: Any = None if records.device.type == "cpu" else torch.get_device_module(records.device)
        self._unread: list[_Answer] = []

    def begin(self, slots: torch.Tensor, step: int) -> None:
        """Rows of ``slots``, int (n,), are about to be copied. Called on the stream that copies, behind its wait.

        ``step`` is the number of the next forward.
        """
        if not slots.numel() or len(self._unread) >= _MOST_UNREAD:
            return
        if self._module is not None and slots.device.type == "cpu":
            slots = slots.pin_memory()  # else the host would wait for all that the stream has to do
        slots = slots.to(self._records.device, torch.int64, non_blocking=True)
        inside = (slots >= 0) & (slots < len(self._records))
        identities = self._records[:, r.IDENTITY].index_select(0, torch.where(inside, slots, 0))
        is_live = inside & (identities & r.LIVE_BIT != 0)
        first = torch.where(is_live, _NONE, slots).amin().view(1)
        is_there = None
        if self._module is not None:
            first = torch.empty(1, dtype=torch.int64, pin_memory=True).copy_(first, non_blocking=True)
            is_there = self._module.Event()
            is_there.record()
        self._unread.append(_Answer(step, first, is_there))

    def read(self) -> list[Violation]:
        """What was copied too early, one violation a copy, as far as the answers are there. Does not wait."""
        found = []
        while self._unread and (self._unread[0].is_there is None or self._unread[0].is_there.query()):
            answer = self._unread.pop(0)
            if int(answer.first) != _NONE:
                found.append(self._describe(answer.step, int(answer.first)))
        return found

    def clear(self) -> None:
        """Nothing is under way."""
        self._unread.clear()
