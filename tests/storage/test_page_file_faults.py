"""Every way in which a page file can be damaged or its transfers go wrong: the worst outcome is a miss.

``fetch`` of ``page_files`` compares the content of every page that is called good with what was stored.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from page_files import (
    GEOMETRY,
    PAGE_BYTES,
    TIMEOUT_SECONDS,
    Medium,
    abandon,
    fake,
    fetch,
    fetch_all,
    flip,
    halves,
    key_of,
    make_medium,
    patch,
    payload_of,
    reasons,
    store,
)

from kvcanary_plugin.tiers.hf3fs.errors import NotAPageFile
from kvcanary_plugin.tiers.hf3fs.header import CRC
from kvcanary_plugin.tiers.hf3fs.layout import HEADER_OFFSETS
from kvcanary_plugin.tiers.hf3fs.page import PageRead
from kvcanary_plugin.tiers.hf3fs.page_file import PageFile

PAGES = {slot: 100 + slot for slot in (0, 1, 2, 5, 63, 64)}
VICTIM = 2
STRIDE = 5 * 4096


@pytest.fixture(params=["local", "usrbio"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    fake.reset()
    yield make_medium(request.param, tmp_path)
    fake.reset()


@pytest.fixture
def file(medium: Medium) -> Iterator[PageFile]:
    with medium.open() as file:
        file.generations = dict(zip(PAGES, store(file, PAGES), strict=True))
        yield file


def offset_of(file: PageFile, slot: int) -> int:
    return file._table.header.layout.slot_offset(slot)


def block_offset(file: PageFile, segment: int, copy: int) -> int:
    return file._table.header.layout.table_offsets[copy] + 4096 * segment


def read_victim(file: PageFile) -> str:
    """Read all pages: the victim's verdict, once the others are known to be good."""
    verdicts = reasons(fetch(file, PAGES, list(file.generations.values())))
    others = [verdict for slot, verdict in zip(PAGES, verdicts, strict=True) if slot != VICTIM]
    assert others == ["ok"] * len(others)
    return verdicts[list(PAGES).index(VICTIM)]


def expect_quarantined(file: PageFile, reason: str) -> None:
    """The victim is a miss, is read twice, then never again; a new page in its place is fine."""
    assert read_victim(file) == reason
    assert file.counters.re_reads == 1
    assert file.counters.misses == {reason: 1}
    assert file.counters.quarantined == 1
    assert file.quarantined_slots() == [VICTIM]
    assert read_victim(file) == "quarantined"
    assert file.counters.re_reads == 1
    assert reasons(fetch(file, {VICTIM: 7}, store(file, {VICTIM: 7}))) == ["ok"]
    assert file.quarantined_slots() == []


# -- damage at rest ---------------------------------------------------------------------------------------------------


def test_clean_twin(file: PageFile):
    assert read_victim(file) == "ok"
    assert not file.counters.misses
    assert (file.counters.re_reads, file.counters.quarantined) == (0, 0)


def test_bit_flip_in_payload(medium: Medium, file: PageFile):
    flip(medium.path, offset_of(file, VICTIM) + 12_345, bit=5)
    expect_quarantined(file, "digest")


@pytest.mark.parametrize("position", [0, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 63])
def test_bit_flip_anywhere_in_payload_or_gpu_records(medium: Medium, position: int):
    with medium.open() as file:
        pages = {VICTIM: 5}  # has 64 bytes of GPU records
        generations = store(file, pages)
        assert reasons(fetch(file, pages, generations)) == ["ok"]
        flip(medium.path, offset_of(file, VICTIM) + position)
        assert reasons(fetch(file, pages, generations)) == ["digest"]


def test_torn_payload(medium: Medium, file: PageFile):
    patch(medium.path, offset_of(file, VICTIM) + 8192, payload_of(3)[8192:].tobytes())
    expect_quarantined(file, "digest")


