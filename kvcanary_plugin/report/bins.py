"""Counts along an axis of unknown length, in memory that does not grow with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_CELLS = 16384

Row = TypeVar("Row", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Cell(Generic[Row]):
    """``count`` things of ``row`` from ``first`` to ``last``, both included."""

    row: Row
    column: int
    first: int
    last: int
    count: int


class Bins(Generic[Row]):
    """Counts by row and place on an axis of whole numbers. Places are merged two by two when there are too many.

    Attributes:
        first, last: the lowest and the highest place, None before there is one.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self._width = 1
        self._counts: Counter[tuple[Row, int]] = Counter()

    def add(self, row: Row, place: int, count: int = 1) -> None:
        """Count something at ``place``, which is not negative."""
        self.first = place if self.first is None else min(self.first, place)
        self.last = place if self.last is None else max(self.last, place)
        self._counts[row, place // self._width] += count
        while len(self._counts) > MAX_CELLS and self._width < 1 << 64:
            self._width *= 2
            merged: Counter[tuple[Row, int]] = Counter()
            for (name, index), number in self._counts.items():
                merged[name, index // 2] += number
            self._counts = merged

    @property
    def rows(self) -> set[Row]:
        """Rows in which something was counted."""
        return {row for row, _ in self._counts}

    def spread(self, first: int, last: int, columns: int) -> list[Cell[Row]]:
        """What was counted from ``first`` to ``last``, both included, on that many columns of equal width or fewer."""
        width = -(-(last - first + 1) // columns)
        spread: Counter[tuple[Row, int]] = Counter()
        for (row, index), count in self._counts.items():
            start = index * self._width
            if start <= last and start + self._width > first:
                spread[row, (max(start, first) - first) // width] += count
        return [
            Cell(row, column, start := first + column * width, min(start + width - 1, last), count)
            for (row, column), count in spread.items()
        ]
