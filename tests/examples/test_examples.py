"""Every example runs as it stands and shows what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints; it must end with exit code 0."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVCANARY")}
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


@pytest.mark.live
def test_attach():
    text = run("attach.py")
    assert "guarding, mode log" in text
    assert "found nothing" in text
    assert text.count("exit code 0") == 2


@pytest.mark.live
def test_drill(tmp_path):
    page = tmp_path / "drill.html"
    text = run("drill.py", str(page))
    assert 'kvcanary_violations_total{check="content"' in text
    assert "KvcanaryDamagedKV: " in text
    assert "flip_running" in page.read_text()


@pytest.mark.live
def test_openai_client():
    text = run("openai_client.py")
    assert "pieces discarded: kvcanary: the KV cache of this request is damaged" in text
    assert "4 answers, 1 different" in text


def test_storage_tier():
    text = run("storage_tier.py")
    assert "same bytes  True" in text
    assert "read back   [True, False, True, True]" in text
    assert "fsck ends with 1" in text


def test_every_example_is_tested_and_listed():
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    tested = {f"{name.removeprefix('test_')}.py" for name in globals() if name.startswith("test_")}
    assert programs == tested - {"every_example_is_tested_and_listed.py"}
    listed = (EXAMPLES / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/*.*")]:
        assert f"({path.relative_to(EXAMPLES)})" in listed
