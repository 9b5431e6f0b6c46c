"""What ``kvcanary doctor`` has found, before it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 1

State = Literal["ok", "warning", "error"]
Value = str | int | bool | None | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to act upon. An ``error`` would keep kvcanary from working, a ``warning`` would not."""

    severity: Literal["error", "warning"]
    text: str
    advice: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a section. None means not known, or not there."""

    name: str
    value: Value
    state: State = "ok"


@dataclass(frozen=True, slots=True)
class Section:
    """One area that was looked at. ``rows`` make a table under the facts; all have the same keys."""

    name: str
    facts: tuple[Fact, ...] = ()
    rows: tuple[dict[str, str], ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkup:
    """All of it."""

    version: str
    sections: tuple[Section, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The most severe first, otherwise in the order of the sections."""
        found = [problem for section in self.sections for problem in section.problems]
        return tuple(sorted(found, key=lambda problem: problem.severity != "error"))

    @property
    def code(self) -> int:
        """The exit code: 1 if something would keep kvcanary from working."""
        return int(any(problem.severity == "error" for problem in self.problems))

    def to_dict(self) -> dict[str, Any]:
        """For programs; fields may be added, not removed."""
        return {
            "schema": SCHEMA,
            "kvcanary": self.version,
            "exit_code": self.code,
            "problems": [
                {
                    "severity": problem.severity,
                    "section": section.name,
                    "problem": problem.text,
                    "advice": problem.advice,
                }
                for severity in ("error", "warning")
                for section in self.sections
                for problem in section.problems
                if problem.severity == severity
            ],
            "sections": {
                section.name: {fact.name: fact.value for fact in section.facts}
                | ({"rows": list(section.rows)} if section.rows else {})
                for section in self.sections
            },
        }
