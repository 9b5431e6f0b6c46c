"""From settings and an identity to an open store: names of files, which of them is ours, where the index is."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from ...display import escape_controls
from ...errors import ConfigError
from .errors import GeometryMismatch, InUse, NotAPageFile, PageFileError
from .geometry import Geometry
from .index import PageIndex
from .options import StorageOptions
from .page_file import PageFile
from .redis_index import RedisIndex
from .sqlite_index import SqliteIndex
from .store import Damage, PageStore

logger = logging.getLogger("kvcanary")

SUFFIX = ".kvpages"
MAX_WRITERS = 64  # processes of one identity on one host, such as the replicas of a data-parallel server


def open_store(
    options: StorageOptions,
    geometry: Geometry,
    pool_name: str,
    capacity_bytes: int,
    *,
    read_only: bool,
    on_damage: Callable[[list[Damage]], None],
) -> PageStore | None:
    """Open or make the page file of one pool of one rank, and its index.

    A file that another process of the same identity writes is left to it: the next number is tried. A read-only store
    is for the ranks of an MLA model that do not write; None if nobody has written yet.

    Raises:
        ConfigError: the folder, the file or the index cannot be used; says which and what to do.
    """
    folder = Path(options.path)
    try:
        if not read_only:
            folder.mkdir(parents=True, exist_ok=True)
        file = _open_file(options, folder, geometry, pool_name, capacity_bytes, read_only)
        if file is None:
            return None
        try:
            index = _open_index(options, file)
        except BaseException:
            file.close()
            raise
        try:
            return PageStore(
                file, index, open_other=lambda path: _open_other(options, geometry, path), on_damage=on_damage
            )
        except BaseException:
            file.close()
            index.close()
            raise
    except (PageFileError, OSError) as error:
        raise ConfigError(f"kvcanary: cannot use {str(folder)!r} for KV pages: {error}") from error


def name_files(options: StorageOptions, geometry: Geometry, pool_name: str) -> tuple[str, str]:
    """How the names of all page files of an identity begin, and those of this host's.

    For example ``qwen3-8b.kv.tp0of2.3f0c2a91d0b41c77.``; the hash stands for the whole identity. The host follows where
    several share the folder.
    """
    identity = dict(geometry.identity)
    model = re.sub(r"[^\w.-]+", "-", identity.get("model", "")).strip("-.")[-48:] or "model"
    rank = re.sub(r"(\d+)/(\d+)", r"tp\1of\2", identity.get("tp", "")) or "tp"
    begin = ".".join((model, pool_name, rank, geometry.digest.hex()[:16], ""))
    return begin, f"{begin}{options.host}." if options.is_shared else begin


def _open_file(
    options: StorageOptions, folder: Path, geometry: Geometry, pool_name: str, capacity_bytes: int, read_only: bool
) -> PageFile | None:
    begin, own = name_files(options, geometry, pool_name)
    if read_only:
        # Of several, any will do: where there are several the index says which one a page is in.
        paths = sorted(folder.glob(f"{begin}*{SUFFIX}"), key=lambda path: (not path.name.startswith(own), path.name))
    else:
        paths = [folder / f"{own}{number}{SUFFIX}" for number in range(MAX_WRITERS)]
    for path in paths:
        with contextlib.suppress(InUse) if path is not paths[-1] else contextlib.nullcontext():
            file = PageFile.open(
                path,
                geometry,
                capacity_bytes=capacity_bytes,
                client=options.client,
                o_direct=options.o_direct,
                threads=options.threads,
                check_threads=options.check_threads,
                read_only=read_only,
                create=not read_only,
                takeover=options.takeover,
            )
            size = f"{file.slot_count} pages of {file.payload_bytes} bytes"
            logger.info("kvcanary: KV of pool %s in %s: %s", pool_name, path, size)
            return file
    return None


def _open_other(options: StorageOptions, geometry: Geometry, path: str) -> PageFile | None:
    """Another process's page file; None if there is none of this geometry any more.

    The path is what an index says, and whoever may write there may say anything: only page files of the common folder
    are opened, under whatever name the other host has mounted it.

    Raises:
        PageFileError: it is no page file of the common folder.
    """
    name = os.path.basename(path)
    there = Path(options.path, name)
    is_elsewhere = os.path.dirname(path) != os.path.abspath(options.path) and not there.exists()
    if not name.endswith(SUFFIX) or is_elsewhere:
        raise PageFileError(f"the index names {escape_controls(path)[:200]!r}, which is not in {options.path}")
    if not there.exists():
        return None
    try:
        return PageFile.open(
            there,
            geometry,
            capacity_bytes=options.capacity_bytes,
            client=options.client,
            threads=options.threads,
            check_threads=options.check_threads,
            read_only=True,
            create=False,
        )
    except (GeometryMismatch, NotAPageFile):
        return None


def _open_index(options: StorageOptions, file: PageFile) -> PageIndex:
    uuid = file.uuid.hex()
    if options.uses_redis:
        path = os.path.abspath(file.path)
        return RedisIndex(str(options.index), uuid, path=path, namespace=options.namespace)
    if options.index:
        folder = Path(options.index)
    elif options.client == "usrbio":  # SQLite must not lie on a FUSE mount
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcanary" / "index"
    else:
        folder = Path(file.path).parent
    return SqliteIndex(folder / f"{Path(file.path).name.removesuffix(SUFFIX)}.index", uuid)
