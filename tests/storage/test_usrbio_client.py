"""3FS's user-space I/O: what only it can do wrong, on the fake, and on a real mount if there is one."""

from __future__ import annotations

import errno
import os
import sys
import time
import types
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from page_files import TIMEOUT_SECONDS, fake, fetch_all, make_medium, store

from kvcanary_plugin.tiers.hf3fs import usrbio
from kvcanary_plugin.tiers.hf3fs.errors import PageFileError
from kvcanary_plugin.tiers.hf3fs.usrbio import MAX_RETIRED, UsrbioClient

PAGE, PAGES = 4096, 16


@pytest.fixture
def client(tmp_path: Path) -> Iterator[UsrbioClient]:
    fake.reset()
    path = make_medium("usrbio", tmp_path).path
    client = UsrbioClient(path, PAGE * PAGES, PAGE, 4, timeout_seconds=TIMEOUT_SECONDS)
    assert client.batch_write([0, PAGE, 2 * PAGE, 3 * PAGE], [page(n) for n in (1, 2, 3, 4)]) == [PAGE] * 4
    yield client
    client.close()
    fake.reset()


def page(number: int) -> torch.Tensor:
    return torch.full((PAGE,), number, dtype=torch.uint8)


def read(client: Any, *numbers: int) -> tuple[list[int], list[int]]:
    """Results, and the first byte of each page (every page must be of one byte)."""
    targets = [page(0xEE) for _ in numbers]
    results = client.batch_read([n * PAGE for n in numbers], targets)
    assert all((target == target[0]).all() for target in targets)
    return results, [int(target[0]) for target in targets]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


def test_late_answers_do_not_reach_the_next_batch(client: UsrbioClient):
    fake.inject("late", read=True, count=2, seconds=1.5 * TIMEOUT_SECONDS)
    assert read(client, 0, 1) == ([-errno.ETIMEDOUT] * 2, [0xEE, 0xEE])
    until = time.monotonic() + 2 * TIMEOUT_SECONDS
    while time.monotonic() < until:
        assert read(client, 2, 3) == ([PAGE] * 2, [3, 4])


def test_one_late_answer_does_not_spoil_the_others(client: UsrbioClient):
    fake.inject("reorder")
    fake.inject("late", read=True, offset=PAGE, seconds=2 * TIMEOUT_SECONDS)
    assert read(client, 0, 1, 2) == ([PAGE, -errno.ETIMEDOUT, PAGE], [1, 0xEE, 3])


def test_a_late_write_does_not_land_on_a_newer_one(client: UsrbioClient):
    fake.inject("late", read=False, offset=0, seconds=2 * TIMEOUT_SECONDS)
    assert client.batch_write([0], [page(7)]) == [-errno.ETIMEDOUT]
    assert client.batch_write([0, PAGE], [page(8), page(9)]) == [-errno.EBUSY, PAGE]
    time.sleep(2.5 * TIMEOUT_SECONDS)
    assert client.batch_write([0], [page(8)]) == [PAGE]
    assert read(client, 0, 1) == ([PAGE] * 2, [8, 9])


def test_what_is_given_up_is_freed_once_the_daemon_has_answered(tmp_path: Path):
    fake.reset()
    medium = make_medium("usrbio", tmp_path)
    links, before = medium.folder / "3fs-virt" / "iovs", shared_memory()
    client = UsrbioClient(medium.path, PAGE * PAGES, PAGE, 4, timeout_seconds=0.05)
    assert shared_memory() == before  # unlinked as soon as it is known to the daemon
    assert len(list(links.iterdir())) == 2
    fake.inject("never", read=True, count=3)
    for _ in range(3):
        read(client, 0)
    assert len(list(links.iterdir())) == 1 + 3
    fake.release()
    read(client, 0)
    assert len(list(links.iterdir())) == 2
    client.close()
    assert list(links.iterdir()) == []


def test_a_daemon_that_never_answers_does_not_eat_the_memory(client: UsrbioClient):
    client._owners[0]._timeout_seconds = 0.01
    fake.inject("never", read=True, count=-1)
    answers = [read(client, 0)[0][0] for _ in range(MAX_RETIRED + 3)]
    assert answers == [-errno.ETIMEDOUT] * MAX_RETIRED + [-errno.ENOBUFS] * 3
    leaked = len(usrbio.LEAKED)
    fake.reset()
    assert read(client, 0) == ([PAGE], [1])
    client.close()
    assert len(usrbio.LEAKED) == leaked


def test_memory_that_the_daemon_may_still_use_is_kept(client: UsrbioClient):
    fake.inject("never", read=True)
    read(client, 0)
    before = len(usrbio.LEAKED)
    client.close()
    assert len(usrbio.LEAKED) == before + 1
    assert usrbio.LEAKED[-1]._memory.buf is not None
    fake.release()
    assert usrbio.LEAKED.pop().drain()


def test_a_broken_ring_fails_its_batch_and_is_replaced(client: UsrbioClient, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(fake.ioring, "wait", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EPIPE, "broken")))
        assert read(client, 0)[0] == [-errno.EPIPE]
    assert read(client, 0) == ([PAGE], [1])


