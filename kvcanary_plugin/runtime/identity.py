"""What KV was made for: tagged fields that partition whole prefixes, and the anchor of a chain that stands for them.

KV is the same only for one model, one version of its weights, one dtype and layout, one LoRA adapter, one cache salt
and extra key. A record made under another of these continues another anchor, so its chain is off by exactly the
difference of the two anchors: that is how reuse across identities is told from damage, and what differs is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import xxhash

MAX_REMEMBERED = 16384
MAX_KEY_LENGTH = 256

Identity = tuple[tuple[str, str], ...]
Difference = tuple[str, str, str]  # tag, expected, found


def make_anchor(fields: Sequence[tuple[str, str]]) -> int:
    """Hash of tagged identity fields, unsigned 64 bit. Tags and lengths keep neighbouring fields apart."""
    parts = [f"{len(tag)}:{tag}={len(value)}:{value};" for tag, value in fields]
    # A client may send lone surrogates in a key, which strict encoding refuses.
    return xxhash.xxh3_64_intdigest("".join(parts).encode("utf-8", "surrogatepass"))


def conceal(key: str | None) -> str:
    """What stands for a client's key wherever it is shown: salts keep tenants apart only while nobody else has them."""
    if not key:
        return ""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def compare(expected: Identity, found: Identity) -> tuple[Difference, ...]:
    """The fields in which two identities differ."""
    there, here = dict(found), dict(expected)
    tags = [tag for tag, _ in expected] + [tag for tag, _ in found if tag not in here]
    return tuple(
        (tag, here.get(tag, ""), there.get(tag, "")) for tag in tags if here.get(tag, "") != there.get(tag, "")
    )


class Identities:
    """Anchors by identity, and back.

    Attributes:
        weights: the version of the weights in force; part of every identity made from now on.
    """

    def __init__(self, fingerprint: Sequence[tuple[str, str]], weights: str = "0") -> None:
        self._fingerprint = tuple(fingerprint)
        self.weights = weights
        self._anchors: dict[tuple[Any, ...], int] = {}
        self._identities: dict[int, Identity] = {}

    def replace_weights(self, version: str) -> None:
        """The weights were updated: KV made so far belongs to another identity than KV made from now on."""
        self.weights = version
        self._anchors.clear()

    def anchor_of(self, request: Any) -> int:
        """The chain before the first token of ``request`` if it starts now, unsigned."""
        # SGLang puts the adapter, and in older releases the salt, into the extra key as well.
        key = request.extra_key, getattr(request, "lora_id", None), getattr(request, "cache_salt", None)
        anchor = self._anchors.get(key)
        if anchor is not None:
            return anchor
        extra_key, adapter, salt = (part or "" for part in key)
        lasting = (*self._fingerprint, ("weights", self.weights))
        anchor = make_anchor((*lasting, ("extra_key", extra_key), ("lora", adapter), ("cache_salt", salt)))
        identity = (
            *lasting,
            ("extra_key", conceal(extra_key)),
            ("lora", adapter),
            ("cache_salt", conceal(salt)),
        )
        # Clients choose keys: remember short ones only, and forget rather than grow.
        if all(part is None or len(part) <= MAX_KEY_LENGTH for part in key):
            if len(self._anchors) >= MAX_REMEMBERED:
                self._anchors.clear()
            self._anchors[key] = anchor
            self._identities.pop(anchor, None)
            self._identities[anchor] = identity
            if len(self._identities) > MAX_REMEMBERED:
                del self._identities[next(iter(self._identities))]
        return anchor

    def compare(self, expected: int, found: int) -> tuple[Difference, ...] | None:
        """The fields in which the identities behind two anchors differ, None if one of them is not known."""
        if expected == found or expected not in self._identities or found not in self._identities:
            return None
        return compare(self._identities[expected], self._identities[found])
