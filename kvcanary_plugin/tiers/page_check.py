"""Whether what a storage backend brought back is what was stored under that key."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from . import scope
from .digest_store import MAX_VERSIONS, DigestStore, DigestsUnavailableError, Version
from .finding import TierViolation, report
from .hf3fs.client import view_bytes
from .hf3fs.identity import make_page_key


class PageCheck:
    """Digests of one pool of one rank.

    Args:
        digests: where they are kept.
        identity: 16 bytes that stand for model, pool, rank and layout.
        pool, rank, place: for reports; ``place`` names the backend.
        is_exclusive: whether all who store in the backend keep their digests in the same place. If not, a page that
            does not fit may be somebody else's version of it: it is not served, but nor is it called damaged.

    Attributes:
        counts: pages by outcome: ``stored``, ``verified``, ``damaged``, ``unknown``, ``unverified``.
    """

    def __init__(
        self, digests: DigestStore, identity: bytes, *, pool: str, rank: int, place: str, is_exclusive: bool
    ) -> None:
        self._digests, self._identity = digests, identity
        self._pool, self._rank, self._place, self._is_exclusive = pool, rank, place, is_exclusive
        self.counts: Counter[str] = Counter()

    def note(self, keys: Sequence[str], pages: Sequence[Sequence[Any]], is_new: Callable[[str], bool]) -> None:
        """Pages are about to be stored. ``is_new`` tells whether the backend does not have a key yet.

        Raises:
            DigestsUnavailableError: the digests cannot be kept; then nothing may be stored either.
        """
        names = self._name(keys)
        known = self._digests.find(names)
        now = _hash_scope()
        versions = []
        for key, name, pieces in zip(keys, names, pages, strict=True):
            versions_before = known[name]
            if len(versions_before) >= MAX_VERSIONS:
                continue
            # What was there before us has bytes that nobody here has seen.
            is_certain = all(v.is_certain for v in versions_before) if versions_before else is_new(key)
            versions.append(Version(name, now, digest_of(pieces), is_certain and self._is_exclusive))
        self._digests.add(versions)
        self.counts["stored"] += len(versions)

    def knows(self, keys: Sequence[str]) -> list[bool]:
        """Which pages could be verified if they came back."""
        known = self._digests.find(names := self._name(keys))
        return [bool(known[name]) for name in names]

    def verify(self, keys: Sequence[str], pages: Sequence[Sequence[Any] | None]) -> list[bool]:
        """Which of the pages that came back may be used. None: it did not come back. Reports damage."""
        try:
            names = self._name(keys)
            known = self._digests.find(names)
        except DigestsUnavailableError:
            self.counts["unknown"] += len(keys)
            return [False] * len(keys)
        verified: list[bool] = []
        damages: list[TierViolation] = []
        proven: list[Version] = []
        for key, name, pieces in zip(keys, names, pages, strict=True):
            outcome = None if pieces is None else self._judge(known[name], digest_of(pieces), proven)
            verified.append(outcome == "verified")
            if outcome is not None:
                self.counts["damaged" if outcome in ("digest", "scope") else outcome] += 1
            if outcome in ("digest", "scope"):
                damages.append(TierViolation(outcome, self._pool, self._rank, key, self._place))
        if proven:
            with contextlib.suppress(DigestsUnavailableError):
                self._digests.add(proven)
        report(damages)
        return verified

    def _judge(self, versions: list[Version], digest: bytes, proven: list[Version]) -> str:
        now = _hash_scope()
        if not versions:
            return "unknown"
        if any(v.digest == digest and v.scope == now for v in versions):
            if self._is_exclusive:  # so it is one of ours that is stored, and only ours can follow
                proven += [dataclasses.replace(v, is_certain=True) for v in versions if not v.is_certain]
            return "verified"
        if any(v.digest == digest for v in versions):
            return "scope"
        is_damage = len(versions) < MAX_VERSIONS and all(v.is_certain for v in versions)
        return "digest" if is_damage else "unverified"

    def _name(self, keys: Sequence[str]) -> list[bytes]:
        return [make_page_key(self._identity, "", key) for key in keys]


def digest_of(pieces: Sequence[Any]) -> bytes:
    """128 bits over the bytes of a page."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(view_bytes(piece))
    return digest.digest()


def _hash_scope() -> bytes:
    return hashlib.blake2b(scope.current().encode(), digest_size=16).digest()
