"""The digest of a stored page: xxh3_128 of its bytes, hashed once more together with what the page is.

A page that is whole but in the wrong place, of another key, version, geometry, file or life of the file does not
verify, since all of that goes into the second step. The digest finds accidents, not attackers. It was chosen by
measurement:
``benchmarks/tiers/page_file.py`` prints what each candidate costs a byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from .header import Header

DIGEST_BYTES = 16
MISSING = bytes(DIGEST_BYTES)


def digest_parts(parts: Sequence[memoryview]) -> bytes:
    """xxh3_128 of pieces of memory, one after the other."""
    if len(parts) == 1:
        return xxh3_128_digest(parts[0])
    state = xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


class PageDigest:
    """Digests of the pages of one life of one file: its uuid, salt and geometry seed them."""

    def __init__(self, header: Header) -> None:
        life = b"kvcanary page 1;" + header.uuid + header.salt.to_bytes(4, "little") + header.geometry.digest
        self._seed = xxh3_64_intdigest(life)

    def seal(self, records: NDArray[np.void], payload_digests: Sequence[bytes]) -> NDArray[np.uint64]:
        """What must stand in the ``digest`` of each record, as pairs of words, given the digest of its payload and GPU
        records. Of each record, key, generation, slot, geometry, salt and length count; state and CRC do not.
        """
        rows = records.copy()
        rows["digest"] = np.frombuffer(b"".join(payload_digests), "<u8").reshape(-1, 2)
        rows["state"] = rows["crc"] = 0
        size, seed, raw = rows.dtype.itemsize, self._seed, rows.tobytes()
        sealed = b"".join([xxh3_128_digest(raw[at : at + size], seed) for at in range(0, len(raw), size)])
        return np.frombuffer(sealed, "<u8").reshape(-1, 2)
