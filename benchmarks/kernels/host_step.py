"""The guard's host work of one decode step, made of the same calls, on a pool of a small model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import Backend
from kvcanary_plugin.kernels.captured import CapturedLaunches
from kvcanary_plugin.kernels.violations import ViolationBuffer
from kvcanary_plugin.pool_patcher.sources import SourceTable, make_row_source
from kvcanary_plugin.runtime.truth import TruthTable

SCRUBBED = 64


@dataclass(eq=False)
class Request:
    """What the truth table reads of a request."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    extra_key: str | None = None
    retraction_count: int = 0


class DecodeStep:
    """``bs`` requests that each read ``length`` positions and store one token, over and over at the same place."""

    def __init__(self, bs: int, length: int, device: torch.device, backend: Backend) -> None:
        slot_count = bs * (length + 1) + SCRUBBED + 1
        buffers = [torch.randint(-(2**62), 2**62, (slot_count, 16), device=device) for _ in range(64)]
        named = [
            ((b // 2, "KV"[b % 2]), make_row_source(layer_buffer=x, read_bytes=128)[0]) for b, x in enumerate(buffers)
        ]
        self.violations = ViolationBuffer(256, device)
        self._backend = backend
        self._table = SourceTable(named, slot_count, device)
        self._records = torch.zeros((slot_count, r.RECORD_WORDS), dtype=torch.int64, device=device)
        self._writers = torch.zeros(slot_count, dtype=torch.int64, device=device)
        slots = (torch.randperm(bs * (length + 1)) + 1).view(bs, length + 1)
        self._req_to_token = torch.zeros((bs + 1, length + 1), dtype=torch.int32, device=device)
        self._req_to_token[1:] = slots.to(device, torch.int32)
        tokens = torch.randint(0, 128_000, (bs, length + 1))
        self._requests = [Request(str(i), row) for i, row in enumerate(tokens.tolist())]
        self._rows, self._length, self._bs = list(range(1, bs + 1)), length, bs
        self._truth = TruthTable(bs + 1, (("model", "benchmark"),))
        self._upload = torch.zeros((6, bs + 1), dtype=torch.int64, pin_memory=True)
        self._host = self._upload.numpy()
        self._batch = torch.zeros_like(self._upload, device=device)
        self._input_ids = tokens[:, -1].to(device)
        self._out_cache_loc = slots[:, -1].to(device)
        self._snapshot = torch.zeros((2, bs), dtype=torch.int64, device=device)
        self._drained = torch.zeros_like(self.violations.block, device="cpu").pin_memory()
        self._event = torch.cuda.Event()
        anchors, _, _ = self._truth.advance(self._requests, self._rows, [length - 1] * bs)
        self._chains = self._truth._chains.copy()
        self._ones = torch.ones(bs, dtype=torch.int64).numpy()
        backend.write_chain(
            records=self._records,
            writers=self._writers,
            slots=slots[:, :-1].reshape(-1).to(device),
            tokens=tokens[:, :-1].reshape(-1).to(device),
            rows=torch.arange(1, bs + 1, device=device),
            prefix_lens=torch.zeros(bs, dtype=torch.int64, device=device),
            offsets=torch.arange(bs + 1, device=device) * length,
            seeds=torch.from_numpy(anchors.view("int64")).to(device),
            step=1,
            first_slot=1,
            violations=self.violations,
        )
        backend.seal_slots(records=self._records, table=self._table, slots=torch.arange(slot_count, device=device))
        self.hash()
        self.upload()
        self._before = CapturedLaunches(self.verify, device)
        self._after = CapturedLaunches(self._launch_after, device)

    def parts(self) -> list[tuple[str, Callable[[], None]]]:
        """What the table lists."""
        return [
            ("true hashes", self.hash),
            ("uploads", self.upload),
            ("verify", self.verify),
            ("write", self.write),
            ("seal and scrub", self.seal_and_scrub),
            ("drain", self.drain),
            ("the whole step", self.run),
            ("verify, captured", self._before.replay),
            ("write, seal, scrub and drain, captured", self._after.replay),
            ("the whole step, kernels captured", self.run_captured),
        ]

    def run(self) -> None:
        """All of it."""
        self.hash()
        self.upload()
        self.verify()
        self.write()
        self.seal_and_scrub()
        self.drain()

    def run_captured(self) -> None:
        """All of it, with the kernels, the copy of the verdict and the reset in two device graphs."""
        self.hash()
        self.upload()
        self._before.replay()
        self._after.replay()
        self._event.record()

    def _launch_after(self) -> None:
        self.write()
        self.seal_and_scrub()
        self._drained.copy_(self.violations.block, non_blocking=True)
        self.violations.reset()

    def hash(self) -> None:
        """Move the true hashes on by one token, from where they stood a step before; lay the batch out as CSR."""
        bs, host = self._bs, self._host
        self._truth._lengths[:] = self._length - 1
        self._truth._chains[:] = self._chains
        lengths = [self._length] * bs
        anchors, chains, _ = self._truth.advance(self._requests, self._rows, lengths)
        host[0, :bs], host[1, :bs] = self._rows, lengths
        host[2, 1:] = host[1, :bs].cumsum()
        host[3, 1:] = self._ones.cumsum()
        host[4, :bs], host[5, :bs] = anchors.view("int64"), chains.view("int64")

    def upload(self) -> None:
        """What the host knows, and copies of what the forward may change."""
        self._batch.copy_(self._upload, non_blocking=True)
        self._snapshot[0].copy_(self._input_ids)
        self._snapshot[1].copy_(self._out_cache_loc)

    def verify(self) -> None:
        """Before the forward."""
        bs, batch = self._bs, self._batch
        self._backend.verify_prefixes(
            records=self._records,
            writers=self._writers,
            req_to_token=self._req_to_token,
            rows=batch[0, :bs],
            offsets=batch[2],
            anchors=batch[4],
            end_points=batch[5],
            total=bs * self._length,
            first_slot=1,
            violations=self.violations,
        )

    def write(self) -> None:
        """After the forward."""
        bs, batch = self._bs, self._batch
        self._backend.write_chain(
            records=self._records,
            writers=self._writers,
            slots=self._snapshot[1],
            tokens=self._snapshot[0],
            rows=batch[0, :bs],
            prefix_lens=batch[1],
            offsets=batch[3],
            seeds=batch[5],
            step=2,
            first_slot=1,
            violations=self.violations,
        )

    def seal_and_scrub(self) -> None:
        """Behind it."""
        self._backend.seal_and_scrub(
            records=self._records,
            writers=self._writers,
            table=self._table,
            slots=self._snapshot[1],
            start=1,
            count=SCRUBBED,
            violations=self.violations,
        )

    def drain(self) -> None:
        """The verdict on its way to the host."""
        self._drained.copy_(self.violations.block, non_blocking=True)
        self.violations.reset()
        self._event.record()
