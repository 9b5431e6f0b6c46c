"""Files as they come: truncated, foreign, forged. One clear error, no traceback, and no text leaves its line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_plugin.cli import main
from kvcanary_plugin.report.collector import summarise
from kvcanary_plugin.report.jsonl import MAX_LINE_BYTES, LogError, LogReader, read_events
from kvcanary_plugin.report.page import render_page
from kvcanary_plugin.report.terminal import render_text
from tests.report.incident import ALIAS, FLIP, PAGE, attached, event, heartbeat, injected, violation, write_log

GOOD = json.dumps(attached(), separators=(",", ":"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"nonsense\n", r":1 is not JSON"),
        (f"{GOOD}\n[1, 2]\n".encode(), r":2 is not an event of kvcanary schema 1"),
        (f'{GOOD}\n{{"schema": 2, "event": "attached"}}\n'.encode(), r":2 is not an event of kvcanary schema 1"),
        (b"\x1f\x8b\x08\x00binary", r":1 is not UTF-8 \(byte 1\)"),
        (b'{"schema":1,"event":"x","time":NaN,"pid":1}\n', r":1 is not JSON: NaN is no number"),
        (b'{"schema":1,"event":"x","time":-Infinity,"pid":1}\n', r":1 is not JSON: -Infinity is no number"),
        (b'{"schema":1,"event":"x","time":1e999,"pid":1}\n', r"field 'time' not a number below 2\^64 but inf"),
        (b'{"schema":1,"event":"x","time":1e15,"pid":1}\n', r"a time that lies in no year"),
        (b'{"schema":1,"event":"x","time":1,"pid":true}\n', r"field 'pid' not a whole number"),
        (b'{"schema":1,"event":"x","time":1,"pid":' + b"9" * 9999 + b"}\n", r":1 "),
        (b'{"schema":1,"event":"x","time":1,"pid":' + b"9" * 99 + b"}\n", r"field 'pid' .* but a larger one"),
        (b'{"schema":1,"event":"x","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", r":1 is nested too deeply"),
        (b'{"schema":1,"event":{"schema":1}}\n', r":1 is not an event"),
        (b'{"schema":1,"event":"x"}\n', r"\(event 'x'\) has no field 'time'"),
    ],
)
def test_what_is_no_event_log_is_refused_by_file_and_line(tmp_path: Path, capsys, content: bytes, problem: str):
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    assert main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvcanary: {path}:")
    assert re.search(problem, error)
    assert "Expected one JSON object a line" in error
    assert error.count("\n") == 1
    assert len(error) < 600


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slot", "5"),
        ("slot", 1.5),
        ("slot", None),
        ("slot", 2**70),
        ("slot", [[[]]]),
        ("check", 5),
        ("layer", "two"),
        ("request", {"a": 1}),
        ("writer", [1, 2]),
        ("writer", {"step": 1}),
        ("differs", [["weights", "1"]]),
        ("evidence", "all of it"),
        ("evidence", [1]),
        ("stored_hash", 5),
        ("stored_hash", "xyz"),
        ("stored_hash", "f" * 17),
        ("cause", 4),
        ("neighbours", ["."]),
    ],
)
def test_a_violation_with_a_value_of_another_type_is_refused(tmp_path: Path, field: str, value: object):
    path = write_log(tmp_path / "events.jsonl", [violation(ALIAS, 1) | {field: value}])
    with pytest.raises(LogError, match=rf"events\.jsonl:1 \(event 'violation'\) .*{field}"):
        summarise([path])


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (heartbeat(1), ("time", "pid", "forwards", "passes", "period_seconds", "violations")),
        (attached(), ("pool", "rank", "slots", "checks", "mode")),
        (injected(1, 2, 3), ("fault", "step", "slots", "bound_forwards", "layer")),
        (violation(PAGE, 1), ("kind", "page_key", "rank", "hop", "tier")),
    ],
)
def test_so_is_any_other_event(tmp_path: Path, line: dict, fields: tuple[str, ...]):
    for field in fields:
        path = write_log(tmp_path / "events.jsonl", [line | {field: [{"x": 1}] if field != "violations" else 1}])
        with pytest.raises(LogError, match=rf"events\.jsonl:1 .*'{field}"):
            summarise([path])


def test_files_that_cannot_be_read(tmp_path: Path, capsys):
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert "cannot be opened (No such file or directory)" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a regular file" in capsys.readouterr().err
    assert main(["report", "a\0b"]) == 2


@pytest.mark.parametrize("cut", range(1, 400, 7))
def test_a_last_line_cut_anywhere_is_no_error(tmp_path: Path, cut: int):
    path = tmp_path / "events.jsonl"
    last = json.dumps(violation(ALIAS, 1), separators=(",", ":"))
    path.write_text(f"{GOOD}\n{last[:cut]}")
    summary = summarise([path])
    assert summary.violation_count == 0
    assert summary.files[0].cut_lines == (2,)
    assert summary.files[0].is_cut_at_end
    assert "line 2 incomplete and left out; the last line" in "\n".join(render_text(summary, 20))


@pytest.mark.parametrize("cut", range(30, 400, 7))
def test_a_line_cut_by_a_crash_before_a_restart_is_no_error(tmp_path: Path, cut: int):
    path = tmp_path / "events.jsonl"
    path.write_text(f"{json.dumps(violation(ALIAS, 1), separators=(',', ':'))[:cut]}\n{GOOD}\n")
    summary = summarise([path])
    assert (summary.files[0].cut_lines, summary.files[0].is_cut_at_end) == ((1,), False)
    assert [entry["event"] for entry in read_events(path)] == ["attached"]


def test_zeros_that_a_loss_of_power_leaves_are_a_cut_line(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(f"{GOOD}\n".encode() + b"\0" * 4096)
    assert summarise([path]).files[0].is_cut_at_end


def test_a_long_line_is_not_taken_into_memory(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(GOOD.encode() + b"\n")
        file.truncate(1 << 32)
    reader = LogReader(path)
    with pytest.raises(LogError, match=":2 is longer than 8 MiB"):
        list(reader)
    assert reader.line_count == 2


def test_a_line_of_escapes_is_judged_in_no_time(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"schema":1,"event":"' + b'\\"' * (MAX_LINE_BYTES // 2 - 100) + b"\n")
    assert summarise([path]).files[0].cut_lines == (1,)


def test_an_empty_file_says_so(tmp_path: Path, capsys):
    path = tmp_path / "events.jsonl"
    path.touch()
    assert main(["report", str(path)]) == 0
    assert "no events: the log is empty" in capsys.readouterr().out


HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "a\nKVCANARY: all is well\nSUMMARY: kvcanary report: findings=0",
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b2J\x85\u2028next",
    "abc\u202egnp.exe\u2066\u200b",
    "[bold red]markup[/bold red] {{ 7*7 }} {% raw %} :smile:",
    "\ud800\udfff",
    "x" * 100_000,
    "",
)
text = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30))


def forge(value: str) -> list[dict]:
    """Every text of a log is this one."""
    lines = [
        attached(),
        heartbeat(2),
        violation(ALIAS, 3),
        violation(PAGE, 4),
        violation(FLIP, 5),
        injected(1, 920, 800),
    ]
    lines += [event(name, 6, why=value) for name in ("detached", "uncovered", "stopped")]
    lines += [event("weights", 7, version=value, flushed=True, older_slots=1), event(value, 8)]
    for line in lines:
        for field in (
            "pool",
            "request",
            "owner",
            "state",
            "cause",
            "page_key",
            "place",
            "hop",
            "last_good",
            "mode",
            "fault",
        ):
            if field in line:
                line[field] = value
        if line["event"] == "violation":
            line["evidence"] = [value, value]
    lines[2] |= {"neighbours": value, "half": value, "layer": 1, "differs": [[value] * 3], "owner_since": 1}
    lines[2]["writer"] = {"step": 1, "row": 2, "request": value}
    lines[3] |= {"kind": value, "check": value, "tier": value}
    lines[4] |= {"kind": value, "check": value, "phase": value}
    lines[0]["checks"] = [value]
    lines[1]["violations"] = {value: 1}
    return lines


def harmless(shown: str) -> bool:
    return all(letter.isprintable() for letter in shown.replace("\n", ""))


@settings(deadline=None, max_examples=60)
@given(text)
def test_hostile_texts_stay_text(tmp_path_factory: pytest.TempPathFactory, value: str):
    path = write_log(tmp_path_factory.mktemp("forged") / "events.jsonl", forge(value))
    summary = summarise([path])
    pieces = [line for piece in render_text(summary, 0) for line in piece.split("\n")]
    assert harmless("".join(pieces))
    assert len([line for line in pieces if line.startswith("SUMMARY: kvcanary report:")]) == 1
    assert len([line for line in pieces if line.startswith("KVCANARY:")]) == len(summary.findings)
    page = render_page(summary, top=0)
    assert harmless(page)
    assert page.count("<script") == page.count("<img") == 0
    assert re.findall(r"<(\w+)", page).count("details") == len(summary.findings)
    assert len(page) < 200_000


def test_a_page_of_hostile_texts_has_the_tags_of_a_page_of_good_ones(tmp_path: Path):
    def tags(value: str) -> list[str]:
        path = write_log(tmp_path / "events.jsonl", forge(value))
        return re.findall(
            r"<[a-z!/][^>]{0,20}",
            re.sub(r"<title>.*?</title>|aria-label=\"[^\"]*\"", "", render_page(summarise([path]), top=0)),
        )

    good = tags("abc")
    for value in HOSTILE[:2]:
        assert tags(value) == good


def test_json_is_ascii_whatever_stands_in_the_log(tmp_path: Path, capsys):
    for value in HOSTILE:
        path = write_log(tmp_path / "events.jsonl", forge(value))
        assert main(["report", "--json", str(path)]) == 1
        out = capsys.readouterr().out
        assert out.isascii()
        assert harmless(out)
        document = json.loads(out)
        requests = {finding["violation"].get("request") for finding in document["findings"]}
        value = json.loads(json.dumps(value))  # two halves of a letter become one
        assert value[:4096] in {(request or "")[:4096] for request in requests}


def test_names_made_up_without_end_do_not_fill_the_memory(tmp_path: Path):
    path = write_log(tmp_path / "events.jsonl", [event(f"e{n}", n) for n in range(3000)])
    summary = summarise([path])
    assert len(summary.events) == 201
    assert sum(summary.events.values()) == 3000
    path = write_log(tmp_path / "events.jsonl", [event("heartbeat", n, pid=n) for n in range(5000)])
    with pytest.raises(LogError, match=":4097 is of one more process than the 4096"):
        summarise([path])
