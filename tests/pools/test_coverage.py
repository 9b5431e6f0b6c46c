"""The catalogue says what the adapters do, of the classes that the installed SGLang has."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from kvcanary_plugin.coverage import render_coverage
from kvcanary_plugin.pool_patcher.adapters import draft_pool
from kvcanary_plugin.pool_patcher.adapters.catalogue import CATALOGUE
from kvcanary_plugin.versions import CHECKED_SGLANG
from tests.compat.wheels import find_sources

from .cases import CASES, Case

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = {entry.pool: entry for entry in CATALOGUE}


CLASS = re.compile(r"^class (\w+)\(([^)]*)\)", re.MULTILINE)


def find_pool_classes(folder: zipfile.Path) -> set[str]:
    """Names of all classes below a ``mem_cache`` that descend from KVCache, read without importing anything."""
    bases: dict[str, set[str]] = {}
    for text in read_sources(folder):
        for name, parents in CLASS.findall(text):
            bases.setdefault(name, set()).update(re.findall(r"\w+", parents))
    found = {"KVCache"}
    while grown := {name for name, parents in bases.items() if found & parents} - found:
        found |= grown
    return found - {"KVCache", "BaseSWAKVPool"}


def read_sources(folder: zipfile.Path) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from read_sources(entry)
        elif entry.name.endswith(".py"):
            yield entry.read_text(encoding="utf-8")


@pytest.mark.parametrize("release", CHECKED_SGLANG)
def test_every_pool_class_of_a_release_is_in_the_catalogue(release: str):
    found = find_pool_classes(find_sources(release) / "sglang" / "srt" / "mem_cache")
    number = Version(release).release
    expected = {
        entry.pool
        for entry in CATALOGUE
        if Version(entry.since).release <= number and (entry.until is None or number <= Version(entry.until).release)
    }

    assert found - expected == set(), "these are neither covered nor refused"
    assert expected - found == set(), "these are said to be in this release"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_the_catalogue_says_is_read_is_read(case: Case):
    if case.name in ("swa-only", "hybrid-mla", "mha-nvfp4"):
        pytest.skip("a variant with fewer spaces or other halves than the catalogue lists")
    built = case.build()
    draft = draft_pool(built.pool, built.allocator, built.rows, built.window)
    spaces = (draft.main, *draft.companions, *draft.states)
    halves = {space.name: {part.half for part in space.parts} for space in spaces if space.parts}

    assert halves == {name: set(words) for name, words in ENTRIES[case.pool].halves}


def test_every_covered_pool_is_built_by_a_test():
    covered = {entry.pool for entry in CATALOGUE if entry.halves}

    assert covered - {"NSATokenToKVPool"} == {case.pool for case in CASES}  # that is the older name of DSATokenToKVPool


def test_the_page_is_current():
    assert (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8") == render_coverage(), "run scripts/coverage"
