"""What a stored page says of its own tokens: the digests that the device made when it first stored them.

They go into a page file beside the bytes, and come back with them. So the bytes are compared on the device with what a
device has made of them, over every hop that lies between. Whose arithmetic made them is part of them: where it is
another, they are left alone, as are pages that have none.
"""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]  # (tokens, ROW_WORDS): digest, locator, identity word; an identity of 0 is "not known"

ROW_WORDS: Final = 3
IDENTITY: Final = 2
FINGERPRINT_BYTES: Final = 16
_HEADER: Final = struct.Struct("<4sHHI16s4x")  # magic, version, words a row, rows, fingerprint
_MAGIC: Final = b"KVCR"
_VERSION: Final = 1


class HostSlots(Protocol):
    """What is known of the slots of one host pool, for storage code on any thread.

    Attributes:
        fingerprint: 16 bytes that stand for the arithmetic of the digests and for what they are made of.
    """

    fingerprint: bytes

    def in_use(self, slots: Ids) -> AbstractContextManager[None]:
        """Storage reads or writes slots (n,) meanwhile."""

    def collect(self, slots: Ids) -> Rows:
        """What the device made of the rows in slots (n,). May wait a moment for it."""

    def supply(self, slots: Ids, rows: Rows) -> None:
        """Slots (n,) were filled from storage, which has ``rows`` of them."""


_followed: WeakKeyDictionary[Any, HostSlots] = WeakKeyDictionary()


def follow(host_pool: Any, slots: HostSlots) -> None:
    """From now on storage code asks ``slots`` about the slots of SGLang's ``host_pool``."""
    _followed[host_pool] = slots


def find(host_pool: Any) -> HostSlots | None:
    """Who knows the slots of a host pool, or of the anchor of a pool group; None if nobody does."""
    anchor = getattr(host_pool, "anchor_entry", None)
    return _followed.get(host_pool if anchor is None else anchor.host_pool)


def in_use(host_pool: Any, host_indices: Any) -> AbstractContextManager[None]:
    """Storage reads or writes the slots of ``host_pool`` that ``host_indices``, int (n,) on the CPU, names."""
    slots = find(host_pool)
    return nullcontext() if slots is None else slots.in_use(host_indices.reshape(-1).cpu().numpy().astype(np.int64))


def room_for(tokens: int) -> int:
    """Bytes that the records of a page take at most."""
    return _HEADER.size + tokens * ROW_WORDS * 8


def encode(rows: Rows, fingerprint: bytes) -> bytes:
    """As they are stored: header and rows, little-endian. Empty if no row is known."""
    if not rows[:, IDENTITY].any():
        return b""
    return _HEADER.pack(_MAGIC, _VERSION, ROW_WORDS, len(rows), fingerprint) + rows.astype("<i8").tobytes()


def decode(data: bytes, fingerprint: bytes, tokens: int) -> Rows:
    """The inverse of :func:`encode`. All unknown if there are none, or if they were made in another way."""
    unknown: Rows = np.zeros((tokens, ROW_WORDS), np.int64)
    if len(data) != room_for(tokens):
        return unknown
    if _HEADER.unpack_from(data) != (_MAGIC, _VERSION, ROW_WORDS, tokens, fingerprint):
        return unknown
    return np.frombuffer(data, "<i8", offset=_HEADER.size).reshape(tokens, ROW_WORDS).astype(np.int64)
