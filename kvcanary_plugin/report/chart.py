"""The timeline and the maps of a page, as numbers: which mark goes where, and what it says when it is pointed at."""

from __future__ import annotations

from dataclasses import dataclass

from .events import LATEST_TIME
from .facts import find_gaps
from .format import show_count, show_time
from .lanes import HEARTBEAT, LANES, PLACES_A_SECOND
from .summary import WHOLE_SLOT, PoolMap, Summary

TIME_COLUMNS = 120
SLOT_COLUMNS = 64
LAYER_ROWS = 32
MAX_LAYERS = 4096
TICKS = 5
LOW = 4
_DAY = 86400


@dataclass(frozen=True, slots=True)
class Mark:
    """A rectangle in a lane.

    Attributes:
        x, width: in columns.
        kind: what it stands for: damage, drill, action, gap, alive, neutral.
        level: 1 to 4, how many things.
        title: what it says when it is pointed at.
        height: in tenths of the lane, from the bottom: what lies over something else is low.
    """

    x: float
    width: float
    kind: str
    level: int
    title: str
    height: int = 10


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of marks under a label."""

    label: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lanes over one axis of ``columns`` columns, with labels at equal distances below it."""

    title: str
    columns: int
    lanes: tuple[Lane, ...]
    ticks: tuple[str, ...]
    note: str = ""


_GRAVE = ("guard lost", "stopped")
_KIND_OF_LANE = {
    HEARTBEAT: "alive",
    "started": "alive",
    "injected": "drill",
    "quarantined": "action",
    "weights": "neutral",
    "settings": "neutral",
}


def draw_timeline(summary: Summary) -> Chart | None:
    """Events over time, one lane a check and a kind of event; None if there are none."""
    if summary.first_time is None or summary.last_time is None:
        return None
    first = int(summary.first_time * PLACES_A_SECOND)
    last = max(int(summary.last_time * PLACES_A_SECOND), first + TIME_COLUMNS - 1)
    width = -(-(last - first + 1) // TIME_COLUMNS)
    columns, span = -(-(last - first + 1) // width), (last - first) / PLACES_A_SECOND
    marks: dict[str, list[Mark]] = {}
    for cell in summary.timeline.spread(first, last, TIME_COLUMNS):
        lane, is_drill = cell.row
        kind = "drill" if is_drill else _KIND_OF_LANE.get(lane, "damage")
        title = f"{_show_span(cell.first, cell.last, span)}: {lane}, {show_count(cell.count)}"
        title += " from injected faults" if is_drill else ""
        level = 4 if lane in _GRAVE else _level(cell.count)
        marks.setdefault(lane, []).append(Mark(cell.column, 1, kind, level, title, LOW if is_drill else 10))
    for pid, start, end in find_gaps(summary):
        begin, stop = int(start * PLACES_A_SECOND), int(end * PLACES_A_SECOND)
        x, length = (begin - first) / width, max((stop - begin) / width, 0.5)
        title = f"{_show_span(begin, stop, span)}: process {pid} without a heartbeat"
        marks.setdefault(HEARTBEAT, []).append(Mark(round(x, 3), round(length, 3), "gap", 1, title, LOW))
    ticks = tuple(_show_tick((first + columns * width * i / (TICKS - 1)) / PLACES_A_SECOND, span) for i in range(TICKS))
    lanes = tuple(Lane(lane, _order(marks[lane])) for lane in LANES if lane in marks)
    return Chart("Timeline", columns, lanes, ticks)


def draw_maps(summary: Summary) -> tuple[Chart, ...]:
    """For each pool of each rank where its damage lies: slots from left to right, layers from top to bottom."""
    return tuple(_draw_map(pool_map) for pool_map in summary.maps)


def _draw_map(pool_map: PoolMap) -> Chart:
    damage = pool_map.damage
    last = max(pool_map.slots or (damage.last or 0) + 1, 1) - 1  # a log may say anything
    damaged = max((layer for layer, _ in damage.rows), default=WHOLE_SLOT) + 1
    layers = max(damaged, min(pool_map.layers, MAX_LAYERS))
    height = -(-layers // LAYER_ROWS) or 1
    marks: dict[int, list[Mark]] = {}
    counts: dict[tuple[int, bool, int, int, int], int] = {}
    for cell in damage.spread(0, last, SLOT_COLUMNS):
        layer, is_drill = cell.row
        place = WHOLE_SLOT if layer == WHOLE_SLOT else layer // height, is_drill, cell.column, cell.first, cell.last
        counts[place] = counts.get(place, 0) + cell.count
    for (row, is_drill, column, start, end), count in counts.items():
        what = f"{show_count(count)} report{'' if count == 1 else 's'}{' of injected faults' if is_drill else ''}"
        title = f"slots {start} to {end}, {_name_row(row, height, layers)}: {what}"
        kind, low = ("drill", LOW) if is_drill else ("damage", 10)
        marks.setdefault(row, []).append(Mark(column, 1, kind, _level(count), title, low))
    rows = [WHOLE_SLOT, *range(-(-layers // height))]
    columns = -(-(last + 1) // -(-(last + 1) // SLOT_COLUMNS))
    ticks = tuple(show_count(round(last * i / (TICKS - 1))) for i in range(TICKS))
    notes = []
    if pool_map.slots is None:
        notes.append("the log does not say how many slots there are")
    if pool_map.outside:
        notes.append(f"{show_count(pool_map.outside)} more are in no slot of the pool")
    if layers and not pool_map.layers:
        notes.append("layers behind the last damaged one are not drawn")
    return Chart(
        title=f"{pool_map.pool}, rank {pool_map.rank}",
        columns=columns,
        lanes=tuple(Lane(_name_row(row, height, layers), _order(marks.get(row, []))) for row in rows),
        ticks=ticks,
        note="; ".join(notes),
    )


def _name_row(row: int, height: int, layers: int) -> str:
    if row == WHOLE_SLOT:
        return "whole slot"
    first, last = row * height, min((row + 1) * height, layers) - 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _order(marks: list[Mark]) -> tuple[Mark, ...]:
    return tuple(sorted(marks, key=lambda mark: (mark.height < 10, mark.x)))


def _level(count: int) -> int:
    return 1 if count == 1 else 2 if count < 5 else 3 if count < 25 else 4


def _show_span(first: int, last: int, span: float) -> str:
    start = show_time(first / PLACES_A_SECOND, with_date=span > _DAY)
    end = show_time(last / PLACES_A_SECOND, with_date=span > _DAY)
    return start if start == end else f"{start} to {end}"


def _show_tick(time: float, span: float) -> str:
    shown = show_time(min(time, LATEST_TIME))
    return shown[5:16] if span > _DAY else shown[11:]
