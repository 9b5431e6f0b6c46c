"""The soak of a GPU server, on a CPU: the same command, with the modes and the small model that a CPU can do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from kvcanary_plugin.versions import installed_sglang

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(Version(installed_sglang()) != Version("0.5.15"), reason="its faults are those of 0.5.15"),
]
COMMAND = [sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "server" / "gpu_soak.py"), "--device=cpu"]


def soak(folder, *more):
    """Returns what it exited with, and what it wrote of its mode."""
    flags = ["--modes=page1", "--minutes=0.1", f"--out={folder}", *more]
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True)
    modes = json.loads((folder / "soak.json").read_text())["modes"]
    return done, modes["page1"]


@pytest.mark.skipif(
    os.environ.get("KVCANARY_TEST_SOAK") != "1", reason="takes minutes; asked for by KVCANARY_TEST_SOAK=1"
)
def test_clean_minutes_and_every_fault_behind_them(tmp_path):
    done, row = soak(tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert row["reports"] == []
    assert all(row["counts"][key] for key in ("requests", "forwards", "verified", "stored", "folded"))
    assert "10 of 10 found, nothing unexplained" in row["drill"]
    said = subprocess.run([*COMMAND, f"--status={tmp_path}"], capture_output=True, text=True)
    assert "| page1 | done |" in said.stdout


def test_damage_in_the_clean_part_is_told(tmp_path):
    done, row = soak(tmp_path, "--inject=swap_entries@5")

    assert done.returncode == 1, done.stdout + done.stderr
    assert {report["check"] for report in row["reports"]} == {"chain"}


def test_a_server_that_does_not_start_is_told_apart(tmp_path):
    done, row = soak(tmp_path, "--inject=flip_nothing@30")

    assert done.returncode == 2, done.stdout + done.stderr
    assert row["state"] == "not started"
    assert "no fault 'flip_nothing'" in row["why"]
