"""Transfers between two servers that are under way: which pages they use, for whom, and since when they no longer do.

SGLang frees the slots of a request whose transfer was given up at once, on both sides, while the thread that sends may
be in the midst of a chunk. To free them is therefore no fault; to give them out before the transfer is over is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from .ledger import Ledger

Pages = npt.NDArray[np.int64]
MAX_REMEMBERED: Final = 256  # flights that are over, for reports


class Flight:
    """One transfer on the side that receives, one chunk of it on the side that sends.

    Attributes:
        room: number of the transfer, the same on both sides.
        pages: int64 (n,), no page twice.
        peer: address of the other server.
        answers: servers that have yet to say that they send no more.
        ended: step ahead of which it was over, 0 while it is not.
    """

    __slots__ = ("answers", "ended", "pages", "peer", "room")

    def __init__(self, room: int, pages: Pages, peer: str, answers: int) -> None:
        self.room, self.pages, self.peer, self.answers, self.ended = room, pages, peer, answers, 0


class Flights:
    """The flights of one pool. Begun on the scheduler's thread; that they are over may be said on any.

    Attributes:
        step: number of the next forward.
    """

    def __init__(self, ledger: Ledger, slot_count: int, page_size: int, device: torch.device) -> None:
        self.step = 1
        self._ledger = ledger
        self._users = np.zeros(slot_count // page_size, dtype=np.int32)  # flights of each page
        self._within = torch.arange(page_size, device=device)
        self._page_size = page_size
        self._open: dict[int, list[Flight]] = {}
        self._said: deque[Callable[[], None]] = deque()
        self._latest: deque[Flight] = deque(maxlen=MAX_REMEMBERED)
        self._names: dict[int, str] = {}

    @property
    def count(self) -> int:
        """Flights that are not known to be over."""
        self.poll()
        return sum(map(len, self._open.values()))

    def begin(self, room: int, pages: npt.NDArray[np.integer], peer: str = "", answers: int = 1) -> Flight:
        """``pages``, int (n,), are used by transfer ``room`` from now on."""
        kept = pages.astype(np.int64)
        flight = Flight(room, kept[(kept >= 0) & (kept < len(self._users))], peer, answers)
        self.poll()
        self._users[flight.pages] += 1
        self._open.setdefault(room, []).append(flight)
        self._latest.append(flight)
        self._ledger.aim(self._slots_of(flight.pages))
        return flight

    def name(self, room: int, request: str) -> None:
        """Whose transfer it is."""
        self._names[room] = request

    def end(self, room: int) -> None:
        """Nothing of transfer ``room`` comes or is read any more. Of any thread."""
        self._said.append(lambda: self._end(room))

    def end_one(self, flight: Flight) -> None:
        """The same of one chunk. Of any thread."""
        self._said.append(lambda: self._let_go(flight))

    def answer(self, room: int) -> None:
        """One of the servers that send for ``room`` sends no more. Of any thread."""
        self._said.append(lambda: self._count_answer(room))

    def lose(self, peer: str) -> None:
        """The server at ``peer`` is dead, as far as SGLang knows: nobody will say when it stopped. Of any thread."""
        self._said.append(lambda: self._lose(peer))

    def poll(self) -> None:
        """Let go of what is over. On the scheduler's thread, ahead of every allocation and every forward."""
        while self._said:
            self._said.popleft()()

    def clear(self) -> None:
        """The pool holds nothing, and the ledger knows of nothing."""
        self._said.clear()
        self._open.clear()
        self._users[:] = 0

    def find(self, slot: int, step: int) -> str | None:
        """Whose transfer used ``slot`` ahead of forward ``step``: the request, or the number of its transfer."""
        for flight in self._latest:  # the oldest one: whoever got the slot then may have a flight by now
            if (not flight.ended or flight.ended >= step) and slot // self._page_size in flight.pages:
                return self._names.get(flight.room, f"transfer {flight.room}")
        return None

    def _end(self, room: int) -> None:
        for flight in list(self._open.get(room, ())):
            self._let_go(flight)

    def _count_answer(self, room: int) -> None:
        for flight in list(self._open.get(room, ())):
            flight.answers -= 1
            if flight.answers <= 0:
                self._let_go(flight)

    def _lose(self, peer: str) -> None:
        for flight in [each for flights in self._open.values() for each in flights if each.peer == peer]:
            self._let_go(flight)

    def _let_go(self, flight: Flight) -> None:
        flights = self._open.get(flight.room, [])
        if flight not in flights:
            return  # all of the transfer was over, or the pool was flushed
        flights.remove(flight)
        if not flights:
            del self._open[flight.room]
            self._forget_names()
        flight.ended = self.step
        self._users[flight.pages] -= 1
        self._ledger.land(self._slots_of(flight.pages[self._users[flight.pages] == 0]))

    def _forget_names(self) -> None:
        if len(self._names) > 4 * MAX_REMEMBERED:
            told = {each.room for each in self._latest} | self._open.keys()
            self._names = {room: name for room, name in self._names.items() if room in told}

    def _slots_of(self, pages: Pages) -> torch.Tensor:
        """int64 (n * page_size,)."""
        there = torch.from_numpy(pages)
        if self._within.device.type != "cpu":
            there = there.pin_memory().to(self._within.device, non_blocking=True)
        return (there[:, None] * self._page_size + self._within).view(-1)
