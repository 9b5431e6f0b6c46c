"""The page file without faults: what goes in comes out, across restarts, and bad input changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from page_files import (
    CAPACITY,
    GEOMETRY,
    PAGE_BYTES,
    Medium,
    abandon,
    fake,
    fetch,
    fetch_all,
    key_of,
    make_medium,
    payload_of,
    reasons,
    store,
)
from page_writer import Writer

from kvcanary_plugin.tiers.hf3fs.errors import CapacityMismatch, GeometryMismatch, InUse, NotAPageFile, PageFileError
from kvcanary_plugin.tiers.hf3fs.geometry import Geometry
from kvcanary_plugin.tiers.hf3fs.layout import Layout
from kvcanary_plugin.tiers.hf3fs.page import PageRead, PageWrite
from kvcanary_plugin.tiers.hf3fs.page_file import PageFile


@pytest.fixture(params=["local", "usrbio"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    fake.reset()
    yield make_medium(request.param, tmp_path)
    fake.reset()


PAGES = {slot: 100 + slot for slot in (0, 1, 5, 62, 63, 64, 130)}


def test_pages_come_back_and_survive_a_restart(medium: Medium):
    with medium.open() as file:
        generations = store(file, PAGES)
        assert len(set(generations)) == len(PAGES)
        assert reasons(fetch(file, PAGES, generations)) == ["ok"] * len(PAGES)
        uuid, epoch = file.uuid, file.epoch
    with medium.open() as file:
        assert (file.uuid, file.epoch, file.faults) == (uuid, epoch + 1, [])
        assert reasons(fetch(file, PAGES, generations)) == ["ok"] * len(PAGES)
        assert {entry.slot: entry.generation for entry in file.scan()} == dict(zip(PAGES, generations, strict=True))
        assert file.counters.reads == len(PAGES)
        assert not file.counters.misses


def test_pages_survive_the_death_of_the_writer(medium: Medium):
    file = medium.open()
    store(file, PAGES)
    abandon(file)
    with medium.open() as file:
        assert fetch_all(file) == dict.fromkeys(PAGES.values(), "ok")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8])
def test_tensors_of_any_dtype_go_straight_in_and_out(medium: Medium, dtype: torch.dtype):
    shape = (PAGE_BYTES // dtype.itemsize // 10, 10)
    page = torch.from_numpy(payload_of(1)).view(dtype).reshape(shape)
    target = torch.zeros(shape, dtype=dtype)
    with medium.open() as file:
        (generation,) = file.write([PageWrite(key_of(1), 3, (page[:7], page[7:]))])
        (verdict,) = file.read([PageRead(key_of(1), 3, generation, (target[:9], target[9:]))])
    assert verdict.ok
    assert torch.equal(target.view(torch.uint8), page.view(torch.uint8))


def test_no_two_pages_ever_have_the_same_generation(medium: Medium):
    seen: list[int | None] = []
    for _ in range(3):
        file = medium.open()
        seen += store(file, {0: 1, 1: 2})
        abandon(file)
    assert len(set(seen)) == len(seen)
    assert seen == sorted(seen)
    assert max(seen) < 2**63


def test_a_lookup_that_is_out_of_date_is_a_miss(medium: Medium):
    with medium.open() as file:
        (old,) = store(file, {4: 1})
        (new,) = store(file, {4: 2})
        assert reasons(fetch(file, {4: 1}, [old])) == ["key"]
        assert reasons(fetch(file, {4: 2}, [old])) == ["generation"]
        assert reasons(fetch(file, {9: 1}, [old])) == ["free"]
        assert reasons(fetch(file, {4: 2}, [new])) == ["ok"]
        assert file.counters.misses == {"key": 1, "generation": 1, "free": 1}
        assert file.counters.quarantined == 0


def test_discarded_and_cleared_pages_do_not_come_back(medium: Medium):
    with medium.open() as file:
        generations = store(file, PAGES)
        file.discard([0, 63])
        assert reasons(fetch(file, {0: 100}, generations[:1])) == ["free"]
    with medium.open() as file:
        assert fetch_all(file).keys() == set(PAGES.values()) - {100, 163}
        file.clear()
        assert fetch_all(file) == {}
        store(file, {7: 7})
        assert fetch_all(file) == {7: "ok"}
    with medium.open() as file:
        assert fetch_all(file) == {7: "ok"}
        assert file.faults == []


def test_the_newest_of_two_pages_with_one_key_is_found(medium: Medium):
    with medium.open() as file:
        store(file, {1: 5})
        (newer,) = store(file, {2: 5})
        assert [(entry.slot, entry.generation) for entry in file.scan()] == [(2, newer)]


BAD_WRITES = {
    "parts too small": PageWrite(key_of(1), 0, (payload_of(1, PAGE_BYTES - 1),)),
    "parts too large": PageWrite(key_of(1), 0, (payload_of(1), payload_of(2, 1))),
    "slot too high": PageWrite(key_of(1), 10**6, (payload_of(1),)),
    "slot negative": PageWrite(key_of(1), -1, (payload_of(1),)),
    "short key": PageWrite(b"short", 0, (payload_of(1),)),
    "too many records": PageWrite(key_of(1), 0, (payload_of(1),), b"r" * 65),
    "not contiguous": PageWrite(key_of(1), 0, (torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8)[::2],)),
    "slot twice": PageWrite(key_of(1), 8, (payload_of(1),)),
}


@pytest.mark.parametrize("bad", BAD_WRITES)
def test_a_batch_with_a_bad_entry_is_refused_whole(medium: Medium, bad: str):
    with medium.open() as file:
        before = medium.path.read_bytes()
        with pytest.raises(ValueError, match=r"entry 1|contiguous"):
            file.write([PageWrite(key_of(7), 8, (payload_of(7),)), BAD_WRITES[bad]])
        assert medium.path.read_bytes() == before
        assert reasons(fetch(file, {8: 8}, store(file, {8: 8}))) == ["ok"]


def test_empty_batches_are_fine(medium: Medium):
    with medium.open() as file:
        assert file.write([]) == []
        assert file.read([]) == []


def test_a_file_has_one_writer(medium: Medium):
    with medium.open() as file:
        with pytest.raises(InUse, match=rf"in use by process {os.getpid()} on"):
            medium.open()
        assert reasons(fetch(file, PAGES, store(file, PAGES))) == ["ok"] * len(PAGES)
    medium.open().close()


def test_a_file_that_another_live_process_has_open_is_in_use(tmp_path: Path):
    medium = make_medium("local", tmp_path)
    with Writer(medium.path, seed=1) as process:
        process.wait_for_commits(1)
        with pytest.raises(InUse, match=f"process {process.pid} "):
            PageFile.open(medium.path, GEOMETRY, capacity_bytes=CAPACITY)
        process.kill()
    with PageFile.open(medium.path, GEOMETRY, capacity_bytes=CAPACITY) as file:
        assert file.faults == []


def test_a_writer_that_was_superseded_stops_writing(medium: Medium, monkeypatch: pytest.MonkeyPatch):
    # On a shared mount nothing keeps a second host out but the epoch.
    old = medium.open()
    store(old, {0: 1})
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with medium.open(takeover=True) as new:
        store(new, {0: 2})
        old._fence_at = 0.0
        assert store(old, {1: 3}) == [None]
        assert old.counters.failed_writes == {"superseded": 1}
        old.discard([0])
        assert fetch_all(new) == {2: "ok"}
    old.close()
    with medium.open() as file:
        assert fetch_all(file) == {2: "ok"}


def test_an_unclosed_file_of_another_host_needs_takeover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    medium = make_medium("usrbio", tmp_path)
    with monkeypatch.context() as patched:
        elsewhere = '{"host": "elsewhere", "pid": 17, "boot": "another"}'
        patched.setattr("kvcanary_plugin.tiers.hf3fs.opening.describe_owner", lambda: elsewhere)
        file = medium.open()
    store(file, {0: 1})
    abandon(file)
    with pytest.raises(InUse, match=r"process 17 on elsewhere .*takeover"):
        medium.open()
    with medium.open(takeover=True) as file:
        assert fetch_all(file) == {1: "ok"}


def test_a_reader_elsewhere_follows_the_writer(medium: Medium):
    with medium.open() as writer:
        (first,) = store(writer, {3: 1})
        with medium.open(read_only=True) as reader:
            assert reasons(fetch(reader, {3: 1}, [first])) == ["ok"]
            (second,) = store(writer, {3: 2})
            assert reasons(fetch(reader, {3: 1}, [first])) != ["ok"]
            assert reasons(fetch(reader, {3: 2}, [second])) == ["ok"]
            (third,) = store(writer, {70: 3})
            assert reasons(fetch(reader, {70: 3}, [third])) == ["ok"]
            with pytest.raises(PageFileError, match="reading only"):
                store(reader, {0: 1})
            writer.clear()
            (fourth,) = store(writer, {3: 4})
            assert reasons(fetch(reader, {3: 4}, [fourth])) == ["ok"]
            assert reasons(fetch(reader, {70: 3}, [third])) == ["free"]
            assert reader.counters.quarantined == 0


def test_closing_twice_is_fine_and_a_closed_file_only_misses(medium: Medium):
    file = medium.open()
    generations = store(file, {0: 1})
    file.close()
    file.close()
    assert reasons(fetch(file, {0: 1}, generations)) == ["io-error"]
    assert store(file, {1: 2}) == [None]
    file.discard([0])
    file.quarantine([0])
    with medium.open() as file:
        assert fetch_all(file) == {1: "ok"}


OTHER_GEOMETRIES = {
    "dtype": Geometry((*GEOMETRY.identity[1:], ("dtype", "float8")), PAGE_BYTES, GEOMETRY.records_bytes),
    "rank": Geometry((*(p for p in GEOMETRY.identity if p[0] != "tp"), ("tp", "1/2")), PAGE_BYTES, 64),
    "payload_bytes": Geometry(GEOMETRY.identity, PAGE_BYTES + 1, GEOMETRY.records_bytes),
    "records_bytes": Geometry(GEOMETRY.identity, PAGE_BYTES, 0),
}


@pytest.mark.parametrize("what", OTHER_GEOMETRIES)
def test_wrong_geometry(medium: Medium, what: str):
    with medium.open() as file:
        store(file, PAGES)
    before = medium.path.read_bytes()
    name = {"rank": "tp"}.get(what, what)
    with pytest.raises(GeometryMismatch, match=rf"pages.*{name}: .*, not .*another path"):
        medium.open(OTHER_GEOMETRIES[what])
    assert medium.path.read_bytes() == before
    with medium.open() as file:
        assert set(fetch_all(file).values()) == {"ok"}


def test_another_capacity_is_refused_by_name(medium: Medium):
    medium.open().close()
    with pytest.raises(CapacityMismatch, match=r"ask for [0-9]+ bytes, or remove"):
        medium.open(capacity_bytes=2 * CAPACITY)
    with pytest.raises(PageFileError, match="smallest file takes"):
        medium.open(path=medium.folder / "other", capacity_bytes=1000)


def test_other_files_are_left_alone(medium: Medium):
    medium.path.write_bytes(b"precious" * 100_000)
    with pytest.raises(NotAPageFile, match="another path"):
        medium.open()
    assert medium.path.read_bytes() == b"precious" * 100_000
    with pytest.raises(PageFileError, match="No such file"):
        medium.open(path=medium.folder / "missing" / "pages")
    with pytest.raises(PageFileError, match="no client 'tape'"):
        medium.open(path=medium.folder / "other", client="tape")


@pytest.mark.parametrize("payload", [1, 4096, 57_344, 9 << 20])
@pytest.mark.parametrize("records", [0, 32, 2048])
@pytest.mark.parametrize("capacity", [20 << 20, (20 << 20) + 1, 1 << 30, 1 << 40])
def test_layout_fills_the_capacity_and_parts_never_overlap(payload: int, records: int, capacity: int):
    geometry = Geometry((), payload, records)
    layout = Layout.fit(geometry, capacity)
    one_more = Layout(payload, records, layout.slot_count + 1)
    assert layout.file_bytes <= capacity < one_more.file_bytes or layout.slot_count == 2**31
    first, second = layout.table_offsets
    assert first >= 68 * 1024
    assert first + layout.table_bytes <= second
    assert second + layout.table_bytes <= layout.data_offset
    assert layout.data_offset % layout.stride == 0
    assert layout.stride % 4096 == 0
    assert layout.stride - payload - records in range(4096)
    assert layout.segment_count * 63 >= layout.slot_count > (layout.segment_count - 1) * 63


@pytest.mark.parametrize("o_direct", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_local_options(tmp_path: Path, o_direct: bool, threads: int):
    size = 600_000  # more than one piece of work, and no multiple of a block
    geometry = Geometry((("model", "m"),), size, 32)
    options = {"capacity_bytes": 32 << 20, "o_direct": o_direct, "threads": threads}
    pages = [payload_of(n, size) for n in range(20)]
    with PageFile.open(tmp_path / "pages", geometry, **options) as file:
        generations = file.write(
            [PageWrite(key_of(n), n, (p[:13], p[13:]), bytes([n] * n)) for n, p in enumerate(pages)]
        )
        targets = [np.zeros(size, np.uint8) for _ in pages]
        verdicts = file.read([PageRead(key_of(n), n, generations[n], (targets[n],)) for n in range(20)])
    assert reasons(verdicts) == ["ok"] * 20
    assert all((a == b).all() for a, b in zip(pages, targets, strict=True))
    assert [verdict.records for verdict in verdicts] == [bytes([n] * n) for n in range(20)]
