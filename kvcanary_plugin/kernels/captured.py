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
        """Record what ``enqueue`` launches, without running it.

        It must have run before on tensors of the same shapes, so that nothing is compiled or allocated while recording.
        Neither side waits for the other: a server may be under load.
        """
        module: Any = torch.get_device_module(device)
        self._graph = module.CUDAGraph()
        aside, current = module.Stream(device), module.current_stream(device)
        aside.wait_stream(current)
        with module.stream(aside):
            # What other threads do meanwhile is none of this capture's business.
            self._graph.capture_begin(capture_error_mode="thread_local")
            enqueue()
            self._graph.capture_end()
        current.wait_stream(aside)

    def replay(self) -> None:
        """Enqueue it all on the current stream."""
        self._graph.replay()
