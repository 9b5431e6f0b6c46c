"""KV that has come from a prefill server, compared ahead of the request's first token.

That token was sampled by the prefill server and goes out as soon as SGLang takes the transfer for complete. Until what
came has been compared, the transfer is said to be under way: the request stays in SGLang's queue, where aborts and its
count of slots find it, and nobody waits. What is compared is what the first forward would read: the records in the
inbox against the tokens of the request, and the bytes in the pool against the digests of those records.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final
from weakref import WeakSet

import torch

from ..kernels.backend import Backend
from ..kernels.mixing import as_int64
from ..kernels.violations import ViolationBuffer
from ..pool_patcher.records import ShadowRecords
from .space import VIOLATIONS_A_FORWARD, Space
from .step import Step
from .truth import Received, Request, TruthTable, true_chains

MAX_UNDER_WAY: Final = 16  # comparisons; 22 KiB of pinned memory each. Whoever finds no room comes with a later look
_WORDS: Final = 6  # sent with each: its row, anchor, end point, two offsets, and its place


class Arrival:
    """A request whose KV is expected, or has come and is not compared yet."""

    __slots__ = ("place", "request")

    def __init__(self, request: Received) -> None:
        self.request = request
        self.place: int | None = None  # of its comparison under way


class Arrivals:
    """The arrivals of one pool."""

    def __init__(
        self,
        space: Space,
        inbox: ShadowRecords,
        truth: TruthTable,
        backend: Backend,
        *,
        inject: Callable[[Step], None],
        judge: Callable[[Step], None],
        next_step: Callable[[], int],
    ) -> None:
        """
        Args:
            space: where KV comes to.
            inbox: where its records come to.
            truth: what the tokens of a request hash to.
            backend: kernels.
            inject: damages what has come, in drills.
            judge: reads a verdict and acts on it; may raise.
            next_step: number of the next forward.
        """
        device = inbox.hot.device
        self._space, self._inbox, self._truth, self._backend = space, inbox, truth, backend
        self._inject, self._judge, self._next_step = inject, judge, next_step
        self._violations = ViolationBuffer(VIOLATIONS_A_FORWARD, device)
        # Folds of one table must follow each other in one stream, and these have a stream of their own.
        self._table = copy.copy(space.slots.table)
        on_device = device.type != "cpu"
        shape = (MAX_UNDER_WAY, *self._violations.block.shape)
        self._ring = torch.zeros(shape, dtype=torch.int64, pin_memory=on_device)
        self._words = torch.zeros((MAX_UNDER_WAY, _WORDS), dtype=torch.int64, pin_memory=on_device)
        self._sent = torch.zeros_like(self._words, device=device) if on_device else self._words
        self._steps = [Step([block], device) for block in self._ring]
        module: Any = torch.get_device_module(device)
        self._module = module if on_device else None
        self._stream: Any = module.Stream(device) if on_device else None
        self._expected: dict[int, Arrival] = {}
        self._folded: WeakSet[Request] = WeakSet()

    @property
    def resident_bytes(self) -> int:
        """Device bytes of the verdict under way."""
        return self._violations.block.nbytes + self._sent.nbytes

    def expect(self, room: int, request: Received) -> None:
        """Transfer ``room`` brings the KV of ``request``."""
        self.forget(room)
        self._expected[room] = Arrival(request)

    def forget(self, room: int) -> None:
        """Transfer ``room`` was compared, or given up: what the device may still find is not read."""
        self._expected.pop(room, None)

    def clear(self) -> None:
        """The pool holds nothing, and no request is waited for."""
        self._expected.clear()
        self._folded.clear()

    def settle(self, room: int) -> bool:
        """All of transfer ``room`` has come: whether it has been compared by now. The first call begins with that.

        Raises:
            CorruptionError: it is damaged and the mode is ``raise``.
        """
        arrival = self._expected.get(room)
        if arrival is None:
            return True
        if arrival.place is None:
            arrival.place = self._find_place()
            if arrival.place is None:
                return False
            self._compare(arrival.request, arrival.place)
        step = self._steps[arrival.place]
        if not step.is_written:
            return False
        self._judge(step)
        self.forget(room)
        return True

    def was_folded(self, request: Request) -> bool:
        """Whether the bytes of ``request`` were compared here, so that its first forward need not do it. Once."""
        was_folded = request in self._folded
        self._folded.discard(request)
        return was_folded

    def _find_place(self) -> int | None:
        taken = {arrival.place for arrival in self._expected.values()}
        free = (place for place, step in enumerate(self._steps) if place not in taken and step.is_written)
        return next(free, None)

    def _compare(self, request: Received, place: int) -> None:
        """Enqueue the comparison, and its verdict into ``place``."""
        row, length = request.req_pool_idx, request.kv_committed_len
        step = self._steps[place]
        step.open_arrival(self._next_step(), request, row, length, self._inbox)
        self._inject(step)
        anchor = self._truth.anchor_of(request)
        end_point = int(true_chains(request, anchor, length)[-1])
        self._words[place] = torch.tensor((row, as_int64(anchor), as_int64(end_point), 0, length, place))
        if self._module is not None:
            self._stream.wait_stream(self._module.current_stream())  # on which the row was filled
        with nullcontext() if self._module is None else self._module.stream(self._stream):
            if self._module is not None:
                self._sent[place].copy_(self._words[place], non_blocking=True)
            self._launch(row, length, self._sent[place])
            if self._space.folds:
                self._folded.add(request)
            step.close_verdict()

    def _launch(self, row: int, length: int, sent: torch.Tensor) -> None:
        space, inbox = self._space, self._inbox
        if space.verifies:
            self._backend.verify_prefixes(
                records=inbox.hot,
                writers=inbox.writers,
                req_to_token=space.req_to_token,
                rows=sent[:1],
                offsets=sent[3:5],
                anchors=sent[1:2],
                end_points=sent[2:3],
                total=length,
                first_slot=inbox.first_slot,
                violations=self._violations,
            )
        if space.folds:
            self._backend.check_slots(
                records=inbox.hot,
                writers=inbox.writers,
                table=self._table,
                slots=space.slots_of_prefix(row, length),
                request=0,
                violations=self._violations,
            )
        self._backend.drain(self._violations, self._ring, sent[5:])
