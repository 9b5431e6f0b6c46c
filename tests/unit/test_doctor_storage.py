"""Folder, index and page files of the storage tier, as ``kvcanary doctor`` sees them: nothing is touched."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvcanary_plugin.doctor import redis as redis_module
from kvcanary_plugin.doctor import storage
from kvcanary_plugin.doctor.storage import examine_storage, file_system_of
from kvcanary_plugin.tiers.hf3fs.geometry import Geometry
from kvcanary_plugin.tiers.hf3fs.header import Header, describe_owner, write_header
from tests.storage.redis_server import RedisServer

GEOMETRY = Geometry((("model", "tiny"), ("tp", "0/1")), 20_000, 64)
SMALL = "capacity=1MiB"


def facts_of(section):
    return {fact.name: fact.value for fact in section.facts}


def texts_of(section, severity):
    return [problem.text for problem in section.problems if problem.severity == severity]


def make_page_file(path, *, opened=False, owner="{}"):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    write_header(fd, Header(GEOMETRY, 63, b"u" * 16, 7, opened=opened, owner=owner))
    os.close(fd)


@pytest.fixture
def page_file(tmp_path):
    path = tmp_path / "tiny.kv.tp0of1.0.kvpages"
    make_page_file(path)
    return path


@pytest.fixture
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def no_extension(monkeypatch):
    for name in ("hf3fs_fuse", "hf3fs_fuse.io"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("no_extension")
def test_a_folder_as_it_should_be(tmp_path):
    section = examine_storage(f"{tmp_path}?{SMALL}")
    facts = facts_of(section)

    assert section.problems == ()
    assert facts["folder"] == "exists, writable"
    assert facts["free"].endswith("GiB")
    assert facts["file system"] == file_system_of(tmp_path) is not None
    assert facts["hf3fs_fuse"] == "not installed, and not needed by client=local"
    assert "index" not in facts
    assert section.rows == ()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_would_be_made_is_not_made(tmp_path):
    section = examine_storage(f"{tmp_path}/a/b?{SMALL}")

    assert section.problems == ()
    assert facts_of(section)["folder"] == "missing, would be made, writable"
    assert list(tmp_path.iterdir()) == []


def test_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    section = examine_storage(f"{tmp_path}/file/kv?{SMALL}")

    assert texts_of(section, "error") == [f"{tmp_path}/file is no folder, so no page file can be made"]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    section = examine_storage(f"{tmp_path}?{SMALL}")

    assert texts_of(section, "error") == [f"{tmp_path} cannot be written by this user, so no page file can be made"]


def test_too_little_room_is_a_warning_unless_page_files_have_taken_it(tmp_path, page_file):
    section = examine_storage(f"{tmp_path}?capacity=999999T")
    assert "one page file grows to" in texts_of(section, "warning")[0]
    assert texts_of(section, "error") == []

    free = storage.shutil.disk_usage(tmp_path).free
    with open(page_file, "rb+") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    assert texts_of(examine_storage(f"{tmp_path}?capacity={free - (16 << 20)}"), "warning") == []


def test_a_folder_that_anybody_may_write_to_is_a_warning(tmp_path):
    tmp_path.chmod(0o1777)
    section = examine_storage(f"{tmp_path}?{SMALL}")
    assert texts_of(section, "warning") == [f"anybody may write to {tmp_path}, and so put pages there that verify"]

    tmp_path.chmod(0o770)
    assert examine_storage(f"{tmp_path}?{SMALL}").problems == ()


@pytest.mark.parametrize("setting", ["", "?capacity=1T", "/kv?what=redis://u:geheim@h"])
def test_a_setting_that_cannot_be_used(setting):
    section = examine_storage(setting)

    assert len(texts_of(section, "error")) == 1
    assert "geheim" not in str(section)


def test_the_nearest_mount_and_of_two_in_one_place_the_later_decides(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 8:2 / /mnt rw - xfs /dev/b rw\n"
        "3 2 0:9 / /mnt/3f\\040s rw shared:1 - fuse.hf3fs hf3fs.one rw\n"
        "4 1 8:2 / /mnt rw - btrfs /dev/c rw\n"
    )
    monkeypatch.setattr(storage, "MOUNTS", mounts)

    assert file_system_of(Path("/mnt/3f s/kv")) == "fuse.hf3fs"
    assert file_system_of(Path("/mnt/kv")) == "btrfs"
    assert file_system_of(Path("/mntx")) == "ext4"
    monkeypatch.setattr(storage, "MOUNTS", tmp_path / "none")
    assert file_system_of(Path("/mnt")) is None


@pytest.mark.usefixtures("no_extension")
def test_usrbio_needs_its_extension_and_a_mount(tmp_path, monkeypatch):
    section = examine_storage(f"{tmp_path}?{SMALL}&client=usrbio")
    not_mounted, no_extension = texts_of(section, "error")
    assert "not on 3FS" in not_mounted
    assert no_extension == "client=usrbio, but hf3fs_fuse cannot be imported"

    monkeypatch.setattr(storage, "file_system_of", lambda path: "fuse.hf3fs")
    for name in ("hf3fs_fuse", "hf3fs_fuse.io"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "storage" / "fakes"))
    section = examine_storage(f"{tmp_path}?{SMALL}&client=usrbio")
    assert section.problems == ()
    assert facts_of(section)["file system"] == "fuse.hf3fs (3FS)"
    assert facts_of(section)["hf3fs_fuse"] == "can be imported"


def test_an_index_folder(tmp_path, monkeypatch):
    assert examine_storage(f"{tmp_path}?{SMALL}&index={tmp_path}/index").problems == ()

    (tmp_path / "file").touch()
    section = examine_storage(f"{tmp_path}?{SMALL}&index={tmp_path}/file")
    assert texts_of(section, "error") == [f"the index cannot be made in {tmp_path}/file"]

    monkeypatch.setattr(storage, "file_system_of", lambda path: "nfs4")
    section = examine_storage(f"{tmp_path}?{SMALL}&index={tmp_path}")
    assert texts_of(section, "warning") == [f"{tmp_path} is on nfs4"]


def test_a_redis_that_answers(tmp_path, redis_server):
    section = examine_storage(f"{tmp_path}?{SMALL}&index={redis_server.url}")

    assert section.problems == ()
    assert "answers, version" in facts_of(section)["index"]


def test_a_redis_that_evicts_is_a_warning(tmp_path, redis_server):
    import redis

    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    section = examine_storage(f"{tmp_path}?{SMALL}&index={redis_server.url}")

    assert texts_of(section, "error") == []
    assert "evicts by allkeys-lru" in texts_of(section, "warning")[0]


def test_a_redis_that_is_gone_is_an_error_without_its_password(tmp_path, redis_server):
    redis_server.stop()
    url = redis_server.url.replace("//", "//me:geheim@")
    section = examine_storage(f"{tmp_path}?{SMALL}&index={url}")

    (text,) = texts_of(section, "error")
    assert text.startswith("no Redis answers at redis://***@127.0.0.1")
    assert "geheim" not in str(section)


def test_a_redis_that_never_answers_does_not_hold_doctor_up(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_module, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        section = examine_storage(f"{tmp_path}?{SMALL}&index=redis://127.0.0.1:{silent.getsockname()[1]}/0")

    assert "(TimeoutError)" in texts_of(section, "error")[0]


def test_a_redis_package_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    section = examine_storage(f"{tmp_path}?{SMALL}&index=redis://127.0.0.1:1/0")

    assert texts_of(section, "error") == ["an index at redis:// needs the Python package redis"]


@pytest.mark.parametrize(("version", "is_old"), [("4.0.9", True), ("7.0.15", False), ("unstable", False)])
def test_versions_of_redis(version, is_old):
    assert redis_module._is_older(version) == is_old


def test_page_files_are_described_and_left_as_they_are(tmp_path, page_file):
    before = page_file.stat(), page_file.read_bytes()
    section = examine_storage(f"{tmp_path}?{SMALL}")

    assert section.problems == ()
    (row,) = section.rows
    assert row == {"page file": page_file.name, "disk": "0.0 GiB", "state": "closed", "fsck": "possible"}
    assert (page_file.stat().st_mtime_ns, page_file.read_bytes()) == (before[0].st_mtime_ns, before[1])


def test_a_page_file_in_use_is_not_for_fsck(tmp_path, page_file):
    make_page_file(page_file, opened=True, owner=describe_owner())
    with open(page_file, "rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # what its writer holds does not stand in the way
        (row,) = examine_storage(f"{tmp_path}?{SMALL}").rows

    assert row["state"] == f"in use by process {os.getpid()} on {socket.gethostname()}"
    assert row["fsck"] == "no"


def test_a_page_file_whose_writer_is_gone_is(tmp_path, page_file):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    make_page_file(page_file, opened=True, owner=json.dumps(json.loads(describe_owner()) | {"pid": gone.pid}))
    (row,) = examine_storage(f"{tmp_path}?{SMALL}").rows

    assert row["state"].startswith(f"not closed by process {gone.pid}")
    assert row["fsck"] == "possible"


@pytest.mark.parametrize(
    "owner",
    [
        "{}",
        "[]",
        "no json",
        "[" * 4000,
        '{"host": "", "pid": 1e999}',
        json.dumps({"host": "other", "pid": 1, "boot": "x"}),
    ],
)
def test_a_page_file_of_another_host_or_an_unknown_writer_may_be_in_use(tmp_path, page_file, owner):
    make_page_file(page_file, opened=True, owner=owner)
    (row,) = examine_storage(f"{tmp_path}?{SMALL}").rows

    assert row["state"].startswith("in use by ")
    assert row["fsck"] == "no"


def test_what_only_looks_like_a_page_file(tmp_path, page_file):
    (tmp_path / "bad.kvpages").write_bytes(b"x" * 100_000)
    os.mkfifo(tmp_path / "pipe.kvpages")
    (tmp_path / "link.kvpages").symlink_to("/etc/hostname")
    (tmp_path / "folder.kvpages").mkdir()
    (tmp_path / "\x1b[31m.kvpages").write_bytes(b"")
    section = examine_storage(f"{tmp_path}?{SMALL}")

    assert {row["page file"]: row["fsck"] for row in section.rows} == {
        page_file.name: "possible",
        "bad.kvpages": "no",
        r"\x1b[31m.kvpages": "no",
    }
    assert len(texts_of(section, "warning")) == 2
    assert "\x1b" not in str(section.problems)


def test_a_hostile_owner_does_not_reach_the_terminal(tmp_path, page_file):
    make_page_file(page_file, opened=True, owner=json.dumps({"host": "\x1b]0;x\x07" * 20, "pid": 1, "boot": ""}))
    (row,) = examine_storage(f"{tmp_path}?{SMALL}").rows

    assert "\x1b" not in row["state"]
    assert len(row["state"]) < 100
