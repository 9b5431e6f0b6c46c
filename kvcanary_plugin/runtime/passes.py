"""All passes over the bytes of a pool: the rotating one behind forwards, the idle one, and audits, which hurry them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..kernels.backend import Backend
from .audit import Audit
from .batch import HostFields
from .idle import IdlePass
from .space import Space
from .step import Step


class Passes:
    """The passes of one guard.

    Attributes:
        idle: folds while the server has nothing to do.
        audit: the pass over everything that was asked for last, if any.
    """

    def __init__(
        self, backend: Backend, spaces: Sequence[Space], device: torch.device, violations: Mapping[str, int]
    ) -> None:
        """``violations``: by check, counted on by whoever reports them."""
        self.idle = IdlePass(backend, spaces, device)
        self.audit: Audit | None = None
        self._scrubbed = [(space, space.scrubber) for space in spaces if space.scrubber is not None]
        self._scrubbers = [scrubber for _, scrubber in self._scrubbed]
        self._violations = violations

    def assign(self, step: Step, host: HostFields) -> None:
        """Choose what is folded behind the forward of ``step``, and whether that forward is timed."""
        self.idle.is_woken = True
        for space, scrubber in self._scrubbed:
            # Decode steps are recorded, a graph for each number of slots.
            piece = scrubber.next_range(may_vary=not step.is_decode) if space.folds else (0, 0)
            step.scrubs[space.index] = piece
            host.set_scrub(space.index, piece[0])
        if self.audit is not None:
            self.audit.note_enqueued(step.number)
        step.is_timed = bool(step.requests) and any(scrubber.wants_timing for scrubber in self._scrubbers)

    def note_judged(self, step: int) -> None:
        """The verdict of forward ``step`` was read."""
        if self.audit is not None:
            self.audit.note_judged(step, self._violations)

    def run_idle(self, stream: Any, step: int, prepare: Callable[[], None], judge: Callable[[Step], None]) -> None:
        """See :meth:`IdlePass.run`; ``step`` is the latest one."""
        self.idle.run(stream, step, prepare, judge)
        if self.audit is not None:
            self.audit.note_enqueued(step)
            self.note_judged(step)

    def set_budget(self, budget: float) -> None:
        """Another share of the time of a forward for all of them together; see :meth:`Scrubber.set_budget`."""
        for scrubber in self._scrubbers:
            scrubber.set_budget(budget / len(self._scrubbers))

    def start_audit(self) -> None:
        """Go over the whole pool now, as fast as serving allows."""
        number = 1 if self.audit is None else self.audit.number + 1
        self.audit = Audit(number, self._scrubbers, self._violations)
        self.idle.is_woken = True

    def stop_audit(self, why: str) -> None:
        """Whoever waits for an audit under way need not wait any more."""
        if self.audit is not None:
            self.audit.stop(why)