def test_lost_payload_with_trailer_written(medium: Medium):
    # The disk acknowledges the payload and never writes it; the slot keeps an older page or nothing.
    with medium.open() as file:
        store(file, {VICTIM: 1})
        fake.inject("stale", read=False, min_size=PAGE_BYTES, count=2)
        lost = store(file, {VICTIM: 2, 9: 3})
        assert None not in lost
        assert reasons(fetch(file, {VICTIM: 2, 9: 3}, lost)) == ["digest", "hole"]
        assert file.counters.quarantined == 2


def test_zero_filled_hole(medium: Medium, file: PageFile):
    patch(medium.path, offset_of(file, VICTIM), bytes(PAGE_BYTES + 64))
    expect_quarantined(file, "hole")


def test_whole_page_in_the_wrong_slot(medium: Medium, file: PageFile):
    layout = file._table.header.layout
    content = medium.path.read_bytes()[layout.slot_offset(5) :][: layout.stride]
    patch(medium.path, offset_of(file, VICTIM), content)
    expect_quarantined(file, "digest")


def test_same_bytes_of_another_key_do_not_verify(medium: Medium):
    # The payload is right to the last bit: only what it is differs.
    with medium.open() as file:
        store(file, {VICTIM: 6})
        records = file._table.take(np.array([VICTIM]))
        records["key"] = np.frombuffer(key_of(9), "<u8")
        file._table.put(np.array([VICTIM]), records, 2)
        verdict = file.read([PageRead(key_of(9), VICTIM, int(records["generation"][0]), (payload_of(6) * 0,))])
        assert reasons(verdict) == ["digest"]


def test_old_version_of_the_page_with_a_new_trailer(medium: Medium, file: PageFile):
    layout = file._table.header.layout
    old = medium.path.read_bytes()[layout.slot_offset(VICTIM) :][: layout.stride]
    file.generations[VICTIM] = store(file, {VICTIM: PAGES[VICTIM]})[0]
    assert read_victim(file) == "ok"
    # The bytes of both versions are equal, so only another page can show it.
    (generation,) = store(file, {VICTIM: 8})
    patch(medium.path, layout.slot_offset(VICTIM), old)
    assert reasons(fetch(file, {VICTIM: 8}, [generation])) == ["digest"]


def test_truncated_file(medium: Medium, file: PageFile):
    layout = file._table.header.layout
    with open(medium.path, "r+b") as handle:
        handle.truncate(layout.slot_offset(VICTIM) + 100)
    verdicts = reasons(fetch(file, PAGES, list(file.generations.values())))
    assert verdicts == ["ok", "ok", "short", "short", "short", "short"]
    assert store(file, {5: 1}) != [None]


# -- trailers ---------------------------------------------------------------------------------------------------------


def reopen(medium: Medium, pages: dict[int, int], damage: str, *, more: dict[int, int] | None = None) -> PageFile:
    """Write pages, let the writer die, damage the newest trailer block of segment 0 and open again."""
    file = medium.open()
    store(file, pages)
    if more:
        store(file, more)
    newest = int(file._table._current[0])
    offset = block_offset(file, 0, newest)
    abandon(file)
    {
        "torn": lambda: patch(medium.path, offset + 1024, b"\x5a" * 3072),
        "zeroed": lambda: patch(medium.path, offset, bytes(4096)),
        "header flip": lambda: flip(medium.path, offset + 17),
        "record flip": lambda: flip(medium.path, offset + 64 + 64 * VICTIM + 20),
    }[damage]()
    return medium.open()


def test_torn_trailer(medium: Medium):
    with reopen(medium, {0: 1, 40: 2}, "torn", more={VICTIM: 3, 41: 4}) as file:
        assert (
            file.faults == [f"segment 0: trailer block {'BA'[int(file._table._current[0])]} is damaged"] or file.faults
        )
        # Slot 41 is in the torn half: its update is lost. Slot 2 is saved by the CRC of its own record.
        assert fetch_all(file) == {1: "ok", 2: "ok", 3: "ok"}
        store(file, {41: 4})
        assert fetch_all(file) == {1: "ok", 2: "ok", 3: "ok", 4: "ok"}
    with medium.open() as file:
        assert fetch_all(file) == {1: "ok", 2: "ok", 3: "ok", 4: "ok"}


