"""How much of the device's time a trace of torch's profiler gives to kernels of kvcanary."""

from __future__ import annotations

import ast
import gzip
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Summed durations on the device, microseconds.

    Attributes:
        total: of everything.
        ours: of kvcanary's kernels by name. What torch launches for it (copies, indexing) is not told apart.
        count: events in all.
    """

    total: float
    ours: dict[str, float]
    count: int

    @property
    def share(self) -> float:
        """Of the total that is ours; 0 if nothing ran."""
        return sum(self.ours.values()) / self.total if self.total else 0.0


def kernel_names(package: Path) -> frozenset[str]:
    """Names of the functions in ``package`` that Triton compiles, kernels and what they call."""
    names = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(_is_jit(decorator) for decorator in node.decorator_list):
                names.add(node.name)
    return frozenset(names)


def read_trace(file: Path, names: frozenset[str]) -> DeviceTime:
    """Sum up a trace, compressed or not."""
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return sum_events(json.loads(text)["traceEvents"], names)


def sum_events(events: list[dict[str, Any]], names: frozenset[str]) -> DeviceTime:
    """Sum up events of a trace."""
    ours: Counter[str] = Counter()
    total, count = 0.0, 0
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in DEVICE_CATEGORIES:
            continue
        total += event["dur"]
        count += 1
        if event["name"] in names:
            ours[event["name"]] += event["dur"]
    return DeviceTime(total, dict(ours), count)


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
    return name == "jit"
