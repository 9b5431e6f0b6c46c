"""The clients as they stand: what is refused, that a refusal changes nothing, and that answers are by request."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from page_files import TIMEOUT_SECONDS, FaultyLocalClient, fake, make_medium

from kvcanary_plugin.tiers.hf3fs.client import Client
from kvcanary_plugin.tiers.hf3fs.local import PIECE_BYTES, SCRAP_BYTES, LocalClient, plan_pieces, skip_bytes
from kvcanary_plugin.tiers.hf3fs.usrbio import UsrbioClient

PAGE, PAGES = 4096, 16


@pytest.fixture(params=["local", "usrbio"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    fake.reset()
    path = make_medium("usrbio", tmp_path).path
    if request.param == "usrbio":
        made: Client = UsrbioClient(path, PAGE * PAGES, PAGE, 8, timeout_seconds=TIMEOUT_SECONDS)
    else:
        made = FaultyLocalClient(path, PAGE * PAGES, PAGE, 8)
    made.path = path
    yield made
    made.close()
    fake.reset()


def page(number: int, size: int = PAGE) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.uint8)


def fill(client: Client) -> None:
    for first in range(0, PAGES, 8):
        numbers = range(first, first + 8)
        assert client.batch_write([n * PAGE for n in numbers], [page(n + 1) for n in numbers]) == [PAGE] * 8


def test_what_is_written_is_read(client: Client):
    fill(client)
    order = [3, 0, 15, 7, 8]
    targets = [torch.zeros(PAGE // 2, dtype=torch.bfloat16) for _ in order]
    assert client.batch_read([n * PAGE for n in order], targets) == [PAGE] * 5
    assert [int(t.view(torch.uint8)[0]) for t in targets] == [n + 1 for n in order]
    assert all((t.view(torch.uint8) == t.view(torch.uint8)[0]).all() for t in targets)
    client.flush()


REFUSED = {
    "one offset outside among good ones": ([0, PAGE * PAGES], [PAGE, PAGE], "entry 1 .*outside the file of 65536"),
    "negative offset": ([0, -PAGE], [PAGE, PAGE], "entry 1 .*outside"),
    "ends outside": ([PAGE * (PAGES - 1) + 1], [PAGE], "entry 0 .*outside"),
    "one page too large among good ones": ([0, PAGE], [PAGE, PAGE + 1], "entry 1 .*larger than a page of 4096"),
    "not page-aligned": ([0, PAGE, 100], [PAGE, PAGE, 10], "entry 2 .*multiple of the page size of 4096"),
    "more offsets than tensors": ([0, PAGE, 2 * PAGE], [PAGE, PAGE], "entry 2 has no tensor"),
    "more tensors than offsets": ([0], [PAGE, PAGE], "entry 1 has no offset"),
    "too many entries": ([0] * 9, [PAGE] * 9, "entry 8 .*8 entries of a batch"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("direction", ["batch_read", "batch_write"])
def test_refusal_changes_nothing_and_the_client_stays_usable(client: Client, case: str, direction: str):
    offsets, sizes, why = REFUSED[case]
    fill(client)
    before = client.path.read_bytes()
    tensors = [page(99, size) for size in sizes]
    with pytest.raises(ValueError, match=why) as refusal:
        getattr(client, direction)(offsets, tensors)
    assert str(refusal.value).startswith(f"Hf3fsClient.check: offsets={offsets}, sizes={sizes}")
    assert client.path.read_bytes() == before
    assert all((tensor == 99).all() for tensor in tensors)
    target = page(0)
    assert client.batch_read([PAGE], [target]) == [PAGE]
    assert (target == 2).all()


def test_memory_that_is_not_contiguous_is_refused(client: Client):
    with pytest.raises(ValueError, match=r"Hf3fsClient.check: .*entry 1: .*not contiguous"):
        client.batch_write([0, PAGE], [page(1), page(1, 2 * PAGE)[::2]])


def test_an_empty_batch_is_fine(client: Client):
    client.check([], [])
    assert client.batch_read([], []) == []
    assert client.batch_write([], []) == []


def test_answers_are_by_request(client: Client):
    fill(client)
    fake.inject("reorder", count=50)
    fake.inject("fail", read=True, offset=0, value=errno.EIO)
    fake.inject("short", read=True, offset=2 * PAGE, value=100)
    targets = [page(0) for _ in range(4)]
    assert client.batch_read([3 * PAGE, 2 * PAGE, PAGE, 0], targets) == [PAGE, 100, PAGE, -errno.EIO]
    assert (targets[0] == 4).all()
    assert (targets[2] == 2).all()


def test_threads_that_share_a_client_do_not_mix_up_pages(client: Client):
    fill(client)
    errors: list[str] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            numbers = rng.integers(0, PAGES, 8).tolist()
            targets = [page(0) for _ in numbers]
            results = client.batch_read([n * PAGE for n in numbers], targets)
            if results != [PAGE] * 8 or any((t != n + 1).any() for n, t in zip(numbers, targets, strict=True)):
                errors.append(f"{numbers} {results}")

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_closing_twice_is_fine_and_a_closed_client_answers_with_an_error(client: Client):
    client.close()
    client.close()
    assert client.batch_read([0], [page(0)]) == [-errno.EBADF]
    assert client.batch_write([0], [page(0)]) == [-errno.EBADF]


def test_close_waits_for_what_is_under_way(client: Client):
    fill(client)
    results: list[list[int]] = []
    reader = threading.Thread(
        target=lambda: results.extend(client.batch_read([0] * 8, [page(0)] * 8) for _ in range(50))
    )
    reader.start()
    time.sleep(0.002)
    client.close()
    reader.join()
    assert all(answers in ([PAGE] * 8, [-errno.EBADF] * 8) for answers in results)


def test_a_file_that_ends_early_gives_a_short_answer(tmp_path: Path):
    client = LocalClient(tmp_path / "pages", PAGE * PAGES, PAGE)
    with open(tmp_path / "pages", "r+b") as file:
        file.truncate(PAGE + 100)
    assert client.batch_read([0, PAGE, 2 * PAGE], [page(0) for _ in range(3)]) == [PAGE, 100, 0]
    client.close()


def test_neighbouring_pages_go_together_and_are_answered_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client, calls = LocalClient(tmp_path / "pages", PAGE * PAGES, PAGE), []
    move = os.pwritev
    monkeypatch.setattr("os.pwritev", lambda fd, parts, offset: calls.append(len(parts)) or move(fd, parts, offset))
    numbers = [0, 1, 2, 5, 6, 9, 8]
    assert client.batch_write([n * PAGE for n in numbers], [page(n + 1) for n in numbers]) == [PAGE] * 7
    assert calls == [3, 2, 1, 1]
    targets = [page(0) for _ in range(10)]
    assert client.batch_read([n * PAGE for n in range(10)], targets) == [PAGE] * 10
    assert [int(target[0]) for target in targets] == [1, 2, 3, 0, 0, 6, 7, 0, 9, 10]

    def failing(fd: int, parts: list[memoryview], offset: int) -> int:
        if offset <= PAGE < offset + sum(part.nbytes for part in parts):
            raise OSError(errno.EIO, "bad sector")
        return move(fd, parts, offset)

    monkeypatch.setattr("os.pwritev", failing)
    assert client.batch_write([0, PAGE, 2 * PAGE], [page(7) for _ in range(3)]) == [PAGE, -errno.EIO, PAGE]
    client.close()


def test_impossible_settings_are_refused(tmp_path: Path):
    for settings in ({"size": 10}, {"bytes_per_page": 0}, {"entries": 0}):
        with pytest.raises(ValueError, match="="):
            LocalClient(tmp_path / "pages", **({"size": PAGE, "bytes_per_page": PAGE} | settings))
    with pytest.raises(ValueError, match="o_direct needs a multiple of 4096"):
        LocalClient(tmp_path / "pages", 1000, 1000, o_direct=True)


@pytest.mark.parametrize(
    "sizes", [[1], [PIECE_BYTES], [PIECE_BYTES + 1], [5, 3 * PIECE_BYTES, 7], [1] * 3000, [2 * PIECE_BYTES, 50_000]]
)
def test_pieces_are_the_parts_in_order(sizes: list[int]):
    data = [np.random.default_rng(n).integers(0, 256, size, dtype=np.uint8) for n, size in enumerate(sizes)]
    groups = plan_pieces(tuple(sizes))
    cut = [[data[place][start:stop] for place, start, stop in group] for group, _ in groups]
    assert b"".join(piece.tobytes() for group in cut for piece in group) == b"".join(p.tobytes() for p in data)
    assert [size for _, size in groups] == [sum(piece.nbytes for piece in group) for group in cut]
    assert all(size <= PIECE_BYTES for _, size in groups[:-1])
    assert groups[-1][1] <= PIECE_BYTES + SCRAP_BYTES
    assert all(len(group) <= 1024 for group, _ in groups)
    whole = b"".join(p.tobytes() for p in data)
    for count in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        assert b"".join(bytes(p) for p in skip_bytes([memoryview(p) for p in data], count)) == whole[count:]
