"""Whether SGLang looks as the plugin expects, and what of it is covered."""

from __future__ import annotations

from ..activate import list_patches
from ..config import CHECKS
from ..errors import SeamError
from ..patches.modes import MODE_GAPS
from ..pool_patcher.adapters import COVERED_ALLOCATORS, COVERED_POOLS
from ..pool_patcher.adapters.catalogue import CATALOGUE
from ..pool_patcher.patch import Patch, resolve
from ..pool_patcher.seams import SourceTree
from ..versions import CHECKED_SGLANG, TESTED_SGLANG, installed_sglang, warn_of_unknown
from .checkup import Fact, Problem, Section

POOLS = "sglang.srt.mem_cache"
POOL_BASE = ("sglang.srt.mem_cache.memory_pool", "KVCache")
ABSTRACT_POOLS = {"BaseSWAKVPool"}  # what others are derived from and no server makes
KNOWN_RELEASES = f"use SGLang {CHECKED_SGLANG[0]} to {CHECKED_SGLANG[-1]}, or a kvcanary that knows this one"


def list_drift(patch: Patch, tree: SourceTree) -> list[str]:
    """What is not as declared about one seam: its target as Python sees it, what else its wrapper reads as written."""
    try:
        resolve(patch)
        drifted = []
    except SeamError as error:
        drifted = [str(error)]
    return drifted + tree.list_missing(patch)


def examine_seams() -> tuple[Section, ...]:
    """Compare every declared seam with the installed SGLang; then what this version covers."""
    try:
        version = installed_sglang()
        tree = SourceTree.installed()
    except SeamError as error:
        return (Section("seams", problems=(Problem("error", str(error), KNOWN_RELEASES),)),)
    drift: dict[str, None] = {}
    rows: list[dict[str, str]] = []
    for when, patch in list_patches():
        if patch.applies_to(version):
            lines = list_drift(patch, tree)
            drift.update(dict.fromkeys(lines))  # several patches may be of one seam
            name = f"{patch.module.removeprefix('sglang.srt.')} {patch.owner}.{patch.attribute}"
            rows.append({"wrapped": name, "when": when, "why": patch.why, "state": "drifted" if lines else "ok"})
    problems = [Problem("error", f"seam drifted: {line}", KNOWN_RELEASES) for line in drift]
    drifted = sum(row["state"] != "ok" for row in rows)
    facts = (
        Fact("SGLang", f"{version}, {_say_known(version)}", "warning" if warn_of_unknown(version) else "ok"),
        Fact("seams", f"{drifted} of {len(rows)} drifted", "error")
        if drifted
        else Fact("seams", f"{len(rows)}, all seams as expected"),
    )
    if warning := warn_of_unknown(version):
        problems.append(Problem("warning", warning, KNOWN_RELEASES))
    return (Section("seams", facts, tuple(rows), tuple(problems)), _list_coverage(tree))


def _say_known(version: str) -> str:
    if warn_of_unknown(version):
        return "not known to this kvcanary"
    if version in TESTED_SGLANG:
        return "known, and servers are tested with it"
    return f"known; servers are tested with {' and '.join(TESTED_SGLANG)}"


def _list_coverage(tree: SourceTree) -> Section:
    refused = {entry.pool for entry in CATALOGUE if entry.refused}
    known = {entry.pool for entry in CATALOGUE} | ABSTRACT_POOLS
    pools = tree.list_subclasses(POOLS, POOL_BASE)
    return Section(
        "coverage",
        (
            Fact("checks", CHECKS),
            Fact("pools", tuple(pool for pool in pools if pool in COVERED_POOLS)),
            Fact("uncovered", tuple(pool for pool in pools if pool in refused or pool not in known)),
            Fact("allocators", tuple(COVERED_ALLOCATORS)),
            Fact("partly covered", tuple(f"{gap.setting}: {gap.covered}" for gap in MODE_GAPS if gap.covered)),
            Fact(
                "refused",
                (
                    *(f"other {gap.setting}" if gap.covered else gap.setting for gap in MODE_GAPS),
                    "--kv-canary",
                    "encoder-decoder models",
                ),
            ),
        ),
    )
