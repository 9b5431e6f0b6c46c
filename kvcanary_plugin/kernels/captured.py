"""Launches on fixed tensors, recorded once and replayed: a few microseconds of host time however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CapturedLaunches:
    """A device graph of kernels, copies and resets whose tensors stay where they are.

    The kernels read lengths and offsets from the device, so one capture serves every batch up to its size: ``total`` of
    ``verify_prefixes`` may be an upper bound, requests past the batch are empty in the offsets, and new slots past the
    batch are -1. ``step`` and the start of a scrub may be tensors; every other number is part of the capture.
    """

    def __init__(self, enqueue: Callable[[], None], device: torch.device) -> None:
        """Record what ``enqueue`` launches. It runs once before, to compile and allocate, so it must do no harm."""
        enqueue()
        module: Any = torch.get_device_module(device)
        module.synchronize(device)
        self._graph = module.CUDAGraph()
        with module.graph(self._graph):
            enqueue()

    def replay(self) -> None:
        """Enqueue it all on the current stream."""
        self._graph.replay()
