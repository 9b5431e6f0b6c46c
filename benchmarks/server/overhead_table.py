"""The tables of ``gpu_overhead.py``: what an arm costs beside the plain server, and what it is allowed to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from spread import spread_of

PLAIN = "off"
MAX_SCRUB_SECONDS = 10.0
# The most an arm may cost a work, as a share of the plain server's time.
BOUNDS = {
    **{("content", work): 0.005 for work in ("decode64", "prefill", "decode16")},
    **{("all", work): 0.01 for work in ("decode64", "prefill", "decode16")},
    ("content", "small"): 0.03,
    ("all", "small"): 0.03,
}
MAX_RESIDENT_BYTES = 64.0
MAX_START_SECONDS = 3.0
Times = Mapping[str, Mapping[str, Mapping[str, float]]]  # round, arm, work: seconds

OVERHEAD_HEAD = (
    "| work | arm | pairs | off, s | arm, s | mean ± 95 % | median | range | upper end | at most | held | "
    "our kernels / GPU time | all GPU time / off | pool every, s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
START_HEAD = (
    "| arm | engine ready, s | of that the guard, s | bytes a slot | at most | held |\n|---|---|---|---|---|---|"
)


def pick_pairs(times: Times, arm: str, work: str) -> tuple[list[float], list[float]]:
    """Times of ``work`` in the rounds in which both the plain server and ``arm`` ran it."""
    rounds = [per_arm for per_arm in times.values() if work in per_arm.get(PLAIN, {}) and work in per_arm.get(arm, {})]
    return [per_arm[PLAIN][work] for per_arm in rounds], [per_arm[arm][work] for per_arm in rounds]


def render_overheads(
    times: Times, arms: Sequence[str], works: Sequence[str], device: Mapping[str, Any], periods: Mapping[str, Any]
) -> list[str]:
    """One row for each work and arm but the plain one.

    Args:
        times: see :data:`Times`.
        arms, works: in their order.
        device: by arm and work ``share`` of our kernels, and ``total`` microseconds, where they were profiled.
        periods: by arm and work, seconds in which the rotating pass covers the pool.
    """
    rows = [OVERHEAD_HEAD]
    for work in works:
        for arm in arms:
            plain, other = pick_pairs(times, arm, work)
            if arm == PLAIN or not plain:
                continue
            spread, bound = spread_of(plain, other), BOUNDS.get((arm, work))
            seen, base = device.get(arm, {}).get(work), device.get(PLAIN, {}).get(work)
            period = periods.get(arm, {}).get(work)
            cells = [
                work,
                arm,
                str(spread.pairs),
                f"{statistics.median(plain):.3f}",
                f"{statistics.median(other):.3f}",
                f"{100 * spread.mean:+.2f} ± {100 * spread.half_width:.2f} %",
                f"{100 * spread.median:+.2f} %",
                f"{100 * spread.least:+.2f} .. {100 * spread.most:+.2f} %",
                f"{100 * spread.upper:+.2f} %",
                "" if bound is None else f"{100 * bound:.1f} %",
                _verdict(spread.upper, bound),
                "" if seen is None else f"{100 * seen['share']:.2f} %",
                "" if seen is None or base is None else f"{100 * (seen['total'] / base['total'] - 1):+.2f} %",
                "" if period is None else f"{period:.1f}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def render_starts(starts: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """One row for each arm: seconds until ready, of that the guard's own, and bytes a slot beside the pool."""
    rows = [START_HEAD]
    for arm, start in starts.items():
        guard, resident = start["guard_seconds"], start["bytes_per_slot"]
        cells = [arm, f"{start['ready_seconds']:.1f}"]
        if guard is None or resident is None:
            cells += ["", "", "", ""]
        else:
            is_held = guard <= MAX_START_SECONDS and resident <= MAX_RESIDENT_BYTES
            limit = f"{MAX_START_SECONDS:.0f} s, {MAX_RESIDENT_BYTES:.0f} B"
            cells += [f"{guard:.2f}", f"{resident:.1f}", limit, "yes" if is_held else "no"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def missed_bounds(times: Times, arms: Sequence[str], works: Sequence[str], periods: Mapping[str, Any]) -> list[str]:
    """What was not held, one line each."""
    missed = []
    for work in works:
        for arm in arms:
            plain, other = pick_pairs(times, arm, work)
            bound = BOUNDS.get((arm, work))
            if plain and bound is not None and _verdict(spread_of(plain, other).upper, bound) != "yes":
                missed.append(f"{arm}, {work}: upper end above {100 * bound:.1f} %")
            period = periods.get(arm, {}).get(work)
            if arm == "all" and period is not None and period > MAX_SCRUB_SECONDS:
                missed.append(f"{arm}, {work}: pool covered every {period:.1f} s, not {MAX_SCRUB_SECONDS:.0f}")
    return missed


def _verdict(upper: float, bound: float | None) -> str:
    if bound is None:
        return ""
    return "one pair" if math.isnan(upper) else "yes" if upper <= bound else "no"
