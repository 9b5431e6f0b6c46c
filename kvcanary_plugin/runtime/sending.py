"""What a prefill server has handed to the threads that send, so that it can say when they are done with a transfer.

A decode server that gives a transfer up tells the other one, and frees the slots. What SGLang acknowledges is that no
further chunk will be started; the one under way goes on. So the answer that counts is given here, behind that one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from .flights import Flight

Address = tuple[str, int]


class Done(NamedTuple):
    """A chunk that a thread is done with: its flight, its room, and who waits to hear that no more is sent for it."""

    flight: Flight | None
    room: int
    waiting: list[Address]


class Sending:
    """Chunks that are waiting or under way. Outlives its guard: the other server relies on what it says."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[int, tuple[int, Flight | None]] = {}  # room and flight of each, by the identity of the chunk
        self._counts: dict[int, int] = {}
        self._current: dict[int, int] = {}
        self._heard: list[tuple[int, Address]] = []
        self._asked: dict[int, list[Address]] = {}

    def put(self, room: int, chunk: object, flight: Flight | None) -> None:
        """``chunk`` of transfer ``room`` is about to be handed over; it is known by its identity until it is done."""
        with self._lock:
            self._chunks[id(chunk)] = room, flight
            self._counts[room] = self._counts.get(room, 0) + 1

    def take(self, queue: object, chunk: object) -> None:
        """The thread of ``queue``, one for each, goes on with ``chunk``."""
        with self._lock:
            self._current[id(queue)] = id(chunk)

    def finish(self, queue: object) -> Done:
        """That thread is done with the chunk it had, if it had one."""
        with self._lock:
            chunk = self._current.pop(id(queue), None)
            if chunk is None or chunk not in self._chunks:
                return Done(None, 0, [])
            room, flight = self._chunks.pop(chunk)
            self._counts[room] -= 1
            if self._counts[room]:
                return Done(flight, room, [])
            del self._counts[room]
            return Done(flight, room, self._asked.pop(room, []))

    def hear(self, room: int, address: Address) -> None:
        """The decode server at ``address`` has given up ``room``, of which SGLang is about to take note."""
        self._heard.append((room, address))

    def list_over(self) -> list[tuple[int, Address]]:
        """SGLang has taken note of what was heard. Returns whom to tell right away; the others :meth:`finish` names."""
        over = []
        with self._lock:
            for room, address in self._heard:
                if room in self._counts:
                    self._asked.setdefault(room, []).append(address)
                else:
                    over.append((room, address))
        self._heard.clear()
        return over


class Tapped:
    """A socket of SGLang whose messages are looked at first.

    ``look(message)`` says whether SGLang may have it; ``ahead()`` is called when it is done with the one before.
    """

    def __init__(
        self, socket: Any, look: Callable[[list[bytes]], bool], ahead: Callable[[], None] = lambda: None
    ) -> None:
        self._socket, self._look, self._ahead = socket, look, ahead

    def recv_multipart(self) -> list[bytes]:
        """The next message that is for SGLang."""
        while True:
            self._ahead()
            message: list[bytes] = self._socket.recv_multipart()
            if self._look(message):
                return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
