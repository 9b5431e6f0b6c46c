"""Every declared seam against the published wheel of every supported release, without importing any of them."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest

from kvcanary_plugin.activate import list_patches
from kvcanary_plugin.patches.allocators import PAGED, TOKEN
from kvcanary_plugin.pool_patcher.seams import SourceTree, check_seams
from kvcanary_plugin.versions import CHECKED_SGLANG, TESTED_SGLANG
from tests.compat.wheels import find_sources

PATCHES = [patch for _, patch in list_patches()]
# Ways to free a slot that end in a wrapped one, or only queue it until such a one is called.
ENDS_IN_A_WRAPPED_ONE = {
    "free_full",
    "free_full_segment",
    "free_full_segments",
    "free_group_begin",
    "free_group_end",
    "free_page_ids",
    "free_segment",
    "free_segments",
}


@pytest.fixture(params=CHECKED_SGLANG, scope="module")
def version(request):
    return request.param


@pytest.fixture(scope="module")
def tree(version):
    return SourceTree(find_sources(version))


def applied(version):
    return [patch for patch in PATCHES if patch.applies_to(version)]


def test_every_seam_is_where_and_as_declared(tree, version):
    assert check_seams(tree, PATCHES, version) == []


def test_no_release_is_without_a_seam_the_guard_needs(version):
    wrapped = [f"{patch.owner}.{patch.attribute}" for patch in applied(version)]

    for needed in (
        r"ServerArgs\.add_cli_args",
        r"ServerArgs\.from_cli_args",
        r"ModelRunner\.(init|alloc)_memory_pool",
        r"ModelRunner\.forward",
        r"Scheduler\.__init__",
        r"Scheduler\.run_batch",
        r"Scheduler\.process_batch_result",
        r"TokenToKVPoolAllocator\.free",
        r"TokenToKVPoolAllocator\.clear",
        r"PagedTokenToKVPoolAllocator\.(free|_release_page_ids)",
        r"PagedTokenToKVPoolAllocator\.clear",
    ):
        assert any(re.fullmatch(needed, name) for name in wrapped), (needed, wrapped)


def test_a_slot_cannot_be_freed_in_a_way_nobody_has_looked_at(tree, version):
    """A release may add another way past those that are wrapped, which no wrapper would miss."""
    # All others consist of these two.
    owners = {(patch.module, patch.owner) for patch in applied(version) if patch.owner in (TOKEN, PAGED)}
    assert {owner for _, owner in owners} == {TOKEN, PAGED}
    for module, owner in owners:
        wrapped = {patch.attribute for patch in applied(version) if patch.owner == owner}
        ways = {name for name in tree.methods_of(module, owner) if re.match("_?(free|release)", name)}
        if "_release_page_ids" in wrapped:
            ways.discard("free")  # ends there too
        assert ways - wrapped - ENDS_IN_A_WRAPPED_ONE == set(), (owner, version)


def test_a_setting_that_is_refused_was_not_there_before_its_first_release(tree, version):
    """Otherwise an earlier release would start unguarded with it."""
    from packaging.version import Version

    from kvcanary_plugin.patches.modes import GROUPS_SINCE, IN_TREE, MODE_GAPS

    has_groups = Version(version) >= Version(GROUPS_SINCE)
    for gap in (*MODE_GAPS, IN_TREE):
        assert tree.has(gap.home(has_groups)) == (Version(gap.since) <= Version(version)), gap.field


def test_releases_with_servers_are_among_those_checked():
    assert set(TESTED_SGLANG) <= set(CHECKED_SGLANG)
    assert list(CHECKED_SGLANG) == sorted(CHECKED_SGLANG, key=lambda text: _key(text))


def _key(text):
    from packaging.version import Version

    return Version(text)


# One edit of a release each, and what has to be said about it.
MUTATIONS = {
    "renamed parameter": (
        "model_executor/model_runner.py",
        r"(    def forward\(\s*self,\s*)forward_batch: ForwardBatch",
        r"\1batch: ForwardBatch",
        r"model_runner:ModelRunner\.forward takes \(self, batch.*\); "
        r"expected it to begin \(self, forward_batch\)",
    ),
    "renamed method": (
        "managers/scheduler.py",
        r"def run_batch\(",
        "def launch_batch(",
        r"scheduler:Scheduler\.run_batch is missing: Scheduler has no method 'run_batch'",
    ),
    "other kind of method": (
        "server_args.py",
        r"@staticmethod\n    def add_cli_args\(",
        "@classmethod\n    def add_cli_args(",
        r"server_args:ServerArgs\.add_cli_args is a classmethod; expected a staticmethod",
    ),
    "moved class": (
        "mem_cache/allocator/token.py",
        r"class TokenToKVPoolAllocator\(",
        "class TokenAllocator(",
        r"allocator\.token:TokenToKVPoolAllocator\.free is missing: no class TokenToKVPoolAllocator",
    ),
    "renamed field": (
        "managers/schedule_batch.py",
        r"\bretraction_count\b",
        "retractions",
        r"schedule_batch:Req\.retraction_count is missing, which the wrapper of Scheduler\.run_batch reads",
    ),
    "renamed setting": (
        "server_args.py",
        r"\benable_hisparse\b",
        "enable_sparse",
        r"server_args:ServerArgs\.enable_hisparse is missing",
    ),
}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang")
    with zipfile.ZipFile(find_sources("0.5.15").root.filename) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize(("file", "pattern", "replacement", "words"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_seam_that_moves_is_named_with_what_was_expected(
    unpacked: Path, tmp_path: Path, file: str, pattern: str, replacement: str, words: str
):
    root = tmp_path / "moved"
    shutil.copytree(unpacked, root)
    assert check_seams(SourceTree(root), PATCHES, "0.5.15") == []
    source = root / "sglang/srt" / file
    text, count = re.subn(pattern, replacement, source.read_text())
    assert count, "the edit did not find its place"
    source.write_text(text)

    drifted = check_seams(SourceTree(root), PATCHES, "0.5.15")
    assert drifted
    assert any(re.search(words, line) for line in drifted), drifted


def test_a_missing_module_is_named(unpacked: Path, tmp_path: Path):
    root = tmp_path / "moved"
    shutil.copytree(unpacked, root)
    (root / "sglang/srt/mem_cache/allocator/paged.py").unlink()

    drifted = check_seams(SourceTree(root), PATCHES, "0.5.15")
    assert any(
        "allocator.paged:PagedTokenToKVPoolAllocator.free is missing: no such module" in line for line in drifted
    )
