"""Slots and a ledger that knows of transfers between servers: what a session does for the patches."""

from types import SimpleNamespace

import numpy as np
import torch

from kvcanary_plugin.runtime.flights import Flights
from kvcanary_plugin.runtime.ownership import explain_rows
from kvcanary_plugin.runtime.sending import Sending
from tests.bookkeeping import Bookkeeping

ROOM, OTHER = 7, 8
SIZE = 64


class Pool(Bookkeeping):
    """Slots and a ledger that knows of transfers, and what a session does for the patches."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size=page_size, size=SIZE)
        self.flights = Flights(self.ledger, SIZE + page_size, page_size, torch.device("cpu"))
        self.ledger.flights = self.flights
        self.sending = Sending()
        self.handover = object()

    def begin_flight(self, room, pages, peer="", answers=1):
        return self.flights.begin(room, pages, peer, answers)

    def pages_of(self, slots):
        return np.unique(slots.numpy() // self.page_size).astype(np.int32)

    def ask(self):
        """Two pages, or two tokens."""
        return self.allocator.alloc(2 * self.page_size)

    def begin(self, slots, room=ROOM, **options):
        self.flights.name(room, f"request {room}")
        return self.flights.begin(room, self.pages_of(slots), **options)

    def give_all(self):
        """Everything that is free is given out. Returns what the ledger has to say of it."""
        self.allocator.alloc(self.allocator.available_size())
        return self.look()

    def look(self):
        self.step += 1
        self.ledger.apply(self.step, self.violations)
        rows = self.violations.rows[: int(self.violations.count)].tolist()
        self.violations.reset()
        return explain_rows(self.ledger, SimpleNamespace(number=self.step, requests=[], rows=[]), rows, self.page_size)
