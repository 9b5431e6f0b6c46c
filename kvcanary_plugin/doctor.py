"""``kvcanary doctor``: what is installed, which seams would be wrapped, and what this version covers."""

from __future__ import annotations

import importlib.metadata
import platform

from rich.console import Console
from rich.table import Table

from . import __version__
from .config import CHECKS, Config
from .errors import SeamError
from .patches import declare_engine_patches, declare_parser_patches
from .patches.server_args import MODE_GAPS
from .pool_patcher.adapters import COVERED_ALLOCATORS, COVERED_POOLS
from .pool_patcher.patch import Patch, resolve
from .runtime.session import Session
from .versions import TESTED_SGLANG, installed_sglang

PACKAGES = ("sglang", "torch", "triton", "wrapt", "numpy", "xxhash")


def list_patches() -> list[tuple[str, Patch]]:
    """Every declared patch, with the modes in which it is installed."""
    session = Session(Config(mode="log"))
    return [("every mode", patch) for patch in declare_parser_patches()] + [
        ("unless off", patch) for patch in declare_engine_patches(session)
    ]


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
    except SeamError as error:
        console.print(f"[red]{error}", highlight=False)
        return 1
    if version not in TESTED_SGLANG:
        console.print(
            f"[yellow]SGLang {version} was not run with this version; {', '.join(TESTED_SGLANG)} was. Seams decide."
        )

    table = Table(title=f"Seams in SGLang {version}")
    for heading in ("wrapped", "when", "why", "state"):
        table.add_column(heading, overflow="fold")
    drifted = 0
    for when, patch in list_patches():
        if not patch.applies_to(version):
            continue
        try:
            resolve(patch)
            state = "ok"
        except SeamError as error:
            drifted += 1
            state = str(error)
        table.add_row(
            f"{patch.module.removeprefix('sglang.srt.')}\n{patch.owner}.{patch.attribute}", when, patch.why, state
        )
    console.print(table)
    for name, values in (
        ("checks", CHECKS),
        ("pools", COVERED_POOLS),
        ("allocators", COVERED_ALLOCATORS),
        ("refused", [gap.setting for gap in MODE_GAPS] + ["--kv-canary", "encoder-decoder models"]),
    ):
        console.print(f"{name:<11} {', '.join(values)}", highlight=False, soft_wrap=True)
    console.print("[red]drifted" if drifted else "[green]all seams as expected")
    return 1 if drifted else 0
