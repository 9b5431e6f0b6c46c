"""``kvcanary report``: exit codes, forms, and files that must not be lost."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvcanary_plugin.cli import main
from tests.report.incident import FLIP, attached, event, heartbeat, injected, night, violation, write_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "events.jsonl", [attached(), violation(FLIP, 1)])


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([attached(), heartbeat(30)], 0),
        ([attached(), event("detached", 1, why="x")], 0),
        ([attached(), injected(1, 5, 5)], 0),
        ([attached(), violation(FLIP, 1)], 1),
        ([attached(), injected(1, 5635, 700), violation(FLIP, 2)], 1),
        ([event("more", 1, hidden=1, step=1)], 1),
        ([{"schema": 3}], 2),
    ],
)
@pytest.mark.parametrize("form", ["text", "json", "html"])
def test_exit_codes(tmp_path: Path, events: list, code: int, form: str):
    path = write_log(tmp_path / "events.jsonl", events)
    options = {"text": [], "json": ["--json"], "html": ["--html", str(tmp_path / "page.html")]}[form]
    assert main(["report", str(path), *options]) == code
    assert (tmp_path / "page.html").exists() == (form == "html" and code < 2)


def test_one_bad_file_among_good_ones_is_an_error_and_prints_nothing_else(tmp_path: Path, log: Path, capsys):
    bad = tmp_path / "bad"
    bad.write_text("no\n")
    assert main(["report", str(log), str(bad)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{bad}:1 is not JSON" in shown.err


def test_json_has_what_the_text_has(tmp_path: Path, capsys):
    first, second = night()
    files = [write_log(tmp_path / "0", first), write_log(tmp_path / "1", second)]
    assert main(["report", "--json", *map(str, files)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["damage"], document["hidden"]) == (1, True, 44)
    assert [file["event_count"] for file in document["files"]] == [len(first), len(second)]
    assert document["counts"]["tier"] == {"L1 device": 73, "L3 storage": 9}
    assert [server["ranks"] for server in document["servers"]] == [[0], [1]]
    assert document["servers"][1]["endings"][0]["event"] == "detached"
    row = next(finding for finding in document["findings"] if finding["check"] == "chain")
    assert (row["count"], row["slots"], row["ranks"], row["drill"]) == (60, list(range(920, 950)), [0, 1], None)
    assert row["violation"]["expected_hash"] == "0000000000000002"
    assert row["facts"]["tier"] == ["L1 device"]
    assert main(["report", *map(str, files)]) == 1
    text = capsys.readouterr().out
    for finding in document["findings"]:
        assert f"SUMMARY: kvcanary: {finding['summary']}\n" in text
        for lines in finding["facts"].values():
            assert all(line in text for line in lines)


def test_a_page_is_readable_by_owner_and_group_and_never_replaced_unasked(tmp_path: Path, log: Path, capsys):
    page = tmp_path / "page.html"
    before = os.umask(0o022)
    try:
        assert main(["report", str(log), "--html", str(page)]) == 1
    finally:
        os.umask(before)
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    assert capsys.readouterr().out == f"kvcanary: wrote {page} ({page.stat().st_size / 1024:.0f} KiB)\n"
    page.write_text("mine")
    assert main(["report", str(log), "--html", str(page)]) == 2
    assert f"{page} exists; give --html another name, or add --force" in capsys.readouterr().err
    assert page.read_text() == "mine"
    page.chmod(0o777)
    assert main(["report", str(log), "--html", str(page), "--force"]) == 1
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    assert {entry.name for entry in tmp_path.iterdir()} == {"events.jsonl", "page.html"}


def test_a_page_never_replaces_a_log_or_follows_a_link(tmp_path: Path, log: Path, capsys):
    before = log.read_bytes()
    (tmp_path / "link").symlink_to(log)
    for target in (log, tmp_path / "link"):
        assert main(["report", str(log), "--html", str(target), "--force"]) == 2
        assert "is the log itself" in capsys.readouterr().err
    assert log.read_bytes() == before
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    assert main(["report", str(log), "--html", str(tmp_path / "dangling")]) == 2
    assert not (tmp_path / "elsewhere").exists()
    assert main(["report", str(log), "--html", str(tmp_path)]) == 2
    assert "no regular file" in capsys.readouterr().err
    assert main(["report", str(log), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--top", "-1"], ["--top", "x"], ["--json", "--html", "x"]])
def test_wrong_usage(log: Path, arguments: list[str], capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["report", *([str(log)] if arguments else []), *arguments])
    assert stopped.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_it_prints_to_a_terminal_of_any_encoding_and_into_a_pipe_that_closes(tmp_path: Path, encoding: str):
    events = [violation(FLIP, n, layer=n, pool="p\u00fctz \u202e \x1b[2J") for n in range(2000)]
    path = write_log(tmp_path / "\u00fc.jsonl", events)
    command = [sys.executable, "-m", "kvcanary_plugin.cli", "report", "--top", "0", str(path)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    whole = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (whole.returncode, whole.stderr) == (1, b"")
    assert b"\x1b" not in whole.stdout
    assert whole.stdout.count(b"KVCANARY:") == 2000
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1
