"""The rotating content pass: which slots to fold next, and the period that follows."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("kvcanary")

FIRST_PASS_FORWARDS = 200
CALIBRATION_FORWARDS = 64
PACE_SECONDS = 5.0  # long forwards fold as many slots more as bring them round in this time
LONGEST_SECONDS = 1.0  # a gap between two forwards that counts as one; what is longer was idleness
HURRY_SECONDS = 0.05  # what one forward may take longer while somebody waits for a whole pass
_STRETCHES = 256


class Scrubber:
    """Walks the pool in slot order, a fixed number of slots after each forward, and more after long ones.

    The rate is set from the budget once enough forwards were timed, and again for another budget; otherwise it is only
    ever raised. It changes between two passes only, and a lower one is announced a whole pass ahead: so the period in
    force when a slot is damaged bounds the forwards until it is folded, in every case.

    Attributes:
        slot_count: slots it goes over.
        slots_a_forward: slots folded after each forward at least.
        passes: times the whole pool was covered.
        seconds_a_slot: what one more slot costs, as measured at the start.
        interval_seconds: a short forward, None until calibrated.
    """

    def __init__(self, first_slot: int, slot_count: int, budget: float, seconds_a_slot: float) -> None:
        self.slot_count = slot_count - first_slot
        self._first_slot = first_slot
        self._end_slot = slot_count
        self._budget = budget
        self._is_budget_new = False
        self._announced = 0  # the lower rate of the pass after this one, 0 for none
        self._hurried = 0
        self._cursor = first_slot
        self._durations: list[float] = []
        self._stretch = -(-(slot_count - first_slot) // _STRETCHES)
        self._entered = self._called = time.monotonic()
        self._visited = [self._entered] * _STRETCHES
        self._place = 0
        self.seconds_a_slot = seconds_a_slot
        self.interval_seconds: float | None = None
        self.passes = 0
        self.slots_a_forward = -(-(slot_count - first_slot) // FIRST_PASS_FORWARDS)

    @property
    def period_forwards(self) -> int:
        """Forwards within which every slot is folded at least once, wherever the pass stands."""
        rate = self._announced or self.slots_a_forward
        return -(-self.slot_count // rate)

    @property
    def period_seconds(self) -> float | None:
        """The same in seconds of short forwards back to back, None until calibrated."""
        return None if self.interval_seconds is None else self.period_forwards * self.interval_seconds

    def set_budget(self, budget: float) -> None:
        """Another share of the time of a forward: a larger one from the next pass on, a smaller one a pass later."""
        self._budget = budget
        self._is_budget_new = True

    def hurry(self) -> None:
        """Go over every slot once, from here on, as fast as serving allows."""
        self._hurried = self.slot_count

    def relax(self) -> None:
        """No need to hurry any more."""
        self._hurried = 0

    @property
    def is_hurried(self) -> bool:
        """Whether such a pass is under way."""
        return self._hurried > 0

    @property
    def folded(self) -> int:
        """Slots gone over since the start."""
        return self.passes * self.slot_count + self._cursor - self._first_slot

    def oldest_age_seconds(self) -> float:
        """How long ago the slot was folded that has waited longest; since the start, if some never were."""
        return time.monotonic() - min(self._visited)

    def next_range(self, seconds: float = 0.0, *, may_vary: bool = False) -> tuple[int, int]:
        """First slot and number of slots to fold now; moves on.

        Args:
            seconds: where there is time, as many slots as can be folded in it, if those are more.
            may_vary: where forwards take long, as many as keep the pace and the budget allows, if those are more.
        """
        start, now = self._cursor, time.monotonic()
        elapsed, self._called = min(now - self._called, LONGEST_SECONDS), now
        if self._hurried:
            seconds = max(seconds, HURRY_SECONDS)
        wanted = max(self.slots_a_forward, int(seconds / self.seconds_a_slot)) if seconds else self.slots_a_forward
        if may_vary and self.interval_seconds is not None:
            affordable = int(self._budget * elapsed / self.seconds_a_slot)
            wanted = max(wanted, min(int(self.slot_count * elapsed / PACE_SECONDS), affordable))
        count = min(wanted, self._end_slot - start)
        self._cursor += count
        self._hurried = max(0, self._hurried - count)
        self._note_visit(now)
        if self._cursor >= self._end_slot:
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

    def _note_visit(self, now: float) -> None:
        """Remember when each stretch of the pool that now lies behind the cursor was begun."""
        reached = _STRETCHES if self._cursor >= self._end_slot else (self._cursor - self._first_slot) // self._stretch
        for place in range(self._place, reached):
            self._visited[place] = self._entered
            self._entered = now
        self._place = reached % _STRETCHES

    def _settle_rate(self) -> None:
        if self._announced:
            self.slots_a_forward, self._announced = self._announced, 0
        if not self.wants_timing:
            # A short forward, not the median: with a rate set for long prefills the decode steps would exceed the
            # budget.
            interval = sorted(self._durations)[CALIBRATION_FORWARDS // 10]
            self._durations.clear()
        elif self._is_budget_new and self.interval_seconds is not None:
            interval = self.interval_seconds
        else:
            return
        affordable = max(1, int(self._budget * interval / self.seconds_a_slot))
        affordable = min(affordable, self.slot_count)
        is_slower = self.interval_seconds is not None and affordable <= self.slots_a_forward
        if is_slower and not self._is_budget_new:
            return
        self._is_budget_new = False
        # Slots that lie behind the cursor by now were promised the period in force: one more pass has to keep it.
        self._announced = affordable if affordable < self.slots_a_forward else 0
        self.slots_a_forward = max(self.slots_a_forward, affordable)
        self.interval_seconds = interval
        logger.info(
            "kvcanary: content pass folds %d slots a forward, the whole pool of %d every %d forwards (about %.1f s), "
            "%.2f%% of a short forward of %.2f ms; budget %.2f%%",
            affordable,
            self.slot_count,
            self.period_forwards,
            self.period_forwards * interval,
            100 * affordable * self.seconds_a_slot / interval,
            1000 * interval,
            100 * self._budget,
        )
