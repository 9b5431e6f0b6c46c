"""What has to be true of an arm for its figures to count, and what they were taken with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import time
from pathlib import Path
from typing import Any

from arms import Arm, ArmError

from kvcanary_plugin.report.jsonl import read_events


def judge_drill(events: list[dict[str, Any]]) -> str | None:
    """What is wrong with the reports of one flipped bit, None if it was found where it is and nothing else was."""
    injected = [event for event in events if event["event"] == "injected"]
    violations = [event for event in events if event["event"] == "violation"]
    if len(injected) != 1:
        return f"{len(injected)} faults were injected, not one"
    flip = injected[0]
    place = {"check": "content", "slot": flip["slots"][0], "layer": flip["layer"], "half": flip["half"]}
    found = [{key: violation[key] for key in place} for violation in violations]
    if found != [place]:
        return f"flipped a bit at {place}, reported {found}"
    return None


def versions() -> dict[str, str]:
    """What the figures were taken with."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    found = {"device": device, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    for name in ("torch", "triton", "sglang", "kvcanary"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def package_folder() -> Path:
    spec = importlib.util.find_spec("kvcanary_plugin")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def start_cost(arm: Arm) -> dict[str, float | None]:
    """Seconds that setting up the guard took, and what it keeps beside the pool."""
    if not arm.setting.has_guard:
        return {"guard_seconds": None, "bytes_per_slot": None}
    seconds = re.findall(r"^BENCH start ([0-9.]+) s$", arm.log.read_text(errors="replace"), re.MULTILINE)
    attached = [event for event in read_events(arm.events) if event["event"] == "attached"]
    if not seconds or not attached:
        raise ArmError(f"arm {arm.name} has no guard\n{arm.tail()}")
    return {
        "guard_seconds": float(seconds[-1]),
        "bytes_per_slot": attached[-1]["resident_bytes"] / attached[-1]["slots"],
    }
