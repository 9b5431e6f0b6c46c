"""``kvcanary fsck``: exit codes, what it says, and that repair drops what is damaged and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_files import GEOMETRY, Medium, abandon, fake, fetch_all, flip, make_medium, patch, records_of, store
from page_writer import Writer

from kvcanary_plugin.cli import main
from kvcanary_plugin.tiers.hf3fs.layout import HEADER_OFFSETS

PAGES = {slot: slot + 1 for slot in (0, 1, 2, 62, 63, 100)}


@pytest.fixture
def medium(tmp_path: Path) -> Medium:
    fake.reset()
    medium = make_medium("local", tmp_path)
    with medium.open() as file:
        store(file, PAGES)
        medium.layout = file._table.header.layout
    return medium


def fsck(medium: Medium, *options: str) -> int:
    return main(["fsck", str(medium.path), *options])


def survivors(medium: Medium) -> set[int]:
    with medium.open() as file:
        found = fetch_all(file)
    assert set(found.values()) <= {"ok"}
    return set(found)


def test_a_clean_file(medium: Medium, capsys: pytest.CaptureFixture[str]):
    before = medium.path.read_bytes()
    assert fsck(medium) == 0
    assert fsck(medium, "--deep") == 0
    output = capsys.readouterr().out
    assert "clean" in output
    assert "bfloat16" in output
    assert re.search(rf"with records +│ +{sum(bool(records_of(n)) for n in PAGES.values())} ", output), output
    assert medium.path.read_bytes() == before  # a check changes nothing
    assert fsck(medium, "--deep", "--repair") == 0
    assert survivors(medium) == set(PAGES.values())


def test_a_file_whose_writer_died_is_clean(medium: Medium, capsys: pytest.CaptureFixture[str]):
    file = medium.open()
    store(file, {5: 50, 0: 51})
    abandon(file)
    assert fsck(medium, "--deep") == 0
    assert "did not close it" in capsys.readouterr().out


def test_a_damaged_page_is_found_by_deep_and_dropped_by_repair(medium: Medium, capsys: pytest.CaptureFixture[str]):
    flip(medium.path, medium.layout.slot_offset(2) + 77)
    patch(medium.path, medium.layout.slot_offset(63), bytes(medium.layout.stride))
    assert fsck(medium) == 0
    assert fsck(medium, "--deep") == 1
    output = capsys.readouterr().out
    assert "slot 2: the page does not verify (digest)" in output
    assert "slot 63: the page does not verify (hole)" in output
    assert fsck(medium, "--deep") == 1  # nothing was changed
    assert fsck(medium, "--deep", "--repair") == 1
    assert "2 damaged pages were dropped" in capsys.readouterr().out
    assert fsck(medium, "--deep") == 0
    assert survivors(medium) == set(PAGES.values()) - {3, 64}


def test_a_quarantined_page_is_damage_until_it_is_dropped(medium: Medium, capsys: pytest.CaptureFixture[str]):
    with medium.open() as file:
        file.quarantine([1])
    assert fsck(medium) == 1
    assert "slot 1: found damaged before" in capsys.readouterr().out
    assert fsck(medium, "--repair") == 1
    assert fsck(medium) == 0
    assert survivors(medium) == set(PAGES.values()) - {2}


@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_trailer_block_is_found_and_written_anew(medium: Medium, copy: int):
    with medium.open() as file:
        store(file, {0: 1})  # so that both copies of segment 0 are in use
    flip(medium.path, medium.layout.table_offsets[copy] + 40)
    assert fsck(medium) == 1
    assert fsck(medium, "--repair") == 1
    assert fsck(medium, "--deep") == 0
    assert survivors(medium) == set(PAGES.values())


@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_header_is_found_and_written_anew(medium: Medium, copy: int, capsys: pytest.CaptureFixture[str]):
    flip(medium.path, HEADER_OFFSETS[copy] + 500)
    assert fsck(medium) == 1
    assert f"header copy {'AB'[copy]}: the CRC" in capsys.readouterr().out
    assert fsck(medium, "--repair") == 1
    assert fsck(medium) == 0
    assert survivors(medium) == set(PAGES.values())


def test_what_is_not_a_page_file(medium: Medium, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text").write_text("hello " * 10_000)
    (tmp_path / "empty").write_bytes(b"")
    for name in ("text", "empty", "missing"):
        for options in ((), ("--repair",)):
            assert main(["fsck", str(tmp_path / name), *options]) == 2
    assert (tmp_path / "text").read_text() == "hello " * 10_000
    assert (tmp_path / "empty").read_bytes() == b""
    assert not (tmp_path / "missing").exists()
    output = capsys.readouterr().out
    assert "not a page file" in output
    assert "No such file" in output


def test_a_file_in_use(medium: Medium, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = tmp_path / "busy"
    with Writer(other, seed=3) as process:
        process.wait_for_commits(2)
        for options in ((), ("--deep",), ("--repair",), ("--deep", "--repair")):
            assert main(["fsck", str(other), *options]) == 2
        assert f"in use by process {process.pid}" in capsys.readouterr().out
        seen = len(process.lines)
        process.wait_for_commits(seen + 2)  # and the writer does not notice
    assert main(["fsck", str(other), "--deep"]) == 0
    assert GEOMETRY.payload_bytes == medium.layout.payload_bytes
