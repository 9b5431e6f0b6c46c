"""The true prefix hash of every request row, kept on the host from the scheduler's own token lists.

It is the independent half of the chain check: the device says what the slots hold, this says what they must hold.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import GuardError
from ..kernels.mixing import POSITION_SHIFT, mix_array_
from ..kernels.record import POSITION_MASK, TOKEN_MASK
from .identity import Identities
from .images import list_marks


class Request(Protocol):
    """What is read of a request of the scheduler."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None
    retraction_count: int


class Received(Request, Protocol):
    """What is read of one whose KV comes from another server."""

    req_pool_idx: int
    kv_committed_len: int


MAX_TOGETHER = 64  # tokens of a request that are hashed with those of others
_BLOCK = 1 << 15  # tokens hashed at a time: few enough that they stay within the cache


def hash_tokens(tokens: npt.NDArray[np.int64], start: int) -> npt.NDArray[np.uint64]:
    """``mix(token + 2^32 * position)`` of tokens (n,) that begin at position ``start``, as uint64 (n,): in place."""
    words = tokens.view(np.uint64)
    scratch = np.empty(min(len(words), _BLOCK), dtype=np.uint64)
    for begin in range(0, len(words), _BLOCK):
        block = words[begin : begin + _BLOCK]
        positions = np.arange(start + begin, start + begin + len(block), dtype=np.uint64)
        block &= np.uint64(TOKEN_MASK)
        block |= positions << np.uint64(POSITION_SHIFT)
        mix_array_(block, scratch[: len(block)])
    return words


def tokens_between(request: Request, start: int, stop: int) -> list[int]:
    """:func:`token_array` as a list, for a few tokens."""
    tokens: list[int] = token_array(request, start, stop).tolist()
    return tokens


