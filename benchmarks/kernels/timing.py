"""How the kernel benchmark takes time: device time between two events, with the queue never empty."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPETITIONS = 41
_IDLE_CYCLES = 400_000  # longer than the host needs to enqueue one repetition


class Clock:
    """Times work on one GPU.

    Before each repetition the device is kept busy while the host enqueues it, so that no gap of the host's is counted:
    by reading 512 MiB where the L2 cache is to be flushed, by waiting where it is to stay warm.
    """

    def __init__(self, device: torch.device) -> None:
        self._junk = torch.ones(1 << 26, dtype=torch.int64, device=device)

    def stream(self, work: Callable[[], None], *, flush: bool = False, repetitions: int = REPETITIONS) -> float:
        """Median microseconds of ``work`` launched in a stream."""
        work()
        pairs = []
        for _ in range(repetitions):
            self._hold(flush)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in pairs) * 1000

    def graph(self, work: Callable[[], None], *, flush: bool = False, repetitions: int = REPETITIONS) -> float:
        """Median microseconds of ``work`` captured in a CUDA graph and replayed."""
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return self.stream(graph.replay, flush=flush, repetitions=repetitions)

    def _hold(self, flush: bool) -> None:
        if flush:
            self._junk.sum()
        else:
            torch.cuda._sleep(_IDLE_CYCLES)
