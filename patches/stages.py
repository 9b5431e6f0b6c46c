"""Pipeline stages: each guards the layers that it has, and its results come several forwards late.

A scheduler of each stage launches the same batches in the same order. What it processes later is the result that the
last stage sent round, not the one that its own forward returned; the batch is the same.
"""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from kvcanary_plugin.runtime.step import MAX_IN_FLIGHT
from kvcanary_plugin.versions import installed_sglang

SINCE, UNTIL = "0.5.15", "0.5.16"  # the releases whose loop was read through


def is_followed(stages: int) -> bool:
    """Whether so many stages can be followed in the SGLang that is installed."""
    return 1 <= stages <= MAX_IN_FLIGHT and Version(SINCE) <= Version(installed_sglang()) < Version(UNTIL)


def list_stage_gaps(settings: Any, mode: str) -> list[str]:
    """Why several stages cannot be followed although their number can, one line each."""
    stages = getattr(settings, "pp_size", None) or 1
    if stages == 1:
        return []
    gaps = []
    if mode == "quarantine":
        gaps.append("--pp-size above 1 is not covered yet with --kvcanary quarantine (stages process a batch at times)")
    in_flight = stages + (getattr(settings, "pp_async_batch_depth", None) or 0)
    if in_flight > MAX_IN_FLIGHT:
        gaps.append(
            f"--pp-size {stages} with --pp-async-batch-depth {in_flight - stages} is not covered yet (more than "
            f"{MAX_IN_FLIGHT} forwards under way)"
        )
    for field, setting in (
        ("speculative_algorithm", "--speculative-algorithm"),
        ("enable_hierarchical_cache", "--enable-hierarchical-cache"),
    ):
        if getattr(settings, field, None):
            gaps.append(f"--pp-size above 1 with {setting} is not covered yet")
    return gaps


def count_stages(scheduler: Any) -> int:
    """Stages of the server of a scheduler."""
    return int(getattr(getattr(scheduler, "ps", scheduler), "pp_size", 1))


def pick_token(scheduler: Any, batch: Any, result: Any) -> Any:
    """What a launch and the processing of its result have in common."""
    return batch if count_stages(scheduler) > 1 else result
