"""When damage comes in bursts: one clear state, and one line a minute, instead of a flood."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

WINDOW_S = 60.0
MAX_PLACES = 64
MAX_LINES = 16


class Burst:
    """Counts distinct damaged places and lines written over one window, and says when it is a burst.

    Attributes:
        is_on: more damage than can be looked at one by one; until a window without new damage, or a flush.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_on = False
        self._clock = clock
        self._places: dict[int, float] = {}
        self._lines: list[float] = []
        self._summarised = clock()

    def note(self, places: Iterable[int]) -> bool:
        """New damage at ``places``. Whether a burst has just begun."""
        now = self._clock()
        self._places = {place: seen for place, seen in self._places.items() if now - seen < WINDOW_S}
        self._places.update(dict.fromkeys(places, now))
        began = len(self._places) > MAX_PLACES and not self.is_on
        if began:
            self.is_on, self._summarised = True, now
        return began

    def ends(self) -> bool:
        """Whether a burst has just ended, a window having passed without new damage."""
        if not self.is_on or (self._places and self._clock() - max(self._places.values()) < WINDOW_S):
            return False
        self.clear()
        return True

    def may_write(self) -> bool:
        """Whether one more line may be written: a few in a window, and one a window during a burst."""
        now = self._clock()
        if self.is_on:
            if now - self._summarised < WINDOW_S:
                return False
            self._summarised = now
            return True
        self._lines = [written for written in self._lines if now - written < WINDOW_S]
        if len(self._lines) >= MAX_LINES:
            return False
        self._lines.append(now)
        return True

    def clear(self) -> None:
        """There is no damage any more."""
        self.is_on = False
        self._places.clear()