def test_an_unexpected_error_in_the_owner_fails_the_batch(client: UsrbioClient, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(fake.ioring, "submit", lambda _: 1 / 0)
        assert read(client, 0, 1)[0] == [-errno.EIO] * 2
    assert read(client, 0) == ([PAGE], [1])


def test_a_request_that_cannot_be_prepared_fails_alone(client: UsrbioClient, monkeypatch: pytest.MonkeyPatch):
    prepare = fake.ioring.prepare

    def failing(self: Any, piece: Any, for_read: bool, fd: int, off: int) -> Any:
        if off == PAGE:
            raise OSError(errno.EAGAIN, "the ring is full")
        return prepare(self, piece, for_read, fd, off)

    monkeypatch.setattr(fake.ioring, "prepare", failing)
    assert read(client, 0, 1, 2) == ([PAGE, -errno.EAGAIN, PAGE], [1, 0xEE, 3])


def test_an_answer_that_is_longer_than_the_request_is_an_error(client: UsrbioClient, monkeypatch: pytest.MonkeyPatch):
    complete = fake.ioring._complete
    monkeypatch.setattr(
        fake.ioring, "_complete", lambda self, request, result, twice: complete(self, request, result + 1)
    )
    assert read(client, 0)[0] == [-errno.EIO]


def test_without_the_package_the_error_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", None)
    with pytest.raises(PageFileError, match=r"needs the Python package hf3fs_fuse.*build hf3fs_py_usrbio"):
        UsrbioClient(make_medium("usrbio", tmp_path).path, PAGE, PAGE)
    assert not (tmp_path / "pages").exists()


def test_a_path_that_is_not_on_3fs_is_named(tmp_path: Path):
    with pytest.raises(PageFileError, match="not on a 3FS mount: use the local client"):
        UsrbioClient(tmp_path / "pages", PAGE, PAGE)


# -- the client of SGLang on the same fake: it shows that the fake can tell right from wrong ---------------------------


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's own client. Its C++ extension only copies between tensors and shared memory."""

    def read_shm(memory: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        start = 0
        for tensor in tensors:
            tensor.copy_(memory[start : start + tensor.nbytes])
            start += tensor.nbytes

    def write_shm(tensors: list[torch.Tensor], memory: torch.Tensor) -> None:
        start = 0
        for tensor in tensors:
            memory[start : start + tensor.nbytes] = tensor
            start += tensor.nbytes

    extension = types.SimpleNamespace(read_shm=read_shm, write_shm=write_shm)
    monkeypatch.setattr("torch.utils.cpp_extension.load", lambda **_: extension)
    name = "sglang.srt.mem_cache.storage.hf3fs.hf3fs_usrbio_client"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = pytest.importorskip(name)
    fake.reset()
    path = str(make_medium("usrbio", tmp_path).path)
    client = module.Hf3fsUsrBioClient(path, PAGE * PAGES, PAGE, 4, TIMEOUT_SECONDS)
    assert client.batch_write([0, PAGE, 2 * PAGE, 3 * PAGE], [page(n) for n in (1, 2, 3, 4)]) == [PAGE] * 4
    yield client
    client.shm_r_tensor = client.shm_w_tensor = None
    client.close()
    fake.reset()
    sys.modules.pop(name, None)


def test_the_client_of_sglang_reads_what_it_wrote(stock: Any):
    assert read(stock, 2, 1, 0) == ([PAGE] * 3, [3, 2, 1])


def test_the_client_of_sglang_serves_the_wrong_page_on_reordered_completions(stock: Any):
    read(stock, 0, 1, 2)
    fake.inject("reorder")
    fake.inject("fail", read=True, offset=3 * PAGE, value=errno.EIO)
    results, found = read(stock, 3, 2, 1)
    assert results == [PAGE, PAGE, -errno.EIO]  # page 3 failed and is called good
    assert found[0] == 1  # what it holds is page 0


def test_the_client_of_sglang_serves_the_pages_of_a_batch_that_timed_out(stock: Any):
    fake.inject("late", read=True, count=2, seconds=1.2 * TIMEOUT_SECONDS)
    assert read(stock, 0, 1)[0] == []
    fake.inject("late", read=True, count=2, seconds=0.5 * TIMEOUT_SECONDS)
    assert read(stock, 2, 3) == ([PAGE] * 2, [1, 2])


# -- a real mount ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("HF3FS_MOUNT" not in os.environ, reason="set HF3FS_MOUNT to a folder on a 3FS mount")
def test_a_real_mount(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "hf3fs_fuse"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("fakes")])
    folder = Path(os.environ["HF3FS_MOUNT"])
    medium = make_medium_on(folder)
    try:
        with medium.open(client=partial(UsrbioClient, timeout_seconds=120)) as file:
            pages = {slot: slot + 1 for slot in range(150)}
            assert None not in store(file, pages)
            assert fetch_all(file) == dict.fromkeys(pages.values(), "ok")
        with medium.open(client="local") as file:
            assert fetch_all(file) == dict.fromkeys(pages.values(), "ok")
    finally:
        medium.path.unlink(missing_ok=True)
        medium.folder.rmdir()


def make_medium_on(folder: Path) -> Any:
    from page_files import Medium

    own = folder / f"kvcanary-{uuid.uuid4()}"
    own.mkdir()
    return Medium("usrbio", own)