def token_array(request: Request, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Token ids of positions ``start`` .. ``stop - 1``, a new int64 (n,): the prompt, then what was generated; images
    by their digest.

    SGLang keeps them in arrays, so that a prefix of a million tokens makes no Python number of each.
    """
    prompt = len(request.origin_input_ids)
    tokens = np.array(request.origin_input_ids[start:stop], dtype=np.int64)
    if stop > prompt:
        generated = request.output_ids[max(start - prompt, 0) : stop - prompt]
        tokens = np.concatenate((tokens, np.array(generated, dtype=np.int64)))
    if len(tokens) != stop - start:
        raise GuardError(
            f"request {request.rid!r:.100} is to read {stop} tokens but the scheduler knows "
            f"{prompt + len(request.output_ids)}"
        )
    for position, marked in list_marks(request, start, min(stop, prompt)):
        tokens[position - start : position - start + len(marked)] = marked
    return tokens


def _token_at(request: Request, position: int) -> int:
    prompt = len(request.origin_input_ids)
    if position < prompt:
        return tokens_between(request, position, position + 1)[0]
    if position - prompt >= len(request.output_ids):
        raise GuardError(
            f"request {request.rid!r:.100} is to read position {position} but the scheduler knows "
            f"{prompt + len(request.output_ids)} tokens"
        )
    return request.output_ids[position - prompt]


def true_chains(request: Request, anchor: int, stop: int) -> npt.NDArray[np.uint64]:
    """The true chain at positions 0 .. ``stop - 1``, uint64. It hashes the whole prefix, so not for each forward."""
    chains = hash_tokens(token_array(request, 0, stop), 0)
    np.cumsum(chains, out=chains)
    chains += np.uint64(anchor)
    return chains


@dataclass(slots=True)
class Truth:
    """What must be true of a batch.

    Attributes:
        rows, lengths: int64 (bs,), request rows and tokens each reads.
        anchors, chains: uint64 (bs,), the chain before the first token and behind the last one.
        started: indices of requests seen on their row for the first time.
    """

    rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    anchors: npt.NDArray[np.uint64]
    chains: npt.NDArray[np.uint64]
    started: list[int]


class Cohort:
    """A batch that goes on decoding together, as batches do nearly always: no row needs to be looked up."""

    def __init__(self, requests: Sequence[Request], truth: Truth) -> None:
        self.truth = truth
        self._requests = list(requests)
        self._rows: list[int] = truth.rows.tolist()
        self._next_lengths: list[int] = (truth.lengths + 1).tolist()
        self._retractions = [request.retraction_count for request in requests]
        prompts = [len(request.origin_input_ids) for request in requests]
        self._generated = [length - prompt for length, prompt in zip(truth.lengths.tolist(), prompts, strict=True)]
        self._ahead = 0
        self._most_ahead = POSITION_MASK - int(truth.lengths.max())
        self._scratch = np.empty(len(requests), dtype=np.uint64)

    @classmethod
    def form(cls, requests: Sequence[Request], truth: Truth) -> Cohort | None:
        """The cohort of a batch whose next tokens are all generated ones, else None."""
        if not requests or any(
            length < len(request.origin_input_ids) for request, length in zip(requests, truth.lengths, strict=True)
        ):
            return None
        return cls(requests, dataclasses.replace(truth, started=[]))

    def follows(self, requests: Sequence[Request], rows: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether this is the same batch one token later. Requests that were retracted and came back are not."""
        return (
            lengths == self._next_lengths
            and self._ahead < self._most_ahead
            and rows == self._rows
            and requests == self._requests
            and [request.retraction_count for request in requests] == self._retractions
        )

    def advance(self) -> Truth:
        """The truth one token later."""
        truth, ahead = self.truth, self._ahead
        try:
            tokens = [
                request.output_ids[index + ahead]
                for request, index in zip(self._requests, self._generated, strict=True)
            ]
        except IndexError:
            # Let the general way find out which request it is.
            tokens = [
                _token_at(request, length - 1)
                for request, length in zip(self._requests, self._next_lengths, strict=True)
            ]
        words = np.array(tokens, dtype=np.int64)
        words &= TOKEN_MASK
        words |= truth.lengths << POSITION_SHIFT
        truth.chains += mix_array_(words.view(np.uint64), self._scratch)
        truth.lengths += 1
        self._ahead = ahead + 1
        self._next_lengths = [length + 1 for length in self._next_lengths]
        return truth


class TruthTable:
    """One true prefix hash per request row, moved forward token by token."""

    def __init__(self, row_count: int, fingerprint: Sequence[tuple[str, str]]) -> None:
        self.identities = Identities(fingerprint)
        self._owners: list[weakref.ref[Request] | None] = [None] * row_count
        self._retractions = [0] * row_count  # a request that was retracted may come back to its row, and starts again
        self._lengths = np.zeros(row_count, dtype=np.int64)
        self._chains = np.zeros(row_count, dtype=np.uint64)
        self._anchors = np.zeros(row_count, dtype=np.uint64)
        self._anchor_of: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()
        self._cohort: Cohort | None = None

    def anchor_of(self, request: Request) -> int:
        """The chain before the first token of ``request``, unsigned: as it started, or as it would start now."""
        started = self._anchor_of.get(request)
        return self.identities.anchor_of(request) if started is None else started

    @property
    def is_generating(self) -> bool:
        """Whether all new tokens of the latest batch are generated ones; False if that is not known."""
        return self._cohort is not None

    def is_running(self, request: Request) -> bool:
        """Whether ``request`` has started."""
        return request in self._anchor_of

    def advance(
        self, requests: Sequence[Request], rows: Sequence[int], lengths: Sequence[int], *, is_even: bool = True
    ) -> Truth:
        """Bring each row to the hash of its first ``lengths[i]`` tokens.

        ``is_even``: a batch may go on with one token for each request at a time.
        """
        cohort = self._cohort
        if cohort is not None:
            if cohort.follows(requests, rows, lengths):
                return cohort.advance()
            self._chains[cohort.truth.rows] = cohort.truth.chains
            self._lengths[cohort.truth.rows] = cohort.truth.lengths
            self._cohort = None
        truth = self._advance_each(requests, rows, lengths)
        self._cohort = Cohort.form(requests, truth) if is_even else None
        return truth

    def _advance_each(self, requests: Sequence[Request], rows: Sequence[int], lengths: Sequence[int]) -> Truth:
        started = []
        next_rows, next_tokens = [], []
        several: list[tuple[int, int, int]] = []
        generated: list[int] = []
        owners, retractions, have_of = self._owners, self._retractions, self._lengths.item
        for index, (request, row, length) in enumerate(zip(requests, rows, lengths, strict=True)):
            owner, have = owners[row], have_of(row)
            is_known = owner is not None and owner() is request and retractions[row] == request.retraction_count
            if not is_known or have > length:
                started.append(index)
                self._restart(request, row)
                have = 0
            if length == have + 1 <= POSITION_MASK:
                next_rows.append(row)
                next_tokens.append(_token_at(request, have))
            elif length > have:
                first, count = have - len(request.origin_input_ids), length - have
                known = request.output_ids[first : first + count] if first >= 0 and count <= MAX_TOGETHER else ()
                if len(known) == count and length <= POSITION_MASK:
                    several.append((row, have, length))
                    generated += known
                else:
                    self._extend(request, row, have, length)
        if several:
            self._extend_together(several, generated)
        chosen = np.array(rows, dtype=np.int64)
        if next_rows:
            moved = chosen if len(next_rows) == len(rows) else np.array(next_rows)
            positions = self._lengths[moved]
            words = np.array(next_tokens) & TOKEN_MASK | positions << POSITION_SHIFT
            self._chains[moved] += mix_array_(words.view(np.uint64), np.empty(len(moved), dtype=np.uint64))
            self._lengths[moved] = positions + 1
        return Truth(chosen, self._lengths[chosen], self._anchors[chosen], self._chains[chosen], started)

    def _extend_together(self, several: list[tuple[int, int, int]], generated: list[int]) -> None:
        """:meth:`_extend` of rows, each from one length to another, by generated tokens only, a few for each."""
        rows, begins, ends = np.array(several, dtype=np.int64).T
        counts = ends - begins
        starts = np.cumsum(counts) - counts
        positions = np.arange(len(generated)) + np.repeat(begins - starts, counts)
        words = np.array(generated, dtype=np.int64) & TOKEN_MASK | positions << POSITION_SHIFT
        hashes = mix_array_(words.view(np.uint64), np.empty(len(words), dtype=np.uint64))
        self._chains[rows] += np.add.reduceat(hashes, starts)
        self._lengths[rows] = ends

    def _extend(self, request: Request, row: int, have: int, length: int) -> None:
        if length > POSITION_MASK:
            raise GuardError(
                f"request {request.rid!r:.100} has {length} tokens; a record holds positions up to {POSITION_MASK}"
            )
        hashes = hash_tokens(token_array(request, have, length), have)
        self._chains[row : row + 1] += hashes.sum(dtype=np.uint64)  # a slice wraps around, a numpy scalar would warn
        self._lengths[row] = length

    def _restart(self, request: Request, row: int) -> None:
        anchor = self._anchor_of[request] = self.identities.anchor_of(request)
        self._owners[row] = weakref.ref(request)
        self._retractions[row] = request.retraction_count
        self._lengths[row] = 0
        self._anchors[row] = self._chains[row] = np.uint64(anchor)
