"""What is folded while a server has nothing to do: the rotating pass at full pace, then a rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..kernels.backend import Backend
from .space import Space
from .step import Step

PIECE_SECONDS = 0.005  # how long a request that comes now may have to wait
PASS_SECONDS = 10.0  # a pool that is folded sooner than this rests for what is left of it


class IdlePass:
    """Folds the next piece of every slot space, at most a few milliseconds of it a call.

    Attributes:
        pieces: pieces folded so far.
        is_woken: a forward ran, so that the next idle moment begins a new pass.
    """

    def __init__(self, backend: Backend, spaces: Sequence[Space], device: torch.device) -> None:
        self._backend = backend
        self._spaces = [space for space in spaces if space.scrubber is not None]
        self._number = torch.zeros(1, dtype=torch.int64, device=device)  # the ring of these verdicts has one place
        self._rings = [torch.zeros_like(space.ring[:1], pin_memory=device.type != "cpu") for space in spaces]
        self._all = spaces
        self._step = Step([ring[0] for ring in self._rings], device)
        self.is_woken = True
        self._rest_until = 0.0
        self._begin()
        self.pieces = 0

    def run(self, stream: Any, number: int, prepare: Callable[[], None], judge: Callable[[Step], None]) -> None:
        """Fold a piece and judge what was found. Waits for the device, which has nothing else to do.

        Args:
            stream: where forwards are enqueued; None on a CPU.
            number: of the latest step.
            prepare: what has to be enqueued first.
            judge: what becomes of the verdict.
        """
        if self.is_woken:
            self.is_woken = False
            self._rest_until = 0.0
            self._begin()
        if not any(space.folds for space in self._spaces) or time.monotonic() < self._rest_until:
            return
        step, module = self._step, None if stream is None else torch.get_device_module(stream.device)
        step.number, step.found, step.hidden = number, [], 0
        if module is not None:
            # What the scheduler has just freed or inserted is still being copied on its stream.
            stream.wait_stream(module.current_stream())
        with nullcontext() if module is None else module.stream(stream):
            prepare()
            for space in self._spaces:
                self._fold(space)
            for space, ring in zip(self._all, self._rings, strict=True):
                self._backend.drain(space.violations, ring, self._number)
            step.close_verdict()
        self.pieces += 1
        if all(left <= 0 for left in self._left.values()):
            self._rest_until = self._began + PASS_SECONDS
            self._begin()
        judge(step)

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._left = {space.index: space.slots.slot_count for space in self._spaces}

    def _fold(self, space: Space) -> None:
        if space.scrubber is None or not space.folds or self._left[space.index] <= 0:
            return
        start, count = space.scrubber.next_range(PIECE_SECONDS)
        space.scrub(start, count)
        # The pass stands anywhere in the pool: it is over when it has come back to where it was.
        self._left[space.index] -= count