@pytest.mark.parametrize("copy", ["newest", "both"])
def test_lost_trailer(medium: Medium, copy: str):
    with reopen(medium, {0: 1, 40: 2}, "zeroed", more={VICTIM: 3}) as file:
        assert fetch_all(file) == {1: "ok", 2: "ok"}
        offsets = [block_offset(file, 0, number) for number in (0, 1)]
    if copy == "both":
        for offset in offsets:
            patch(medium.path, offset, bytes(4096))
        with medium.open() as file:
            assert fetch_all(file) == {}
            store(file, {0: 1})
            assert fetch_all(file) == {1: "ok"}


def test_bit_flip_in_trailer_header(medium: Medium):
    with reopen(medium, {0: 1, 40: 2}, "header flip", more={VICTIM: 3}) as file:
        assert len(file.faults) == 1
        assert fetch_all(file) == {1: "ok", 2: "ok", 3: "ok"}


def test_bit_flip_in_record(medium: Medium):
    with reopen(medium, {0: 1, 40: 2}, "record flip", more={VICTIM: 3}) as file:
        assert len(file.faults) == 1
        assert fetch_all(file) == {1: "ok", 2: "ok"}


def test_lost_update_of_a_trailer_shows_an_old_page_that_does_not_verify(medium: Medium):
    # The block that said "writing" is lost too: the old record stands for a payload that was overwritten.
    file = medium.open()
    store(file, {VICTIM: 1})
    old = [medium.path.read_bytes()[block_offset(file, 0, copy) :][:4096] for copy in (0, 1)]
    store(file, {VICTIM: 2})
    offsets = [block_offset(file, 0, copy) for copy in (0, 1)]
    abandon(file)
    for offset, block in zip(offsets, old, strict=True):
        patch(medium.path, offset, block)
    with medium.open() as file:
        assert fetch_all(file) == {1: "digest"}
        assert fetch_all(file) == {}


def test_trailer_block_of_another_segment_and_of_another_file(medium: Medium):
    with medium.open() as file:
        store(file, {0: 1, 63: 2})
        first, second = (block_offset(file, segment, 1) for segment in (0, 1))
    with medium.open(path=medium.folder / "other") as other:
        store(other, {130: 3})
        third = block_offset(other, 2, 1)
    content, foreign = medium.path.read_bytes(), (medium.folder / "other").read_bytes()
    patch(medium.path, second, content[first:][:4096])
    patch(medium.path, third, foreign[third:][:4096])
    with medium.open() as file:
        assert fetch_all(file) == {1: "ok"}
        assert [fault.split(": ")[1] for fault in file.faults] == ["trailer block B belongs elsewhere"] * 2


def test_swapped_files(medium: Medium):
    # The index still speaks of the other file: slots and keys exist there as well, with other pages.
    other = Medium(medium.name, medium.folder)
    with medium.open() as file:
        mine = store(file, {0: 1, 1: 2})
        uuid = file.uuid
    with other.open(path=medium.folder / "other") as file:
        store(file, {0: 3, 1: 4})
    (medium.folder / "other").rename(medium.path)
    with medium.open() as file:
        assert file.uuid != uuid
        assert reasons(fetch(file, {0: 1, 1: 2}, mine)) == ["key", "key"]


def test_swapped_payloads_of_two_files(medium: Medium):
    with medium.open() as file:
        generations = store(file, {VICTIM: 1})
        layout = file._table.header.layout
    with medium.open(path=medium.folder / "other") as file:
        store(file, {VICTIM: 2})
    foreign = (medium.folder / "other").read_bytes()[layout.slot_offset(VICTIM) :][: layout.stride]
    patch(medium.path, layout.slot_offset(VICTIM), foreign)
    with medium.open() as file:
        assert reasons(fetch(file, {VICTIM: 1}, generations)) == ["digest"]


