"""Forwards under way: whose result brings which verdict, and when it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from .step import MAX_IN_FLIGHT, Step


class Verdicts:
    """The steps of one guard, a ring, and the launched ones among them in their order."""

    def __init__(self, rings: Sequence[torch.Tensor], device: torch.device, judge: Callable[[Step], None]) -> None:
        """
        Args:
            rings: int64 (MAX_IN_FLIGHT, 1 + capacity, ROW_COLUMNS) in host memory for each numbering of slots.
            device: of the pool.
            judge: reads the verdict of a step and acts on it; may raise.
        """
        self.steps = [Step([ring[place] for ring in rings], device) for place in range(MAX_IN_FLIGHT)]
        self._launched: deque[tuple[object, Step]] = deque()
        self._judge = judge

    @property
    def is_under_way(self) -> bool:
        """Whether a forward was launched whose verdict has not been read."""
        return bool(self._launched)

    def take_step(self, number: int) -> Step:
        """The step for forward ``number``. What its place still held is read first."""
        step = self.steps[number % MAX_IN_FLIGHT]
        self._read(step)
        step.number = number
        return step

    def note_launched(self, number: int, result: object) -> None:
        """Tie forward ``number`` to the object whose arrival at :meth:`settle` means that its result is processed."""
        step = self.steps[number % MAX_IN_FLIGHT]
        if step.is_open:
            self._launched.append((result, step))

    def settle(self, result: object) -> None:
        """Read the verdict of the step that gave ``result``, and of any before it."""
        if not any(known is result for known, _ in self._launched):
            return
        while self._launched:
            known, step = self._launched.popleft()
            self._read(step)
            if known is result:
                return

    def conclude(self) -> None:
        """Read the verdict of every forward under way. Waits for the device."""
        while self._launched:
            self._read(self._launched.popleft()[1])

    def _read(self, step: Step) -> None:
        if step.is_open:
            self._judge(step)
