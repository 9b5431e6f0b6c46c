"""A checkup for people, at 80 columns and without colours if need be, and for programs."""

from __future__ import annotations

import json
import re

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..display import escape_controls
from .checkup import Checkup, Fact, Section

_STYLES = {"ok": "", "warning": "yellow", "error": "red"}
_MARKS = {"ok": " ", "warning": "!", "error": "x"}  # so that a report without colours says the same
_BAD = {"no", "drifted"}
WIDE = 100  # columns
NARROW_NAME = 29
LONG = 20  # rows
SHORT = 10  # cells up to this length are never folded


def render_json(checkup: Checkup) -> str:
    """One JSON object."""
    return json.dumps(checkup.to_dict(), indent=2)


def render_text(checkup: Checkup, console: Console, *, is_verbose: bool = True) -> None:
    """Print sections, then problems, the most severe first, each with what to do about it.

    Of a long table in which all is well, only ``is_verbose`` shows the rows.
    """
    console.print(f"kvcanary {checkup.version} doctor", highlight=False)
    for section in checkup.sections:
        console.print()
        if section.rows and (is_verbose or len(section.rows) <= LONG or _has_bad(section)):
            console.print(_table_of(section, console.width < WIDE), highlight=False)
        else:
            console.print(Text(section.name, "bold"))
        if section.facts:
            console.print(_facts_of(section.facts), highlight=False)
    console.print()
    console.print(_summary_of(checkup), highlight=False)
    problems = Table.grid(padding=(0, 1))
    problems.add_column(justify="right", no_wrap=True)
    problems.add_column(overflow="fold")
    for number, problem in enumerate(checkup.problems, 1):
        problems.add_row(f"{number}.", _text(f"{problem.severity}: {problem.text}", _STYLES[problem.severity]))
        problems.add_row("", _text(f"-> {problem.advice}"))
    if checkup.problems:
        console.print(problems, highlight=False)


def _has_bad(section: Section) -> bool:
    return any(cell in _BAD for row in section.rows for cell in row.values())


def _summary_of(checkup: Checkup) -> Text:
    errors = sum(problem.severity == "error" for problem in checkup.problems)
    warnings = len(checkup.problems) - errors
    what, style = "nothing keeps", "yellow" if warnings else "green"
    if errors:
        what, style = ("1 problem keeps" if errors == 1 else f"{errors} problems keep"), "red"
    return Text(f"{what} kvcanary from working; {warnings} warning{'' if warnings == 1 else 's'}", style)


def _table_of(section: Section, is_narrow: bool) -> Table:
    table = Table(title=section.name, title_justify="left")
    first, *others = section.rows[0]
    table.add_column(first, overflow="fold", width=NARROW_NAME if is_narrow else None)
    for heading in others:
        is_short = all(len(row[heading]) <= SHORT for row in section.rows)
        table.add_column(heading, overflow="fold", no_wrap=is_short)
    for row in section.rows:
        name, *cells = row.values()
        if is_narrow:  # rather before the last dot of a long name than within a word
            name = re.sub(r"\.(?=\w+$)", "\n.", name.replace(" ", "\n"))
        parts = [_text(part) for part in name.split("\n")]
        table.add_row(Text("\n").join(parts), *(_text(cell, "red" if cell in _BAD else "") for cell in cells))
    return table


def _facts_of(facts: tuple[Fact, ...]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for fact in facts:
        style = _STYLES[fact.state]
        grid.add_row(_text(_MARKS[fact.state], style), _text(fact.name), _text(_words_for(fact), style))
    return grid


def _words_for(fact: Fact) -> str:
    if fact.value is None:
        return "none" if fact.state == "ok" else "not there"
    if isinstance(fact.value, bool):
        return "yes" if fact.value else "no"
    return ", ".join(fact.value) if isinstance(fact.value, tuple) else str(fact.value)


def _text(words: str, style: str = "") -> Text:
    return Text(escape_controls(words), style)