def test_recreated_file_does_not_hit_with_zeros(medium: Medium):
    with medium.open() as file:
        generations = store(file, {0: 1})
    medium.path.unlink()
    with medium.open() as file:
        assert reasons(fetch(file, {0: 1}, generations)) == ["free"]


# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [0, 1])
def test_bit_flip_in_one_header(medium: Medium, copy: int):
    with medium.open() as file:
        generations = store(file, PAGES)
    flip(medium.path, HEADER_OFFSETS[copy] + 40)
    with medium.open() as file:
        assert reasons(fetch(file, PAGES, generations)) == ["ok"] * len(PAGES)
    blocks = [medium.path.read_bytes()[offset:][:4096] for offset in HEADER_OFFSETS]
    assert blocks[0] == blocks[1]  # repaired by opening


def test_bit_flip_in_both_headers(medium: Medium):
    with medium.open() as file:
        store(file, PAGES)
    for offset in HEADER_OFFSETS:
        flip(medium.path, offset + 40)
    with pytest.raises(NotAPageFile, match=r"copy A: the CRC .*copy B: the CRC .*remove the file"):
        medium.open()


def test_older_format_version(medium: Medium):
    with medium.open() as file:
        store(file, PAGES)
    block = bytearray(medium.path.read_bytes()[:4096])
    struct.pack_into("<H", block, 8, 0)
    block[-4:] = CRC.pack(zlib.crc32(block[:-4]))
    for offset in HEADER_OFFSETS:
        patch(medium.path, offset, bytes(block))
    before = medium.path.read_bytes()
    with pytest.raises(NotAPageFile, match=r"format version 0.*reads version 1"):
        medium.open()
    assert medium.path.read_bytes() == before


# -- transfers --------------------------------------------------------------------------------------------------------


def test_short_read(medium: Medium, file: PageFile):
    fault = fake.inject("short", read=True, offset=offset_of(file, VICTIM), value=4096, count=2)
    assert read_victim(file) == "short"
    assert fault.struck == 2
    assert file.counters.misses == {"short": 1}


FAULTS_OF_READS = {
    "misdirected read": {"kind": "misdirected", "value": 3 * STRIDE},
    "stale read": {"kind": "stale"},
    "zero-filled read": {"kind": "hole"},
    "torn read": {"kind": "torn", "value": 4096},
    "flipped read": {"kind": "flip", "value": 77},
    "short read": {"kind": "short", "value": 4096},
}


@pytest.mark.parametrize("fault", FAULTS_OF_READS)
def test_a_fault_that_comes_once_is_cured_by_reading_again(medium: Medium, fault: str):
    with medium.open() as file:
        store(file, {VICTIM: 1})
        file.generations = dict(zip(PAGES, store(file, PAGES), strict=True))
        planned = fake.inject(**FAULTS_OF_READS[fault], read=True, offset=offset_of(file, VICTIM))
        assert read_victim(file) == "ok"
        assert planned.struck == 1
        assert (file.counters.re_reads, file.counters.quarantined) == (1, 0)


@pytest.mark.parametrize("fault", FAULTS_OF_READS)
def test_a_fault_that_stays_is_a_miss(medium: Medium, fault: str):
    with medium.open() as file:
        store(file, {VICTIM: 1})
        file.generations = dict(zip(PAGES, store(file, PAGES), strict=True))
        fake.inject(**FAULTS_OF_READS[fault], read=True, offset=offset_of(file, VICTIM), count=2)
        expect_quarantined(file, {"zero-filled read": "hole", "short read": "short"}.get(fault, "digest"))


def test_an_error_of_the_medium_is_a_miss_and_leaves_the_page_alone(file: PageFile):
    fake.inject("fail", read=True, offset=offset_of(file, VICTIM), value=errno.EIO, count=2)
    verdicts = fetch(file, PAGES, list(file.generations.values()))
    assert [(verdict.reason, verdict.errno) for verdict in verdicts if not verdict.ok] == [("io-error", errno.EIO)]
    assert (file.counters.re_reads, file.counters.quarantined) == (1, 0)
    assert read_victim(file) == "ok"


