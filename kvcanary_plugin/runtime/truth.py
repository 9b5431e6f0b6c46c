"""The true prefix hash of every request row, kept on the host from the scheduler's own token lists.

It is the independent half of the chain check: the device says what the slots hold, this says what they must hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import GuardError
from ..kernels.mixing import POSITION_SHIFT, mix_array, mix_array_
from ..kernels.record import POSITION_MASK, TOKEN_MASK

MAX_REMEMBERED_KEYS = 16384
MAX_KEY_LENGTH = 256


class Request(Protocol):
    """What is read of a request of the scheduler."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None
    retraction_count: int


def make_anchor(fields: Sequence[tuple[str, str]]) -> int:
    """Hash of tagged identity fields, unsigned 64 bit. Tags and lengths keep neighbouring fields apart."""
    parts = [f"{len(tag)}:{tag}={len(value)}:{value};" for tag, value in fields]
    # A client may send lone surrogates in a key, which strict encoding refuses.
    return xxhash.xxh3_64_intdigest("".join(parts).encode("utf-8", "surrogatepass"))


def hash_tokens(tokens: Sequence[int], start: int) -> npt.NDArray[np.uint64]:
    """``mix(token + 2^32 * position)`` of tokens that begin at position ``start``, as uint64 (n,)."""
    words = np.asarray(tokens, dtype=np.int64).view(np.uint64) & np.uint64(TOKEN_MASK)
    words |= np.arange(start, start + len(words), dtype=np.uint64) << np.uint64(POSITION_SHIFT)
    return mix_array(words)


def tokens_between(request: Request, start: int, stop: int) -> list[int]:
    """Token ids of positions ``start`` .. ``stop - 1``: the prompt, then what was generated."""
    prompt = len(request.origin_input_ids)
    tokens = list(request.origin_input_ids[start:stop])
    if stop > prompt:
        tokens += request.output_ids[max(start - prompt, 0) : stop - prompt]
    if len(tokens) != stop - start:
        raise GuardError(
            f"request {request.rid!r:.100} is to read {stop} tokens but the scheduler knows "
            f"{prompt + len(request.output_ids)}"
        )
    return tokens


def _token_at(request: Request, position: int) -> int:
    prompt = len(request.origin_input_ids)
    if position < prompt:
        return request.origin_input_ids[position]
    if position - prompt >= len(request.output_ids):
        raise GuardError(
            f"request {request.rid!r:.100} is to read position {position} but the scheduler knows "
            f"{prompt + len(request.output_ids)} tokens"
        )
    return request.output_ids[position - prompt]


def true_chains(request: Request, anchor: int, stop: int) -> npt.NDArray[np.uint64]:
    """The true chain at positions 0 .. ``stop - 1``, uint64. For reports: it hashes the whole prefix."""
    hashes = hash_tokens(tokens_between(request, 0, stop), 0)
    return np.cumsum(hashes, dtype=np.uint64) + np.uint64(anchor)


class TruthTable:
    """One true prefix hash per request row, moved forward token by token."""

    def __init__(self, row_count: int, fingerprint: Sequence[tuple[str, str]]) -> None:
        self._fingerprint = tuple(fingerprint)
        self._anchors_by_key: dict[str | None, int] = {}
        self._owners: list[weakref.ref[Request] | None] = [None] * row_count
        self._retractions = [0] * row_count  # a request that was retracted may come back to its row, and starts again
        self._lengths = np.zeros(row_count, dtype=np.int64)
        self._chains = np.zeros(row_count, dtype=np.uint64)
        self._anchors = np.zeros(row_count, dtype=np.uint64)

    def anchor_of(self, request: Request) -> int:
        """The chain before the first token of ``request``, unsigned."""
        key = request.extra_key
        anchor = self._anchors_by_key.get(key)
        if anchor is None:
            anchor = make_anchor((*self._fingerprint, ("extra_key", key or "")))
            # Clients choose keys: remember short ones only, and forget rather than grow.
            if len(self._anchors_by_key) >= MAX_REMEMBERED_KEYS:
                self._anchors_by_key.clear()
            if key is None or len(key) <= MAX_KEY_LENGTH:
                self._anchors_by_key[key] = anchor
        return anchor

    def advance(
        self, requests: Sequence[Request], rows: Sequence[int], lengths: Sequence[int]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], list[int]]:
        """Bring each row to the hash of its first ``lengths[i]`` tokens.

        Returns:
            anchors, chains (uint64 (bs,)) and the indices of requests seen on their row for the first time.
        """
        started = []
        next_rows, next_tokens = [], []
        owners, retractions, have_of = self._owners, self._retractions, self._lengths.item
        for index, (request, row, length) in enumerate(zip(requests, rows, lengths, strict=True)):
            owner, have = owners[row], have_of(row)
            is_known = owner is not None and owner() is request and retractions[row] == request.retraction_count
            if not is_known or have > length:
                started.append(index)
                self._restart(request, row)
                have = 0
            if length == have + 1:
                next_rows.append(row)
                next_tokens.append(_token_at(request, have))
            elif length > have:
                self._extend(request, row, have, length)
        chosen = np.array(rows)
        if next_rows:
            moved = chosen if len(next_rows) == len(rows) else np.array(next_rows)
            positions = self._lengths[moved]
            words = np.array(next_tokens) & TOKEN_MASK | positions << POSITION_SHIFT
            self._chains[moved] += mix_array_(words.view(np.uint64), np.empty(len(moved), dtype=np.uint64))
            self._lengths[moved] = positions + 1
        return self._anchors[chosen], self._chains[chosen], started

    def _extend(self, request: Request, row: int, have: int, length: int) -> None:
        if length > POSITION_MASK:
            raise GuardError(
                f"request {request.rid!r:.100} has {length} tokens; a record holds positions up to {POSITION_MASK}"
            )
        hashes = hash_tokens(tokens_between(request, have, length), have)
        self._chains[row : row + 1] += hashes.sum(dtype=np.uint64)  # a slice wraps around, a numpy scalar would warn
        self._lengths[row] = length

    def _restart(self, request: Request, row: int) -> None:
        anchor = self.anchor_of(request)
        self._owners[row] = weakref.ref(request)
        self._retractions[row] = request.retraction_count
        self._lengths[row] = 0
        self._anchors[row] = self._chains[row] = np.uint64(anchor)
