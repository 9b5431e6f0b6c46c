"""Page files, paths and a Redis that somebody else has written: refused or a miss, and never shown raw."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_files import GEOMETRY, abandon, fake, fetch_all, make_medium, patch, store
from redis_server import RedisServer
from stores import Damages, blank, key, open_store, page

from kvcanary_plugin.cli import main
from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.tiers.digest_store import SqliteDigests
from kvcanary_plugin.tiers.hf3fs import opening_store
from kvcanary_plugin.tiers.hf3fs.client import BLOCK_BYTES
from kvcanary_plugin.tiers.hf3fs.errors import NotAPageFile, PageFileError
from kvcanary_plugin.tiers.hf3fs.geometry import Geometry
from kvcanary_plugin.tiers.hf3fs.header import CRC, FIELDS, Header, decode_header
from kvcanary_plugin.tiers.hf3fs.layout import HEADER_OFFSETS
from kvcanary_plugin.tiers.hf3fs.options import StorageOptions
from kvcanary_plugin.tiers.hf3fs.page_file import PageFile
from kvcanary_plugin.tiers.hf3fs.sqlite_index import SqliteIndex
from kvcanary_plugin.tiers.hf3fs.store import PageStore

STEERING = "\x1b]0;owned\x07[/nothing][red]\r\n"
CAPACITY = 4 << 20


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server.url
    server.stop()


def sealed(block: bytes) -> bytes:
    """A block of a header whose CRC is right, as whoever forges one makes it."""
    block = block[: BLOCK_BYTES - CRC.size].ljust(BLOCK_BYTES - CRC.size, b"\0")
    return block + CRC.pack(zlib.crc32(block))


def forge_identity(text: str) -> bytes:
    """A whole header with any identity: its digest is made for it."""
    import xxhash

    encoded = text.encode("utf-8", "surrogatepass")
    sizes = f"{GEOMETRY.payload_bytes},{GEOMETRY.records_bytes};".encode()
    digest = xxhash.xxh3_128_digest(b"kvcanary geometry 1;" + sizes + encoded)
    numbers = (1, 1, GEOMETRY.payload_bytes, GEOMETRY.records_bytes, 63)
    fields = FIELDS.pack(b"KVCPAGES", 1, 0, 1, 0, b"u" * 16, 7, 0, *numbers, digest, len(encoded), 2)
    return sealed(fields + encoded + b"{}")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=BLOCK_BYTES), st.booleans())
def test_any_block_is_a_header_or_is_refused(noise: bytes, keeps_magic: bool):
    whole = Header(GEOMETRY, 63, b"u" * 16, 7).encode()
    block = sealed(whole[:16] + noise if keeps_magic else noise)
    with contextlib.suppress(NotAPageFile):
        decode_header(block)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, FIELDS.size + 200), st.binary(min_size=1, max_size=16))
def test_any_change_of_a_header_whose_crc_is_right_is_a_header_or_is_refused(offset: int, noise: bytes):
    whole = Header(GEOMETRY, 63, b"u" * 16, 7).encode()
    try:
        header = decode_header(sealed(whole[:offset] + noise + whole[offset + len(noise) :]))
    except NotAPageFile:
        return
    assert 0 < header.slot_count <= 2**31
    assert header.geometry.payload_bytes > 0


@pytest.mark.parametrize(
    "identity", ["[" * 3000, '{"a":' * 500, "[]", "1", '{"a": "\\ud800"}', '{"a": 1, "a": 2}', "{", "", '{"a": 1e999}']
)
def test_an_identity_that_is_none_is_refused(identity: str):
    with pytest.raises(NotAPageFile):
        decode_header(forge_identity(identity))


def test_an_honest_identity_is_taken():
    """The clean twin: what the forger above makes is refused for its identity and for nothing else."""
    assert decode_header(forge_identity(GEOMETRY.encoded_identity.decode())).geometry == GEOMETRY


def test_what_a_file_says_of_itself_is_printed_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "x.kvpages"
    geometry = Geometry((("model", STEERING),), 4096)
    PageFile.open(path, geometry, capacity_bytes=CAPACITY).close()

    assert main(["fsck", str(path), "--deep"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\x07" not in output
    assert r"\x1b]0;owned\x07[/nothing][red]\r\n" in output


def test_what_another_file_says_of_itself_is_not_logged_raw(tmp_path: Path):
    path = tmp_path / "x.kvpages"
    PageFile.open(path, Geometry((("model", STEERING),), 4096), capacity_bytes=CAPACITY).close()

    with pytest.raises(PageFileError) as refused:
        PageFile.open(path, Geometry((("model", "mine"),), 4096), capacity_bytes=CAPACITY)
    assert str(refused.value).isprintable()


def test_a_hostile_owner_in_the_header_of_a_file_in_use_is_not_logged_raw(tmp_path: Path):
    path = tmp_path / "x.kvpages"
    with PageFile.open(path, GEOMETRY, capacity_bytes=CAPACITY):
        for owner in (json.dumps({"host": STEERING * 50, "pid": 1}), "[" * 400, json.dumps({"host": 1, "pid": "x\n"})):
            block = Header(GEOMETRY, 63, b"u" * 16, 7, epoch=99, owner=owner).encode()
            for offset in HEADER_OFFSETS:
                patch(path, offset, block)
            with pytest.raises(PageFileError) as refused:
                PageFile.open(path, GEOMETRY, capacity_bytes=CAPACITY)
            assert str(refused.value).isprintable()
            assert len(str(refused.value)) < 400


def test_forged_records_with_right_crcs_serve_nothing(tmp_path: Path):
    """Whole by their CRC, about this file and slot, but of bytes that were never stored under that key."""
    from kvcanary_plugin.tiers.hf3fs.trailer import RECORD, encode_block, geometry_word, stamp_crcs

    fake.reset()
    medium = make_medium("local", tmp_path)
    with medium.open() as file:
        store(file, {0: 1, 1: 2})
        header = file._table.header
        before = fetch_all(file)
    assert set(before.values()) == {"ok"}
    import numpy as np

    forged = np.zeros(63, RECORD)
    generator = np.random.default_rng(1)
    for name in ("key", "digest", "generation"):
        forged[name] = generator.integers(1, 2**62, forged[name].shape)
    forged["slot"], forged["salt"], forged["state"] = np.arange(63), header.salt, 2
    forged["geometry"] = geometry_word(header)
    stamp_crcs(forged)
    for copy, offset in enumerate(header.layout.table_offsets):
        patch(medium.path, offset, encode_block(header, 0, copy, 2**40, forged.tobytes()))
    with medium.open() as file:
        found = fetch_all(file)
    assert len(found) > 2, "the records were not even looked at"
    assert "ok" not in found.values()


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "dangling link"])
@pytest.mark.parametrize("read_only", [True, False])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str, read_only: bool):
    path, victim = tmp_path / "x.kvpages", tmp_path / "victim"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        if kind == "link":
            victim.touch()
        path.symlink_to(victim)
    outcome: list[BaseException | PageFile] = []

    def open_it() -> None:
        try:
            outcome.append(PageFile.open(path, GEOMETRY, capacity_bytes=CAPACITY, read_only=read_only))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=open_it, daemon=True)  # a pipe must not be waited for
    thread.start()
    thread.join(20)
    assert len(outcome) == 1
    assert isinstance(outcome[0], PageFileError)
    assert not victim.exists() or victim.stat().st_size == 0
    assert main(["fsck", str(path)]) == 2


def options_for(folder: Path, redis_url: str, namespace: str) -> StorageOptions:
    return StorageOptions(str(folder), CAPACITY, index=redis_url, namespace=namespace, host="one")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "{folder}/../x.kvpages", "/dev/zero", "{outside}/x.kvpages", STEERING + ".kvpages", ""]
)
def test_a_path_out_of_the_folder_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for each in (folder, outside):
        each.mkdir()
    PageFile.open(outside / "x.kvpages", GEOMETRY, capacity_bytes=CAPACITY).close()
    PageFile.open(tmp_path / "x.kvpages", GEOMETRY, capacity_bytes=CAPACITY).close()
    monkeypatch.setattr(PageFile, "open", lambda *_, **__: pytest.fail("opened"))
    path = path.format(folder=folder, outside=outside)

    with pytest.raises(PageFileError, match="which is not in") as refused:
        opening_store._open_other(StorageOptions(str(folder)), GEOMETRY, path)
    assert str(refused.value).isprintable()


def test_a_path_in_the_folder_is_opened_under_any_mount_and_one_that_is_gone_is_none(tmp_path: Path):
    PageFile.open(tmp_path / "x.kvpages", GEOMETRY, capacity_bytes=CAPACITY).close()
    options = StorageOptions(str(tmp_path), CAPACITY)

    for path in (f"{tmp_path}/x.kvpages", "/another/mount/x.kvpages"):
        file = opening_store._open_other(options, GEOMETRY, path)
        assert file is not None
        file.close()
    assert opening_store._open_other(options, GEOMETRY, f"{tmp_path}/gone.kvpages") is None


def test_what_a_redis_says_is_not_believed(tmp_path: Path, redis_url: str):
    """Slots that do not exist, files that lie elsewhere, bytes that are no text: misses, and the store goes on."""
    import redis

    client = redis.Redis.from_url(redis_url)
    client.hset("kvcanary:{default}:files", b"\xff\xfe", b"\xff/etc/passwd")  # also met when a host attaches
    keys = [key(number) for number in range(4)]
    store_ = open_store(tmp_path, redis_url=redis_url, damages=(damages := Damages()))
    try:
        assert store_.set(keys, [page(number) for number in range(4)], []) == [True] * 4
        own, other = store_.file.uuid.hex(), "ab" * 16
        client.hset("kvcanary:{default}:files", other, "/etc/passwd")
        for number, text in enumerate(
            (f"C|{own}|3|1", f"C|{other}|0|1", "C|../../etc/passwd|0|1", "\x1b[31m\n|||"), start=0
        ):
            client.hset("kvcanary:{default}:pages", keys[number], text)
        targets = [blank() for _ in keys]
        verdicts = store_.get(keys, targets)
        assert not any(verdict.ok for verdict in verdicts)
        assert all(str(damage.place.file).isalnum() for damage in damages)

        fresh = [key(number) for number in range(10, 12)]
        assert store_.set(fresh, [page(10), page(11)], []) == [True, True]
        targets = [blank(), blank()]
        assert [verdict.ok for verdict in store_.get(fresh, targets)] == [True, True]
        assert torch.equal(targets[0][0], page(10)[0])
    finally:
        store_.close()
        client.flushall()
        client.close()


def test_a_slot_that_is_not_in_the_file_is_refused_and_nothing_is_written(tmp_path: Path, redis_url: str):
    import redis

    client = redis.Redis.from_url(redis_url)
    store_: PageStore = open_store(tmp_path, redis_url=redis_url)
    try:
        own = store_.file.uuid.hex()
        client.hset("kvcanary:{default}:pages", key(1), f"C|{own}|99999999999|1")
        target = blank()
        try:
            (verdict,) = store_.get([key(1)], [target])
            assert not verdict.ok
        except ValueError:  # the backend answers it with a miss, see test_backend
            pass
        assert torch.equal(target[0], blank()[0])
    finally:
        store_.close()
        client.flushall()
        client.close()


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes_in(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.is_file()}


@pytest.mark.usefixtures("open_umask")
def test_nobody_else_can_read_what_the_tier_writes(tmp_path: Path):
    fake.reset()
    medium = make_medium("local", tmp_path)
    file = medium.open()
    store(file, {0: 1})
    index = SqliteIndex(tmp_path / "x.index", "ab" * 16)
    index.attach(8, 1)
    digests = SqliteDigests(tmp_path / "digests.sqlite")
    try:
        modes = modes_in(tmp_path)
        assert {"x.index", "x.index-wal", "x.index-shm", "digests.sqlite", medium.path.name} <= set(modes)
        assert set(modes.values()) == {0o600}
    finally:
        index.close()
        digests.close()
        abandon(file)


@pytest.mark.parametrize("make", [lambda path: SqliteDigests(path), lambda path: SqliteIndex(path, "ab" * 16)])
def test_a_database_is_not_made_through_a_link(tmp_path: Path, make):
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(Exception, match="cannot") as refused:
        make(tmp_path / "link")

    assert isinstance(refused.value, ConfigError) or "index" in str(refused.value)
    assert not (tmp_path / "victim").exists()


def test_a_password_may_come_from_its_own_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory):
    import redis

    from kvcanary_plugin.tiers.hf3fs.redis_index import RedisIndex

    server = RedisServer(tmp_path_factory.mktemp("locked"))
    try:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "geheim")
        with pytest.raises(ConfigError, match="AuthenticationError"):
            RedisIndex(server.url, "ab" * 16)
        monkeypatch.setenv("KVCANARY_REDIS_PASSWORD", "geheim")
        RedisIndex(server.url, "ab" * 16).close()
    finally:
        server.stop()