def test_failed_and_short_writes_are_not_committed(medium: Medium):
    with medium.open() as file:
        fake.inject("fail", read=False, min_size=PAGE_BYTES, value=errno.ENOSPC)
        fake.inject("short", read=False, min_size=PAGE_BYTES, value=4096, skip=1)
        generations = store(file, {0: 1, 1: 2, 2: 3})
        assert [generation is None for generation in generations] == [True, True, False]
        assert file.counters.failed_writes == {"payload": 2}
        assert fetch_all(file) == {3: "ok"}
    with medium.open() as file:
        assert fetch_all(file) == {3: "ok"}


@pytest.mark.parametrize("reused", [False, True])
def test_a_trailer_that_cannot_be_written_commits_nothing(medium: Medium, reused: bool):
    with medium.open() as file:
        if reused:
            store(file, {0: 9})
        fake.inject("fail", read=False, max_size=4096, value=errno.EIO)
        assert store(file, {0: 1, 1: 2}) == ([None, None] if not reused else [None, file._writer._generation])
        assert fetch_all(file) == ({2: "ok"} if reused else {})
        store(file, {0: 1})
        assert fetch_all(file)[1] == "ok"


FAULTS_OF_WRITES = {
    "torn write": {"kind": "torn", "value": 8192},
    "flipped write": {"kind": "flip", "value": 99},
    "lost write": {"kind": "stale"},
    "zeroed write": {"kind": "hole"},
    "misdirected write": {"kind": "misdirected", "value": STRIDE},
}


@pytest.mark.parametrize("fault", FAULTS_OF_WRITES)
def test_a_write_that_goes_wrong_and_says_it_went_well(medium: Medium, fault: str):
    with medium.open() as file:
        store(file, {VICTIM: 1})
        bystander = VICTIM + 1 if fault == "misdirected write" else 5
        pages = {VICTIM: 2, bystander: 3}
        generations = [None, *store(file, {bystander: 3})]
        planned = fake.inject(**FAULTS_OF_WRITES[fault], read=False, min_size=PAGE_BYTES)
        generations[0] = store(file, {VICTIM: 2})[0]
        assert planned.struck == 1
        assert generations[0] is not None
        first, second = reasons(fetch(file, pages, generations))
        assert first == ("hole" if fault == "zeroed write" else "digest")
        # A misdirected write also destroys the page that it hits.
        assert second == ("digest" if fault == "misdirected write" else "ok")


@pytest.mark.parametrize("fault", ["torn write", "flipped write", "lost write", "zeroed write", "misdirected write"])
def test_a_trailer_write_that_goes_wrong_and_says_it_went_well(medium: Medium, fault: str):
    settings = FAULTS_OF_WRITES[fault] | {"value": 1000 if fault == "torn write" else 4096}
    file = medium.open()
    store(file, {0: 1, 40: 2, 63: 3, 100: 4})
    planned = fake.inject(**settings, read=False, max_size=4096, count=1)
    store(file, {1: 5, 41: 6})
    assert planned.struck == 1
    abandon(file)
    with medium.open() as file:
        found = fetch_all(file)
        assert set(found.values()) <= {"ok"}
        lost = {5, 6, 3} if fault == "misdirected write" else {5, 6}  # it hits the block of slot 63
        assert {1, 2, 3, 4} - lost <= found.keys()


def test_reordered_completions(medium: Medium, file: PageFile):
    fake.inject("reorder", count=100)
    fake.inject("fail", read=True, offset=offset_of(file, 0), count=2)
    verdicts = reasons(fetch(file, PAGES, list(file.generations.values())))
    assert verdicts == ["io-error"] + ["ok"] * 5
    assert reasons(fetch(file, {7: 7, 8: 8, 9: 9}, store(file, {7: 7, 8: 8, 9: 9}))) == ["ok"] * 3


def test_duplicated_completion(medium: Medium, file: PageFile):
    fake.inject("duplicate", read=True, offset=offset_of(file, VICTIM), count=2)
    fake.inject("duplicate", read=False, count=3)
    for _ in range(3):
        assert read_victim(file) == "ok"
        assert reasons(fetch(file, {7: 7, 8: 8}, store(file, {7: 7, 8: 8}))) == ["ok", "ok"]
    assert file.counters.quarantined == 0


