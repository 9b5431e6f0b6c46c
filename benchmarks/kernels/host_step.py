"""The guard's host work of one decode step: a real guard on the pool of a small model, fed by a miniature scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from kvcanary_plugin.config import Config
from kvcanary_plugin.pool_patcher.sources import SourceTable, make_row_source
from kvcanary_plugin.pool_patcher.spaces import GuardedPool, SlotSpace
from kvcanary_plugin.report.reporter import Reporter
from kvcanary_plugin.runtime.guard import Guard

WARM_STEPS = 150  # past the calibration of the rotating pass, and every size recorded
TIMED_STEPS = 300


@dataclass(eq=False)
class Request:
    """What the guard reads of a request."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    extra_key: str | None = None
    retraction_count: int = 0


class DecodeLoop:
    """``bs`` requests that were prefilled with ``length`` tokens and now decode, one guarded forward after another."""

    def __init__(self, bs: int, length: int, device: torch.device, *, captured: bool) -> None:
        steps = WARM_STEPS + TIMED_STEPS + 8
        context = length + steps
        slot_count = bs * context + 1
        buffers = [torch.randint(-(2**62), 2**62, (slot_count, 16), device=device) for _ in range(64)]
        named = [
            ((b // 2, "KV"[b % 2]), make_row_source(layer_buffer=x, read_bytes=128)[0]) for b, x in enumerate(buffers)
        ]
        req_to_token = torch.zeros((bs + 1, context), dtype=torch.int32, device=device)
        slots = (torch.randperm(bs * context, device=device) + 1).view(bs, context)
        req_to_token[1:] = slots.to(torch.int32)
        main = SlotSpace("full", SourceTable(named, slot_count, device), slot_count, page_size=1)
        pool = GuardedPool("benchmark", None, None, req_to_token, main, (("model", "benchmark"),))
        self._reporter = Reporter()
        self.guard = Guard(pool, Config(mode="log"), self._reporter)
        if not captured:
            self.guard._captured = self.guard._opening._captured = None
        if self.guard.ledger is not None:
            self.guard.ledger.note_alloc(slots.flatten())  # there is no allocator here that could tell it
        tokens = torch.randint(0, 128_000, (bs, length))
        self.requests = [Request(f"r{i}", row) for i, row in enumerate(tokens.tolist())]
        self._rows = list(range(1, bs + 1))
        self._ones = [1] * bs
        self._indices = torch.arange(1, bs + 1, device=device)
        self._slots, self._length = slots, length
        self._buffers = buffers
        self._stored = torch.randint(-(2**62), 2**62, (bs * length, 16), device=device)
        self._sampled = torch.randint(0, 128_000, (bs,)).tolist()
        self._input_ids = torch.tensor(self._sampled, device=device)
        self.parts: dict[str, list[float]] = {}
        self._forward(tokens.to(device).view(-1), slots[:, :length].reshape(-1), [0] * bs, [length] * bs)

    def step(self) -> None:
        """One decode step. Making its inputs and waiting for the device are not timed."""
        for request, token in zip(self.requests, self._sampled, strict=True):
            request.output_ids.append(token)
        position = self._length
        slots = self._slots[:, position].contiguous()
        self._forward(self._input_ids, slots, [position] * len(self._rows), self._ones)
        self._length += 1

    def run(self) -> dict[str, float]:
        """Median microseconds of each part over ``TIMED_STEPS`` steps, after warming up."""
        for _ in range(WARM_STEPS):
            self.step()
        self.parts.clear()
        for _ in range(TIMED_STEPS):
            self.step()
        result = {part: median(times) for part, times in self.parts.items()}
        result["the whole step"] = median(map(sum, zip(*self.parts.values(), strict=True)))
        return result

    @property
    def violations(self) -> int:
        """Violations so far; anything but 0 means that the loop is not what it claims to be."""
        return self._reporter.counts.total()

    def _forward(
        self, tokens: torch.Tensor, slots: torch.Tensor, prefix_lens: list[int], write_lens: list[int]
    ) -> None:
        guard, result = self.guard, object()
        self._time("announce", lambda: guard.announce(self.requests, self._rows, prefix_lens, write_lens))
        self._time("before", lambda: guard.before(tokens, slots, self._indices))
        for buffer in self._buffers:
            buffer[slots] = self._stored[: len(slots)]
        self._time("after", guard.after)
        self._time("note the launch", lambda: guard.note_launched(result))
        torch.cuda.synchronize()  # as SGLang has waited for its result by then
        self._time("settle", lambda: guard.settle(result))

    def _time(self, part: str, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        self.parts.setdefault(part, []).append((time.perf_counter() - start) * 1e6)
