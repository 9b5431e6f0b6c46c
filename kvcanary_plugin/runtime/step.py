"""One forward, as the host remembers it until its verdict has been read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..pool_patcher.records import ShadowRecords
from .batch import Batch, HostFields
from .images import NO_MARKS
from .truth import Request
from .violation import Violation

MAX_IN_FLIGHT = 4


class Step:
    """A forward from its announcement to its verdict. Steps are reused in a ring, because their host memory is pinned.

    Attributes:
        number: counts forwards from 1.
        requests, rows, prefix_lens: what the batch held, in its order.
        started: indices of requests seen for the first time.
        batch, host: tensors of the forward, and where the host writes its part.
        verify_total, write_total: positions to be read and tokens to be stored.
        is_decode: each request stores one token.
        nodes: draft tokens of each request that the forward verifies, 0 for a forward of another kind.
        scrubs: first slot and number of slots of the rotating pass, for each space.
        marks: new tokens that belong to images.
        found: violations that were found without the device.
        early_rows: raw rows that were read before the forward, where that costs nothing.
        early_hidden: violations counted by then that had no room to be described.
        hidden: violations of the verdict last read that had no room to be described.
        inbox: records that were looked at in place of those of the pool, where it is no forward but an arrival.
        is_open: launched, verdict not read yet.
        is_timed: how long the forward takes is measured.
    """

    def __init__(self, verdicts: Sequence[torch.Tensor], device: torch.device) -> None:
        """``verdicts``: int64 (1 + capacity, ROW_COLUMNS) in host memory for each slot space, filled by the device."""
        self.number = 0
        self.requests: Sequence[Request] = ()
        self.rows: Sequence[int] = ()
        self.prefix_lens: Sequence[int] = ()
        self.started: Sequence[int] = ()
        self.batch: Batch | None = None
        self.host: HostFields | None = None
        self.verify_total = 0
        self.write_total = 0
        self.is_decode = False
        self.nodes = 0
        self.scrubs: list[tuple[int, int]] = [(0, 0)] * len(verdicts)  # of states it stays so
        self.marks = NO_MARKS
        self.found: list[Violation] = []
        self.early_rows: list[list[int]] = []
        self.early_hidden = 0
        self.hidden = 0
        self.inbox: ShadowRecords | None = None
        self.is_open = False
        self.is_timed = False
        self._on_device = device.type != "cpu"
        self._hosts: dict[int, HostFields] = {}
        self._verdicts = tuple(verdicts)
        self._counts = tuple(verdict.numpy()[0, :1] for verdict in verdicts)
        self._began_seconds = self._ended_seconds = 0.0
        self._copied: Any = None
        if self._on_device:
            event: Any = torch.get_device_module(device).Event
            self._began, self._ended = event(enable_timing=True), event(enable_timing=True)
            self._copied = event()

    def open(self, batch: Batch) -> HostFields:
        """Take ``batch`` for this forward. Returns where the host writes its fields: pinned memory of this step, on a
        CPU the batch itself.
        """
        self.batch = batch
        if batch.host is not None:
            self.host = batch.host
            return batch.host
        words = batch.fields.block.shape[0]
        host = self._hosts.get(words)
        if host is None:  # it is never moved, because captured launches read from it
            host = self._hosts[words] = HostFields(torch.zeros(words, dtype=torch.int64, pin_memory=True))
        self.host = host
        return host

    def open_arrival(self, number: int, request: Request, row: int, length: int, inbox: ShadowRecords) -> None:
        """Take KV of the first ``length`` tokens of ``request`` that has come ahead of forward ``number``."""
        self.number, self.requests, self.rows, self.prefix_lens = number, [request], [row], [length]
        self.started, self.found, self.inbox = [0], [], inbox

    def note_begin(self) -> None:
        """The forward begins, in stream order."""
        if self.is_timed and self._on_device:
            self._began.record()
        else:
            self._began_seconds = time.perf_counter()

    def note_end(self) -> None:
        """The forward has ended, in stream order."""
        if self.is_timed and self._on_device:
            self._ended.record()
        else:
            self._ended_seconds = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long the forward took, without anything of ours; once its verdict was read."""
        if self._on_device:
            return float(self._began.elapsed_time(self._ended)) / 1000
        return self._ended_seconds - self._began_seconds

    def close_verdict(self) -> None:
        """The verdict was enqueued to be written, in stream order."""
        self.is_open = True
        if self._copied is not None:
            self._copied.record()

    @property
    def is_written(self) -> bool:
        """Whether the device has written the latest verdict. Waits for nothing."""
        return self._copied is None or bool(self._copied.query())

    def read_verdict(self) -> tuple[int, list[list[list[int]]]]:
        """Violations there were, and for each slot space the raw rows of those that were described.

        Waits for the device to write them, which is ahead of the result copy the scheduler has waited for by now.
        """
        self.is_open = False
        if self._copied is not None:
            self._copied.synchronize()
        rows_of_spaces: list[list[list[int]]] = []
        self.hidden, self.early_hidden = self.early_hidden, 0
        for verdict, counter in zip(self._verdicts, self._counts, strict=True):
            count = int(counter[0])
            rows = verdict[1 : 1 + min(count, len(verdict) - 1)].tolist() if count else []
            self.hidden += count - len(rows)
            rows_of_spaces.append(rows)
        if self.early_rows:
            rows_of_spaces[0] = self.early_rows + rows_of_spaces[0]
            self.early_rows = []
        return sum(map(len, rows_of_spaces)) + self.hidden, rows_of_spaces