def test_read_completion_after_the_timeout(medium: Medium, file: PageFile):
    # The first answer comes late, while the next pages are being read.
    fake.inject("late", read=True, offset=offset_of(file, VICTIM), count=2, seconds=1.3 * TIMEOUT_SECONDS)
    assert read_victim(file) == ("io-error" if medium.name == "usrbio" else "ok")
    deadline = time.monotonic() + 3 * TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        assert read_victim(file) == "ok"
    assert file.counters.quarantined == 0


def test_write_completion_after_the_timeout(medium: Medium, file: PageFile):
    # The write is given up, its slot goes to another page, and only then the first one arrives.
    fake.inject("late", read=False, offset=offset_of(file, VICTIM), seconds=2 * TIMEOUT_SECONDS)
    late = medium.name == "usrbio"
    (generation,) = store(file, {VICTIM: 50})
    assert (generation is None) == late
    (generation,) = store(file, {VICTIM: 51})
    assert (generation is None) == late  # as long as the first may still arrive, nothing else is written there
    time.sleep(3 * TIMEOUT_SECONDS)
    assert reasons(fetch(file, {VICTIM: 52}, store(file, {VICTIM: 52}))) == ["ok"]
    assert read_victim(file) == "key"


def test_a_request_that_is_never_answered(medium: Medium, file: PageFile):
    fake.inject("never", read=True, offset=offset_of(file, VICTIM), count=2)
    fake.inject("never", read=False, offset=offset_of(file, 9))
    assert read_victim(file) == "io-error"
    assert read_victim(file) == "ok"
    assert store(file, {9: 9}) == [None]
    assert reasons(fetch(file, {8: 8}, store(file, {8: 8}))) == ["ok"]
    fake.release()
    assert reasons(fetch(file, {9: 9}, store(file, {9: 9}))) == ["ok"]


# -- races ------------------------------------------------------------------------------------------------------------


def test_a_slot_that_is_reused_between_lookup_and_read(file: PageFile):
    looked_up = file.generations[VICTIM]
    store(file, {VICTIM: 77})
    assert reasons(fetch(file, {VICTIM: PAGES[VICTIM]}, [looked_up])) == ["key"]


def test_a_page_that_is_overwritten_while_it_is_read_is_no_damage(file: PageFile, monkeypatch: pytest.MonkeyPatch):
    transfer, replaced = file._client.read, []

    def read(batch: object) -> None:
        if not replaced:
            replaced.append(1)
            store(file, {VICTIM: 77})
        transfer(batch)

    monkeypatch.setattr(file._client, "read", read)
    assert reasons(fetch(file, {VICTIM: PAGES[VICTIM]}, [file.generations[VICTIM]])) == ["key"]
    assert file.counters.quarantined == 0
    assert fetch_all(file)[77] == "ok"


def test_a_slot_has_one_writer_at_a_time(file: PageFile, monkeypatch: pytest.MonkeyPatch):
    write, inner = file._client.write, []

    def nested(batch: object) -> None:
        if not inner and batch.digests is not None:
            inner.append(None)
            inner[0] = store(file, {VICTIM: 78, 20: 79})
        write(batch)

    monkeypatch.setattr(file._client, "write", nested)
    (outer,) = store(file, {VICTIM: 77})
    assert inner[0][0] is None
    assert file.counters.failed_writes == {"busy": 1}
    assert reasons(fetch(file, {VICTIM: 77, 20: 79}, [outer, inner[0][1]])) == ["ok", "ok"]


def test_pages_dropped_while_one_is_written(file: PageFile, monkeypatch: pytest.MonkeyPatch):
    write, cleared = file._client.write, []

    def clearing(batch: object) -> None:
        write(batch)
        if not cleared and batch.digests is not None:
            cleared.append(1)
            file.clear()

    monkeypatch.setattr(file._client, "write", clearing)
    store(file, {VICTIM: 77, 30: 78})
    assert fetch_all(file) == {}
    assert reasons(fetch(file, {30: 79}, store(file, {30: 79}))) == ["ok"]
    assert file.counters.quarantined == 0


