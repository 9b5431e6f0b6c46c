"""Whether a forward runs behind what it builds on, in the order of the device's streams.

The scheduler's stream writes rows and takes slots for a batch, the forward's stream then reads them; SGLang has the
second wait for the first. Everything of ours around a forward, and with it the records, relies on forwards running one
behind the other. Each writer leaves a ticket with the number of its step when the device has come to that; the next
reader compares. On one stream, or with a wait in between, a ticket is always there; how far the *host* is ahead, and
what the scheduler does early because of that, does not matter.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.backend import Backend
from ..kernels.record import Header
from ..kernels.violations import ViolationBuffer
from .batch import Batch, HostFields


class Order:
    """The tickets of one guard.

    Attributes:
        tickets: int64 (2,): the last forward whose records were made, and the last batch the scheduler's stream has
            come to launching.
    """

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.tickets = torch.zeros(2, dtype=torch.int64, device=device)
        self._forward, self._batch = self.tickets[:1], self.tickets[1:]
        self._backend = backend
        self._concluded = 0

    @property
    def resident_bytes(self) -> int:
        """Device bytes."""
        return self.tickets.numel() * self.tickets.element_size()

    def note_batch(self, step: int) -> None:
        """Everything that batch ``step`` needs was enqueued on the current stream, the scheduler's."""
        self._batch.fill_(step)

    def demand(self, host: HostFields, step: int) -> None:
        """Say in the fields of forward ``step`` what it has to find."""
        host.header[Header.FORWARD_DUE], host.header[Header.BATCH_DUE] = self._concluded, step

    def check(self, batch: Batch, violations: ViolationBuffer) -> None:
        """Enqueued ahead of the forward, on its stream."""
        self._backend.check_order(tickets=self.tickets, due=batch.fields.due, violations=violations)

    def note_forward(self, batch: Batch) -> None:
        """Enqueued behind the forward, on its stream."""
        self._forward.copy_(batch.fields.step)

    def note_concluded(self, step: int) -> None:
        """That was done for ``step``: the next forward has to find it."""
        self._concluded = step

    @staticmethod
    def is_needed(device: torch.device) -> bool:
        """Whether this kind of device has streams. A CPU does everything in the order it is asked for."""
        module: Any = torch.get_device_module(device) if device.type != "cpu" else None
        return module is not None and hasattr(module, "Stream")
