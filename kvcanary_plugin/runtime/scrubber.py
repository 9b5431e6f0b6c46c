"""The rotating content pass: which slots to fold next, and the period that follows."""

from __future__ import annotations

import logging

logger = logging.getLogger("kvcanary")

FIRST_PASS_FORWARDS = 200
CALIBRATION_FORWARDS = 64


class Scrubber:
    """Walks the pool in slot order, a fixed number of slots after each forward.

    The rate is set from the budget once enough forwards were timed, and after that only ever raised, and only between
    two passes: so the period in force when a slot is damaged bounds the forwards until it is folded, in every case.

    Attributes:
        slots_a_forward: slots folded after each forward.
        passes: times the whole pool was covered.
    """

    def __init__(self, first_slot: int, slot_count: int, budget: float, seconds_a_slot: float) -> None:
        self._first_slot = first_slot
        self._slot_count = slot_count
        self._budget = budget
        self._seconds_a_slot = seconds_a_slot
        self._cursor = first_slot
        self._durations: list[float] = []
        self._calibrated = False
        self.passes = 0
        self.slots_a_forward = -(-(slot_count - first_slot) // FIRST_PASS_FORWARDS)

    @property
    def period_forwards(self) -> int:
        """Forwards within which every slot is folded at least once, wherever the pass stands."""
        return -(-(self._slot_count - self._first_slot) // self.slots_a_forward)

    def next_range(self) -> tuple[int, int]:
        """First slot and number of slots to fold after this forward; moves on."""
        start = self._cursor
        count = min(self.slots_a_forward, self._slot_count - start)
        self._cursor += count
        if self._cursor >= self._slot_count:
            self._cursor = self._first_slot
            self.passes += 1
            self._settle_rate()
        return start, count

    @property
    def wants_timing(self) -> bool:
        """Whether another forward should be timed."""
        return len(self._durations) < CALIBRATION_FORWARDS

    def observe_forward(self, seconds: float) -> None:
        """Note how long a forward took: what the budget is a share of. The gaps between forwards are not part of it."""
        if self.wants_timing:
            self._durations.append(seconds)

    def _settle_rate(self) -> None:
        if self.wants_timing:
            return
        # A short forward, not the median: with a rate set for long prefills the decode steps would exceed the budget.
        interval = sorted(self._durations)[CALIBRATION_FORWARDS // 10]
        self._durations.clear()
        affordable = max(1, int(self._budget * interval / self._seconds_a_slot))
        affordable = min(affordable, self._slot_count - self._first_slot)
        if self._calibrated and affordable <= self.slots_a_forward:
            return
        self.slots_a_forward = affordable
        self._calibrated = True
        logger.info(
            "kvcanary: content pass folds %d slots a forward, the whole pool of %d every %d forwards (about %.1f s), "
            "%.2f%% of a short forward of %.2f ms; budget %.2f%%",
            self.slots_a_forward,
            self._slot_count - self._first_slot,
            self.period_forwards,
            self.period_forwards * interval,
            100 * self.slots_a_forward * self._seconds_a_slot / interval,
            1000 * interval,
            100 * self._budget,
        )