def test_sixteen_threads(medium: Medium):
    """Mixed writes, reads and discards on few slots, so that they collide all the time."""
    stop = time.monotonic() + float(os.environ.get("KVCANARY_SOAK_S", "3"))
    errors: list[BaseException] = []
    with medium.open() as file:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            number = seed * 1_000_000
            known: dict[int, tuple[int, int]] = {}
            try:
                while time.monotonic() < stop:
                    slots = rng.choice(40, rng.integers(1, 6), replace=False).tolist()
                    if rng.random() < 0.4:
                        pages = {slot: (number := number + 1) for slot in slots}
                        for (slot, page), generation in zip(pages.items(), store(file, pages), strict=True):
                            if generation:
                                known[slot] = page, generation
                    elif rng.random() < 0.1:
                        file.discard(slots[:1])
                    else:
                        chosen = [slot for slot in slots if slot in known]
                        fetch(file, {s: known[s][0] for s in chosen}, [known[s][1] for s in chosen])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        assert file.counters.reads > 100
        assert set(file.counters.misses) <= {"key", "generation", "free", "writing"}
        assert file.counters.quarantined == 0
        assert set(fetch_all(file).values()) <= {"ok"}
    with medium.open() as file:
        assert set(fetch_all(file).values()) <= {"ok"}
        assert file.faults == []


# -- the death of the writer between every pair of steps ---------------------------------------------------------------


class Killed(BaseException):
    """The process is dead."""


def kill_at(file: PageFile, step: int, torn: bool) -> None:
    """Let the writer die at its nth request from now: nothing of that request arrives, or its first half."""
    write, seen = file._client.write, [0]

    def dying(batch: object) -> None:
        for index in range(len(batch)):
            one = type(batch)(
                [batch.offsets[index]], [batch.parts[index]], [batch.sizes[index]], batch.digests is not None
            )
            if seen[0] == step:
                if torn:
                    whole = b"".join(bytes(part) for part in batch.parts[index])
                    patch(file.path, batch.offsets[index], whole[: len(whole) // 2])
                raise Killed
            seen[0] += 1
            write(one)
            batch.results[index] = one.results[0]
            if batch.digests is not None:
                batch.digests[index] = one.digests[0]

    file._client.write = dying


@pytest.mark.parametrize("torn", [False, True])
def test_death_between_every_pair_of_steps(medium: Medium, torn: bool):
    before = {0: 1, 1: 2, 63: 3}
    after = {0: 11, 2: 12, 63: 13, 64: 14}  # two reused slots, in two segments
    for step in range(100):
        medium.path.unlink(missing_ok=True)
        file = medium.open()
        store(file, before)
        kill_at(file, step, torn)
        try:
            store(file, after)
            survived = True
        except Killed:
            survived = False
        abandon(file)
        with medium.open() as file:
            found = fetch_all(file)
            assert set(found.values()) == {"ok"}, (step, found)
            assert 2 in found  # nobody touched it
            if survived:
                assert found.keys() == {2, 11, 12, 13, 14}
                break
            assert not (1 in found and 11 in found)
            assert reasons(fetch(file, after, store(file, after))) == ["ok"] * 4
    assert step == 8  # two marks, four payloads, two commits


def test_one_page_may_be_written_from_parts_and_read_in_others(medium: Medium):
    with medium.open() as file:
        (generation,) = store(file, {0: 1})
        target = np.zeros(PAGE_BYTES, np.uint8)
        (verdict,) = file.read([PageRead(key_of(1), 0, generation, (target[:1], target[1:9], target[9:]))])
        assert verdict.ok
        assert (target == payload_of(1)).all()
        assert (np.concatenate(halves(target)) == payload_of(1)).all()
    assert GEOMETRY.payload_bytes == PAGE_BYTES
