"""Prefixes that may not be reused, in terms that hold for every prefix cache: the chain hash at a position.

Nothing is removed from a cache. A request whose prefix passes a tainted point is given another extra key before it
looks for cached KV. SGLang keeps prefixes of different extra keys apart, whichever tree it uses, so the request finds
nothing that was computed behind the damage, stores what it computes under the new key, and finds that again next time.
What lies under the old key is never matched again, and the cache drops it like anything that is not used any more.

Two prefixes of the same chain are the same prefix but for a chance of 2^-64, and then one is computed once too often.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from .truth import Request, TruthTable, true_chains

MAX_TAINTS = 1024
_U64 = (1 << 64) - 1

Point = tuple[int, int]  # a position, and the chain there: unsigned, anchor included


class Taints:
    """The tainted points since the last flush, numbered in the order in which they were found.

    A request moves from one extra key to the next as long as its prefix, under the key it has, passes such a point.
    Every key names the number it comes from, and numbers only grow, so this ends.
    """

    def __init__(self, truth: TruthTable) -> None:
        self._truth = truth
        self._points: OrderedDict[Point, int] = OrderedDict()
        self._positions: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._chains: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._numbers: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._count = 0
        self._floor = 0

    def __len__(self) -> int:
        """Points that are looked for."""
        return len(self._points)

    @property
    def is_empty(self) -> bool:
        """Whether any cached prefix may be reused."""
        return not self._points and not self._floor

    def add(self, points: list[Point]) -> int:
        """Taint every prefix that passes one of ``points``. Returns how many were new."""
        fresh = [point for point in dict.fromkeys(points) if point not in self._points]
        for point in fresh:
            self._points[point] = self._next_number()
        if len(self._points) > MAX_TAINTS:
            self.disown_all()
            while len(self._points) > MAX_TAINTS // 2:  # covered by that for all but requests that hold KV already
                self._points.popitem(last=False)
        if fresh:
            self._positions = np.array([position for position, _ in self._points], dtype=np.int64)
            self._chains = np.array([chain & _U64 for _, chain in self._points], dtype=np.uint64)
            self._numbers = np.array(list(self._points.values()), dtype=np.int64)
        return len(fresh)

    def disown_all(self) -> None:
        """Taint everything cached so far: for damage that has no known place, or too many of them."""
        self._floor = self._next_number()

    def clear(self) -> None:
        """The cache was flushed: nothing that was tainted is left."""
        self._points.clear()
        self._positions, self._chains, self._numbers = self._positions[:0], self._chains[:0], self._numbers[:0]
        self._floor = 0

    def is_passed_by(self, request: Request) -> bool:
        """Whether the prefix of ``request``, under the extra key it has, passes a tainted point."""
        return bool(self._points) and self._find(self._truth.anchor_of(request), self._bare_chains(request)) > 0

    def admit(self, request: Request) -> bool:
        """Give ``request``, which holds no KV, an extra key under which nothing is tainted. Whether it changed."""
        before = request.extra_key
        if self._floor and _name(self._floor) not in (before or ""):
            request.extra_key = _name(self._floor) + (before or "")
        if self._points:
            bare = self._bare_chains(request)
            while number := self._find(self._truth.identities.anchor_of(request), bare):
                request.extra_key = _name(number) + (request.extra_key or "")
        return request.extra_key != before

    def _bare_chains(self, request: Request) -> npt.NDArray[np.uint64]:
        """Chains less the anchor, at the positions of ``request`` up to the last tainted one."""
        known = len(request.origin_input_ids) + len(request.output_ids)
        return true_chains(request, 0, min(int(self._positions.max()) + 1, known))

    def _find(self, anchor: int, bare: npt.NDArray[np.uint64]) -> int:
        within = np.flatnonzero(self._positions < len(bare))
        chains = bare[self._positions[within]] + np.uint64(anchor)
        return int(self._numbers[within][chains == self._chains[within]].max(initial=0))

    def _next_number(self) -> int:
        self._count += 1  # a flush does not reset it: keys of before and after must differ
        return self._count


def _name(number: int) -> str:
    """What is put ahead of an extra key. Ahead, because SGLang reads the LoRA adapter off its end."""
    return f"kvcanary-taint-{number}:"
