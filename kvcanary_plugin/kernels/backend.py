"""The one place that picks the implementation of the kernels, by device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .fold_reference import seal_slots
from .plan_reference import plan_offsets
from .scrub_reference import check_slots, scrub_range
from .verify_reference import verify_prefixes
from .write_reference import write_chain


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations the guard launches. Their references document arguments and shapes."""

    name: str
    plan_offsets: Callable[..., None]
    verify_prefixes: Callable[..., None]
    write_chain: Callable[..., None]
    seal_slots: Callable[..., None]
    check_slots: Callable[..., None]
    scrub_range: Callable[..., None]


REFERENCE = Backend("torch", plan_offsets, verify_prefixes, write_chain, seal_slots, check_slots, scrub_range)


def pick_backend(device: torch.device | str) -> Backend:
    """The backend for tensors on ``device``."""
    del device  # torch serves every device
    return REFERENCE


def describe(backend: Backend, device: Any) -> str:
    """For log lines."""
    return f"{backend.name} on {device}"
