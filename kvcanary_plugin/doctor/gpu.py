"""Which accelerators torch sees, and what the checks would run on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checkup import Fact, Problem, Section

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DRIVER_TIMEOUT_SECONDS = 5.0


def examine_gpu() -> Section:
    """Look at the devices. Nothing is allocated on them."""
    problems: list[Problem] = []
    try:
        import torch
    except Exception as error:  # a torch that cannot be imported may raise anything
        problems.append(
            Problem("error", f"torch cannot be imported: {error}", "repair the environment that runs SGLang")
        )
        return Section("gpu", (Fact("torch built for", None, "error"),), problems=tuple(problems))
    driver = find_driver()
    devices = list_devices(torch, problems)
    if not devices and driver is not None:
        problems.append(
            Problem(
                "warning",
                f"there is a driver ({driver}), but torch sees no GPU",
                "see whether CUDA_VISIBLE_DEVICES hides it, and whether this torch is built for the driver",
            )
        )
    facts = (
        Fact("torch built for", describe_build(torch)),
        Fact("driver", driver),
        Fact("devices", tuple(devices) or None),
        Fact("checks run on", _describe_backend(torch, bool(devices), problems)),
    )
    return Section("gpu", facts, problems=tuple(problems))


def describe_build(torch: Any) -> str:
    """What torch was compiled for."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "XPU" if getattr(torch.version, "xpu", None) else "CPU only"


def list_devices(torch: Any, problems: list[Problem]) -> list[str]:
    """One line each: number, name, architecture, memory."""
    lines: list[str] = []
    kinds: tuple[tuple[str, Callable[[Any], str]], ...] = (("cuda", _name_architecture), ("xpu", lambda _: "xpu"))
    for kind, architecture in kinds:
        module = getattr(torch, kind, None)
        try:
            if module is None or not module.is_available():
                continue
            for index in range(module.device_count()):
                device = module.get_device_properties(index)
                lines.append(f"{index}: {device.name}, {architecture(device)}, {device.total_memory / 2**30:.0f} GiB")
        except Exception as error:  # a device that is broken or taken: RuntimeError, AcceleratorError and others
            text = str(error).strip().splitlines() or ["no reason given"]
            problems.append(
                Problem(
                    "warning", f"torch cannot look at {kind} devices: {text[0]}", "see what the driver says of them"
                )
            )
    return lines


def find_driver() -> str | None:
    """The version of NVIDIA's kernel driver; None if none is loaded."""
    if NVIDIA_DRIVER.exists():
        found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", NVIDIA_DRIVER.read_text("utf-8", "replace"))
        if found:
            return found[1]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DRIVER_TIMEOUT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip().partition("\n")[0] or None


def _name_architecture(device: Any) -> str:
    name = getattr(device, "gcnArchName", "")  # what ROCm says instead of a capability
    return str(name) if name.startswith("gfx") else f"compute capability {device.major}.{device.minor}"


def _describe_backend(torch: Any, has_devices: bool, problems: list[Problem]) -> str | None:
    from ..kernels.backend import pick_backend

    kind = "cpu"
    if has_devices:
        kind = "cuda" if torch.cuda.is_available() else "xpu"
    try:
        name = pick_backend(kind).name
    except ImportError as error:
        problems.append(
            Problem("error", f"Triton cannot be imported: {error}", "install the triton that belongs to this torch")
        )
        return None
    return f"{name} on the CPU, since torch sees no GPU" if kind == "cpu" else f"{name} on {kind}"
