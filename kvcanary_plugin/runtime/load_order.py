"""Whether a forward uses a layer only once it has come back from host memory.

SGLang copies layer by layer on a stream of its own, and a forward waits for a layer where it asks for its rows. The
load's stream leaves a ticket with the number of the load behind each layer, ahead of the event that SGLang waits for.
Wherever a forward that needs a load asks for a layer, behind SGLang's own wait, the lowest ticket that it saw is kept;
of a forward that asks for none, the tickets behind it. With the wait in place that is the number of the load, however
slow the copies are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .violation import Violation

_NEVER_LATE = (1 << 63) - 1
_FORWARDS_UNDER_WAY = 8  # more than can be


class _Seen(NamedTuple):
    step: int
    due: int
    request: str
    tickets: torch.Tensor  # int64 (layers,) in host memory
    is_there: Any  # event behind the copy to it


class LoadOrder:
    """Tickets of the loads from one host pool.

    Attributes:
        load: number of the load that was started last.
    """

    def __init__(self, layer_count: int, device: torch.device, describe: Callable[[int, int, str], Violation]) -> None:
        """``describe`` makes a violation of step, layer and request."""
        self.load = 0
        self._describe = describe
        self._device = device
        self._tickets = torch.zeros(layer_count, dtype=torch.int64, device=device)
        self._lowest = torch.full_like(self._tickets, _NEVER_LATE)
        # Views that are made once: a layer is asked for twice in every forward that loads.
        self._ticket_of, self._lowest_of = self._tickets.unbind(), self._lowest.unbind()
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        pinned = self._module is not None
        self._seen = torch.zeros((_FORWARDS_UNDER_WAY, layer_count), dtype=torch.int64, pin_memory=pinned)
        self._step, self._due, self._request, self._has_asked = 0, 0, "", False
        self._unread: list[_Seen] = []

    @property
    def resident_bytes(self) -> int:
        """Device bytes."""
        return 2 * self._tickets.numel() * 8

    def note_layer(self, layer: int) -> None:
        """The rows of ``layer`` were copied for the latest load. Called on the stream that copies."""
        self._ticket_of[layer].fill_(self.load)

    def begin(self, step: int, due: int, request: str) -> None:
        """Forward ``step`` uses rows of load ``due`` on behalf of ``request``; 0 for none."""
        self._step, self._due, self._request, self._has_asked = step, due, request, False

    def note_use(self, layer: int) -> None:
        """The forward is about to use ``layer``. Called on its stream, behind the wait."""
        if self._due:
            lowest = self._lowest_of[layer]
            torch.minimum(lowest, self._ticket_of[layer], out=lowest)
            self._has_asked = True

    def end(self) -> None:
        """The forward has been enqueued, and nothing of ours behind it yet."""
        if not self._due:
            return
        seen = self._seen[self._step % _FORWARDS_UNDER_WAY]
        # A layer that a model never asks for may come late.
        seen.copy_(self._lowest if self._has_asked else self._tickets, non_blocking=True)
        self._lowest.fill_(_NEVER_LATE)
        is_there = None
        if self._module is not None:
            is_there = self._module.Event()
            is_there.record()
        self._unread.append(_Seen(self._step, self._due, self._request, seen, is_there))
        self._due = 0

    def read(self, step: int) -> Sequence[Violation]:
        """What forward ``step`` used too early, at most one violation, of its first layer. Waits for it."""
        found = []
        while self._unread and self._unread[0].step <= step:
            seen = self._unread.pop(0)
            if seen.is_there is not None:
                seen.is_there.synchronize()
            late = torch.nonzero(seen.tickets < seen.due).flatten().tolist()
            found += [self._describe(seen.step, layer, seen.request) for layer in late[:1]]
        return found

    def clear(self) -> None:
        """Nothing is under way."""
        self._unread.clear()
        self._due = 0
        self._lowest.fill_(_NEVER_LATE)
