"""The header of a page file: which file it is, what is in it and who has it open. Two equal copies, each with a CRC."""

from __future__ import annotations

import json
import os
import socket
import struct
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .client import BLOCK_BYTES
from .errors import NotAPageFile
from .geometry import Geometry
from .layout import HEADER_OFFSETS, MAX_SLOTS, Layout

MAGIC = b"KVCPAGES"
FORMAT_VERSION = 1
XXH3_128 = 1  # the one digest algorithm of this version
OPENED = 1  # flag: a writer has opened the file and not closed it
# magic, version, flags, digest algorithm, 0, uuid, salt, 0, epoch, revision, payload, records, slots, geometry digest,
# bytes of identity and owner
FIELDS = struct.Struct("<8sHHHH16sIIQQQQQ16sII")
CRC = struct.Struct("<I")


@dataclass(frozen=True)
class Header:
    """``epoch`` counts openings for writing, ``revision`` all writes of the header; ``salt`` changes when all pages are
    dropped at once. ``owner`` describes the process that opened the file last.
    """

    geometry: Geometry
    slot_count: int
    uuid: bytes
    salt: int
    epoch: int = 1
    revision: int = 1
    opened: bool = False
    owner: str = "{}"

    @cached_property
    def layout(self) -> Layout:
        """Where things lie in the file."""
        return Layout(self.geometry.payload_bytes, self.geometry.records_bytes, self.slot_count)

    def encode(self) -> bytes:
        """The block of 4 KiB."""
        identity, owner = self.geometry.encoded_identity, self.owner.encode()[:512]
        fields = FIELDS.pack(
            *(MAGIC, FORMAT_VERSION, OPENED if self.opened else 0, XXH3_128, 0, self.uuid, self.salt, 0),
            *(self.epoch, self.revision, self.geometry.payload_bytes, self.geometry.records_bytes, self.slot_count),
            *(self.geometry.digest, len(identity), len(owner)),
        )
        block = (fields + identity + owner).ljust(BLOCK_BYTES - CRC.size, b"\0")
        return block + CRC.pack(zlib.crc32(block))

    def next(self, **changes: object) -> Header:
        """The header as it will be written next."""
        return replace(self, revision=self.revision + 1, **changes)  # type: ignore[arg-type]


def describe_owner() -> str:
    """This process, for whoever finds the file in use."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return json.dumps(
        {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": boot.read_text().strip() if boot.exists() else "",
        }
    )


def decode_header(block: bytes) -> Header:
    """Parse one copy. Raises ``NotAPageFile`` with what is wrong with it."""
    if len(block) < BLOCK_BYTES or block[: len(MAGIC)] != MAGIC:
        raise NotAPageFile("it does not start like a page file")
    if CRC.unpack(block[-CRC.size :])[0] != zlib.crc32(block[: -CRC.size]):
        raise NotAPageFile("the CRC of the header does not fit")
    (_, version, flags, algorithm, _, uuid, salt, _, *numbers, digest, identity_bytes, owner_bytes) = (
        FIELDS.unpack_from(block)
    )
    epoch, revision, payload_bytes, records_bytes, slot_count = numbers
    if version != FORMAT_VERSION or algorithm != XXH3_128 or flags & ~OPENED:
        raise NotAPageFile(
            f"it has format version {version}, digest {algorithm} and flags {flags:#x}; this kvcanary reads version "
            f"{FORMAT_VERSION} with digest {XXH3_128}"
        )
    rest = block[FIELDS.size :]
    try:
        geometry = Geometry.decode(rest[:identity_bytes], payload_bytes, records_bytes)
        owner = rest[identity_bytes : identity_bytes + owner_bytes].decode()
    except ValueError as error:
        raise NotAPageFile(f"the identity in the header cannot be read: {error}") from error
    if geometry.digest != digest or not 0 < slot_count <= MAX_SLOTS:
        raise NotAPageFile("the fields of the header contradict each other")
    return Header(geometry, slot_count, uuid, salt, epoch, revision, bool(flags & OPENED), owner)


def read_header(fd: int, path: str) -> tuple[Header, list[str]]:
    """The newest valid copy, and what is wrong with the other one. Raises ``NotAPageFile`` if there is none."""
    copies: list[Header] = []
    faults: list[str] = []
    for name, offset in zip("AB", HEADER_OFFSETS, strict=True):
        try:
            copies.append(decode_header(os.pread(fd, BLOCK_BYTES, offset)))
        except NotAPageFile as error:
            faults.append(f"header copy {name}: {error}")
    if not copies:
        raise NotAPageFile(
            f"{path} is not a page file ({'; '.join(faults)}): give another path, or remove the file if nobody needs it"
        )
    newest = max(copies, key=lambda header: (header.epoch, header.revision))
    if not faults and copies[0] != copies[1]:
        stale = "A" if newest is copies[1] else "B"
        if copies[0].uuid != copies[1].uuid:
            faults.append(f"header copy {stale} belongs to another file")
        # Otherwise the writer was killed between the two copies, and the older one says nothing else of weight.
    return newest, faults


def write_header(fd: int, header: Header) -> None:
    """Write both copies, one after the other, so that one of them is whole at any time. Raises ``OSError``."""
    block = header.encode()
    for offset in HEADER_OFFSETS:
        if os.pwrite(fd, block, offset) != len(block):
            raise OSError(f"the header at {offset} was written only in part")
