"""What alternating pairs say: the mean of their ratios and its 95 % interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
MIN_PAIRS = 2


def t95(degrees: int) -> float:
    """Student's t for a two-sided interval of 95 %.

    Raises:
        ValueError: there is less than one degree of freedom.
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom; an interval takes at least {MIN_PAIRS} pairs")
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.4 / degrees


@dataclass(frozen=True, slots=True)
class Spread:
    """Overhead over pairs, as shares of the plain server's time.

    Attributes:
        pairs: how many.
        mean: of the overheads of the pairs.
        half_width: of the 95 % interval around it; not a number with a single pair.
        median, least, most: of the overheads of the pairs.
    """

    pairs: int
    mean: float
    half_width: float
    median: float
    least: float
    most: float

    @property
    def upper(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width


def spread_of(plain: Sequence[float], other: Sequence[float]) -> Spread:
    """The overhead of ``other`` over ``plain``, seconds of the same rounds.

    Raises:
        ValueError: they are not pairs, or there are none.
    """
    if len(plain) != len(other) or not plain:
        raise ValueError(f"{len(plain)} and {len(other)} times are not pairs")
    overheads = [b / a - 1 for a, b in zip(plain, other, strict=True)]
    count = len(overheads)
    half = math.nan if count < MIN_PAIRS else t95(count - 1) * statistics.stdev(overheads) / math.sqrt(count)
    return Spread(count, statistics.mean(overheads), half, statistics.median(overheads), min(overheads), max(overheads))
