"""The report as a page: complete in itself, and drawn by a real browser as it should be."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from kvcanary_plugin.report.bins import MAX_CELLS, Bins
from kvcanary_plugin.report.chart import SLOT_COLUMNS, draw_maps, draw_timeline
from kvcanary_plugin.report.collector import summarise
from kvcanary_plugin.report.page import render_page
from tests.report.incident import ALIAS, FLIP, attached, heartbeat, injected, night, violation, write_log

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium found: install the package chromium to run this"
)


@pytest.fixture
def summary(tmp_path: Path):
    first, second = night()
    return summarise([write_log(tmp_path / "0", first), write_log(tmp_path / "1", second)])


def test_the_page_needs_nothing_else(summary):
    page = render_page(summary, top=0)
    assert not re.search(r"<script|\bsrc=|\bhref=|url\(|@import|\bon\w+=", page)
    assert "default-src 'none'" in page
    assert page.count("<details") == len(summary.findings)
    assert len(page) < 100_000


def test_only_the_first_findings_are_on_it_and_it_says_so(summary):
    page = render_page(summary, top=2)
    assert page.count("<details") == 2
    assert "4 more findings are not on this page" in page


def test_the_map_has_damage_where_it_is(tmp_path: Path):
    events = [attached(), violation(FLIP, 1), violation(FLIP, 2, layer=4, slot=0), violation(ALIAS, 3, slot=8192)]
    (chart,) = draw_maps(summarise([write_log(tmp_path / "log", events)]))
    assert [lane.label for lane in chart.lanes] == ["whole slot", *(f"layer {n}" for n in range(5))]
    marked = {lane.label: [(mark.x, mark.title) for mark in lane.marks] for lane in chart.lanes if lane.marks}
    assert marked == {
        "layer 2": [(5635 // 129, "slots 5547 to 5675, layer 2: 1 report")],
        "layer 4": [(0, "slots 0 to 128, layer 4: 1 report")],
        "whole slot": [(63, "slots 8127 to 8192, whole slot: 1 report")],
    }
    assert chart.columns == SLOT_COLUMNS


def test_many_layers_are_drawn_in_few_rows(tmp_path: Path):
    events = [violation(FLIP, n, layer=n, slot=n) for n in range(100)]
    (chart,) = draw_maps(summarise([write_log(tmp_path / "log", events)]))
    assert len(chart.lanes) == 26
    assert chart.lanes[1].label == "layers 0 to 3"
    assert sum(int(re.search(r"(\d+) report", mark.title)[1]) for lane in chart.lanes for mark in lane.marks) == 100


def test_the_timeline_has_lanes_marks_and_gaps(tmp_path: Path):
    events = [
        attached(),
        heartbeat(30),
        injected(100, 564, 500),
        violation(FLIP, 110, slot=564, step=600),
        heartbeat(600),
    ]
    chart = draw_timeline(summarise([write_log(tmp_path / "log", [*events, violation(FLIP, 1200)])]))
    lanes = {lane.label: lane.marks for lane in chart.lanes}
    assert list(lanes) == ["content", "injected", "started", "heartbeat"]
    assert [(mark.kind, mark.x) for mark in lanes["content"]] == [("damage", 119), ("drill", 10)]
    gaps = [(mark.x, mark.x + mark.width) for mark in lanes["heartbeat"] if mark.kind == "gap"]
    assert gaps == [pytest.approx((3, 60), abs=0.2), pytest.approx((60, 120), abs=0.2)]
    assert (chart.ticks[0], chart.ticks[2], chart.ticks[-1][:7]) == ("03:00:00", "03:10:00", "03:20:0")


def test_bins_keep_every_count_within_bounded_memory():
    bins: Bins[str] = Bins()
    for n in range(4 * MAX_CELLS):
        bins.add("a", 3 * n)
    bins.add("b", 10**17, 5)
    assert len(bins._counts) <= MAX_CELLS
    assert sum(cell.count for cell in bins.spread(0, 10**17, 100)) == 4 * MAX_CELLS + 5
    assert {cell.row for cell in bins.spread(10**16, 10**17, 100)} == {"b"}


def shoot(page: Path, picture: Path, width: int = 1280, height: int = 2200, *options: str) -> tuple[Image.Image, str]:
    """A picture of ``page``, and what the browser had to say about it."""
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
    ]
    command += ["--v=0", "--disable-background-networking", f"--user-data-dir={picture.parent / 'browser'}"]
    command += [f"--window-size={width},{height}", f"--screenshot={picture}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert picture.exists(), done.stderr
    return Image.open(picture).convert("RGB"), "\n".join(line for line in done.stderr.split("\n") if "CONSOLE" in line)


def colours(picture: Image.Image) -> dict[tuple[int, ...], int]:
    return {colour: count for count, colour in picture.getcolors(1 << 24)}


EMPTY, ONE, FEW, DRILL = (0xEC, 0xEB, 0xE6), (0xF0, 0xA8, 0xA0), (0xE0, 0x6C, 0x60), (0x1F, 0x63, 0xB5)


@needs_browser
def test_a_browser_draws_the_page(tmp_path: Path, summary):
    page = tmp_path / "page.html"
    page.write_text(render_page(summary, top=0))
    light, complaints = shoot(page, tmp_path / "light.png")
    assert complaints == ""
    seen = colours(light)
    assert len(seen) > 50
    assert all(seen.get(colour, 0) > 100 for colour in (EMPTY, ONE, FEW, DRILL))
    dark, complaints = shoot(page, tmp_path / "dark.png", 1280, 2200, "--blink-settings=preferredColorScheme=0")
    assert complaints == ""
    page_light, page_dark = (0xF6, 0xF6, 0xF3), (0x13, 0x15, 0x18)
    assert seen[page_light] > 200_000
    assert colours(dark)[page_dark] > 200_000
    assert page_light not in colours(dark)


@needs_browser
def test_a_browser_draws_damage_in_the_right_place_and_none_without_damage(tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(render_page(summarise([write_log(tmp_path / "log", [attached(), heartbeat(30)])]), top=0))
    clean, _ = shoot(page, tmp_path / "clean.png")
    assert not {ONE, FEW, DRILL} & set(colours(clean))

    events = [attached(), *(violation(FLIP, n, slot=5630 + n) for n in range(3))]
    page.write_text(render_page(summarise([write_log(tmp_path / "log", events)]), top=0))
    picture, _ = shoot(page, tmp_path / "damaged.png")
    pixels = picture.load()
    lanes = [y for y in range(picture.height) if sum(pixels[x, y] == FEW for x in range(picture.width)) >= 5]
    rows = [y for y in lanes if sum(pixels[x, y] == EMPTY for x in range(picture.width)) > 500]
    y = rows[-1]  # the map is below the timeline
    marked = [x for x in range(picture.width) if pixels[x, y] == FEW]
    lane = [x for x in range(picture.width) if pixels[x, y] in (EMPTY, FEW)]
    start, width = lane[0], lane[-1] - lane[0]
    assert (marked[0] - start) / width == pytest.approx(43 / 64, abs=0.005)
    assert (marked[-1] - start) / width == pytest.approx(44 / 64, abs=0.005)


@needs_browser
def test_a_browser_finds_nothing_to_run_in_a_forged_log(tmp_path: Path):
    evil = "\"'></title></svg><img src=x onerror=console.log(1)><script>console.log(2)</script>"
    events = [
        attached(mode=evil),
        violation(ALIAS, 1, request=evil, pool=evil, owner=evil, kind=evil, evidence=(evil,)),
    ]
    page = tmp_path / "page.html"
    page.write_text(render_page(summarise([write_log(tmp_path / "log", events)]), top=0))
    _, complaints = shoot(page, tmp_path / "page.png")
    assert complaints == ""
    page.write_text(page.read_text().replace("<footer>", f"<footer>{evil}"))  # and it would have said so
    _, complaints = shoot(page, tmp_path / "page.png")
    assert "Content Security Policy" in complaints
