"""What the pages of one file have in common: size, and everything that a page must match before it may be served."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import xxhash

MAX_IDENTITY_BYTES = 3072  # it is stored in the 4 KiB header, so that a mismatch can be named
MAX_PAYLOAD_BYTES = 2**31


@dataclass(frozen=True)
class Geometry:
    """The geometry record of a page file.

    ``identity`` is what makes a page usable: model, dtype, memory layout, tokens a page, ranks and so on, as pairs of
    name and value; order does not matter. ``payload_bytes`` is the size of every page. ``records_bytes`` is the most
    that the records made on the GPU take for one page (0: none are stored). Raises ``ValueError`` on a size out of
    range, a repeated name, or an identity of more than 3072 bytes.
    """

    identity: tuple[tuple[str, str], ...]
    payload_bytes: int
    records_bytes: int = 0

    def __post_init__(self) -> None:
        pairs = tuple(sorted((str(name), str(value)) for name, value in self.identity))
        object.__setattr__(self, "identity", pairs)
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"identity names {repeated} more than once; give each name one value")
        if not 0 < self.payload_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"payload_bytes={self.payload_bytes} is not in 1..{MAX_PAYLOAD_BYTES}")
        if not 0 <= self.records_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"records_bytes={self.records_bytes} is not in 0..{MAX_PAYLOAD_BYTES}")
        if len(self.encoded_identity) > MAX_IDENTITY_BYTES:
            raise ValueError(
                f"the identity takes {len(self.encoded_identity)} bytes, at most {MAX_IDENTITY_BYTES} fit into the "
                "header; store a hash of its longest value instead"
            )

    @cached_property
    def encoded_identity(self) -> bytes:
        """The identity as it is stored: JSON with sorted names."""
        return json.dumps(dict(self.identity), sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for the geometry wherever a page or a key is hashed."""
        sizes = f"{self.payload_bytes},{self.records_bytes};".encode()
        return xxhash.xxh3_128_digest(b"kvcanary geometry 1;" + sizes + self.encoded_identity)

    @classmethod
    def decode(cls, encoded_identity: bytes, payload_bytes: int, records_bytes: int) -> Geometry:
        """The inverse of ``encoded_identity``; raises ``ValueError`` if it is not one."""
        try:
            pairs = json.loads(encoded_identity)
        except RecursionError as error:
            raise ValueError("the identity is nested too deeply") from error
        if not isinstance(pairs, dict):
            raise ValueError("the identity is not a JSON object")
        return cls(tuple(pairs.items()), payload_bytes, records_bytes)

    def differences(self, other: Geometry) -> list[str]:
        """Every field in which the other geometry differs, as ``name: mine, not theirs``."""
        mine = dict(self.identity) | {"payload_bytes": self.payload_bytes, "records_bytes": self.records_bytes}
        theirs = dict(other.identity) | {"payload_bytes": other.payload_bytes, "records_bytes": other.records_bytes}
        return [
            f"{name}: {mine.get(name, 'nothing')}, not {theirs.get(name, 'nothing')}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]
