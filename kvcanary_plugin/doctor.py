"""``kvcanary doctor``: what is installed, whether its seams look as expected, and what this version covers."""

from __future__ import annotations

import importlib.metadata
import platform

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__
from .activate import list_patches
from .config import CHECKS
from .errors import SeamError
from .patches.modes import MODE_GAPS
from .pool_patcher.adapters import COVERED_ALLOCATORS, COVERED_POOLS
from .pool_patcher.adapters.catalogue import CATALOGUE
from .pool_patcher.patch import Patch, resolve
from .pool_patcher.seams import SourceTree
from .versions import TESTED_SGLANG, installed_sglang, warn_of_unknown

PACKAGES = ("sglang", "torch", "triton", "wrapt", "numpy", "xxhash")
POOLS = "sglang.srt.mem_cache"
POOL_BASE = ("sglang.srt.mem_cache.memory_pool", "KVCache")
ABSTRACT_POOLS = {"BaseSWAKVPool"}  # what others are derived from and no server makes


def list_drift(patch: Patch, tree: SourceTree) -> list[str]:
    """What is not as declared about one seam: its target as Python sees it, what else its wrapper reads as written."""
    try:
        resolve(patch)
        drifted = []
    except SeamError as error:
        drifted = [str(error)]
    return drifted + tree.list_missing(patch)


def run_doctor(console: Console) -> int:
    """Print the findings. Returns 0 if the installed SGLang looks as expected, 1 if a seam has drifted."""
    console.print(f"kvcanary {__version__}, Python {platform.python_version()}", highlight=False)
    for package in PACKAGES:
        try:
            console.print(f"  {package} {importlib.metadata.version(package)}", highlight=False)
        except importlib.metadata.PackageNotFoundError:
            console.print(f"  {package} is not installed", highlight=False)
    try:
        version = installed_sglang()
        tree = SourceTree.installed()
    except SeamError as error:
        console.print(f"[red]{error}", highlight=False)
        return 1
    if warning := warn_of_unknown(version):
        console.print(f"[yellow]{warning}", highlight=False)
    elif version not in TESTED_SGLANG:
        console.print(
            f"[yellow]SGLang {version}: its seams were checked, but servers were run with "
            f"{', '.join(TESTED_SGLANG)} only",
            highlight=False,
        )

    table = Table(title=f"Seams in SGLang {version}")
    for heading in ("wrapped", "when", "why", "state"):
        table.add_column(heading, overflow="fold")
    drifted: list[str] = []
    for when, patch in list_patches():
        if patch.applies_to(version):
            lines = list_drift(patch, tree)
            drifted += lines
            name = f"{patch.module.removeprefix('sglang.srt.')}\n{patch.owner}.{patch.attribute}"
            table.add_row(name, when, patch.why, "[red]drifted" if lines else "ok")
    console.print(table)
    refused = {entry.pool for entry in CATALOGUE if entry.refused}
    known = {entry.pool for entry in CATALOGUE} | ABSTRACT_POOLS
    pools = tree.list_subclasses(POOLS, POOL_BASE)
    for name, values in (
        ("checks", CHECKS),
        ("pools", [pool for pool in pools if pool in COVERED_POOLS]),
        ("uncovered", [pool for pool in pools if pool in refused or pool not in known]),
        ("allocators", COVERED_ALLOCATORS),
        ("refused", [gap.setting for gap in MODE_GAPS] + ["--kv-canary", "encoder-decoder models"]),
    ):
        console.print(f"{name:<11} {', '.join(values)}", highlight=False, soft_wrap=True)
    for line in drifted:
        console.print(f"[red]drifted[/]     {escape(line)}", highlight=False, soft_wrap=True)
    if not drifted:
        console.print("[green]all seams as expected")
    return 1 if drifted else 0
