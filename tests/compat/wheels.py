"""The sources of published SGLang releases, taken out of their wheels and kept in the user's cache, about 2 MB each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

PARTS = (
    "managers",
    "model_executor",
    "disaggregation",
    "mem_cache",
    "arg_groups",
    "beam_search",
    "configs",
    "distributed",
    "speculative",
)


def find_sources(version: str) -> zipfile.Path:
    """The folder that holds ``sglang`` of that release; downloads its wheel the first time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcanary" / "wheels"
    parts = zlib.crc32(",".join(PARTS).encode())  # what was kept with other parts may lack a module
    archive = cache / f"sglang-{version}-{parts:08x}.zip"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            wheel = _download(version, Path(folder))
            kept = Path(folder) / archive.name
            _keep_sources(wheel, kept)
            kept.replace(archive)
    return zipfile.Path(archive)


def _download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", f"--dest={folder}", f"sglang=={version}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"SGLang {version} cannot be downloaded to compare its seams:\n{done.stderr}"
    (wheel,) = folder.glob("*.whl")
    return wheel


def _keep_sources(wheel: Path, archive: Path) -> None:
    folders = tuple(f"sglang/srt/{part}/" for part in PARTS)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            is_top = name.startswith("sglang/srt/") and name.count("/") == 2
            if name.endswith(".py") and (is_top or name.startswith(folders)):
                target.writestr(name, source.read(name))
