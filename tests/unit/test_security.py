"""What must not get in: faults from outside, text that steers a terminal. What must not get out: salts, passwords."""

import ast
import dataclasses
import json
import logging
import os
import stat
from pathlib import Path

import pytest
from sglang.srt.server_args import prepare_server_args

from kvcanary_plugin import activate as activation
from kvcanary_plugin.config import ALLOW_INJECT_VARIABLE, OPTIONS, Config, read_config, to_environment
from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.report.jsonl import EventLog
from kvcanary_plugin.report.metrics import COUNTERS, GAUGES
from kvcanary_plugin.report.reporter import Reporter
from kvcanary_plugin.report.text import render_block, render_line
from kvcanary_plugin.runtime.control import CHANGEABLE, Change, parse_change
from kvcanary_plugin.runtime.identity import conceal
from tests.engine import Engine

ROOT = Path(__file__).parents[2]
SPEC = "flip_running@1"
STEERING = "a\x1b]0;owned\x07\r\nkvcanary: all is well\u2028\u202e\x9b31m" + "x" * 5000
SALT = "tenant-salt-7f3a"


@pytest.fixture
def clean_slate(monkeypatch):
    for option in OPTIONS:
        monkeypatch.setenv(option.variable, "")  # also makes monkeypatch take back what the parser exports
    monkeypatch.delenv(ALLOW_INJECT_VARIABLE, raising=False)
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    activation.deactivate()
    logging.root.handlers[:] = handlers  # SGLang's parser sets up its own
    logging.root.setLevel(level)


# Faults from outside


@pytest.mark.usefixtures("clean_slate")
@pytest.mark.parametrize("by", ["flag", "yaml", "variable"])
@pytest.mark.parametrize("permission", [None, "", "0", "true", "yes", "1 "])
def test_no_fault_is_injected_without_permission_from_the_environment(tmp_path, monkeypatch, capsys, by, permission):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (tmp_path / "server.yaml").write_text(f'kvcanary-inject: "{SPEC}"\n')
    flags = {"flag": [f"--kvcanary-inject={SPEC}"], "yaml": ["--config", str(tmp_path / "server.yaml")]}.get(by, [])
    if by == "variable":
        monkeypatch.setenv("KVCANARY_INJECT", SPEC)
    if permission is not None:
        monkeypatch.setenv(ALLOW_INJECT_VARIABLE, permission)

    def start():
        activation.activate()
        prepare_server_args([f"--model-path={tmp_path}", "--device=cpu", "--kvcanary=log", *flags])

    with pytest.raises(SystemExit):
        start()
    assert f"set {ALLOW_INJECT_VARIABLE}=1" in capsys.readouterr().err


def test_permission_alone_injects_nothing_and_is_not_passed_on_by_settings():
    assert read_config({ALLOW_INJECT_VARIABLE: "1", "KVCANARY": "log"}).inject is None
    assert ALLOW_INJECT_VARIABLE not in to_environment(Config(mode="log", inject=SPEC))
    assert not {"allow_inject", ALLOW_INJECT_VARIABLE} & {option.field for option in OPTIONS}
    with pytest.raises(ConfigError, match="refused"):
        read_config(to_environment(Config(mode="log", inject=SPEC)))


@pytest.mark.parametrize(
    "text",
    [f"inject={SPEC}", "allow_inject=1", f"mode=log&inject={SPEC}", "log=/etc/x", "hf3fs=/", "allow_uncovered=1"],
)
def test_a_control_request_reaches_mode_checks_and_budget_only(text):
    assert set(CHANGEABLE) == {"mode", "checks", "scrub_budget"}
    assert {field.name for field in dataclasses.fields(Change)} == {"id", "mode", "checks", "scrub_budget", "audit"}
    with pytest.raises(ConfigError, match="cannot be changed in a running server"):
        parse_change(f"kvcanary?{text}")
    assert parse_change("kvcanary?mode=log").mode == "log"


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "code", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("os", "system"), ("os", "popen"), ("torch", "load"), ("np", "load"), ("tempfile", "mktemp")}


def find_forbidden(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from [node.module] if str(node.module).split(".")[0] in FORBIDDEN_MODULES else []
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS:
                yield function.id
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                name = function.value.id, function.attr
                yield from [".".join(name)] if name in FORBIDDEN_ATTRIBUTES else []
            yield from ("shell=True" for word in node.keywords if word.arg == "shell")


def test_nothing_that_is_read_can_run_as_code():
    files = [*(ROOT / "kvcanary_plugin").rglob("*.py"), *(ROOT / "patches").glob("*.py")]
    assert len(files) > 100
    assert {file.name: found for file in files if (found := list(find_forbidden(ast.parse(file.read_text()))))} == {}


@pytest.mark.parametrize(
    "source", ["import pickle", "from yaml import load", "eval('1')", "torch.load(p)", "run(c, shell=True)"]
)
def test_that_would_be_found(source):
    assert list(find_forbidden(ast.parse(source)))


# What a client may put into a log


def violations_of(rid):
    """A real violation that a request with this id met, over a slot that one with this id wrote."""
    engine = Engine()
    request = engine.request(20)
    request.rid = rid
    engine.prefill(request)
    engine.decode(request)
    row = engine.rows.req_to_token[request.req_pool_idx]
    row[5] = int(row[6])
    engine.decode(request)
    assert engine.violations
    return engine.violations


def test_a_request_id_stays_on_its_line_and_steers_nothing(caplog, tmp_path):
    violations = violations_of(STEERING)
    for name in (violations[0].request, violations[0].writer.request):
        assert name == STEERING[: len(name)]  # it may be cut
        assert len(name) > 100
    log = EventLog(tmp_path / "events.jsonl")
    with caplog.at_level(logging.ERROR, "kvcanary"):
        Reporter(log).report(violations)
    log.close()

    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert len(record.getMessage()) < 2000
    for violation in violations:
        assert render_line(violation).isprintable()
        lines = render_block(violation).split("\n")
        assert all(line.isprintable() for line in lines)
        assert not any(line.startswith("kvcanary: all is well") for line in lines)
    (line,) = [line for line in (tmp_path / "events.jsonl").read_text().split("\n") if '"violation"' in line]
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["request"].startswith("a\x1b]0;owned")


def test_an_ordinary_request_id_is_shown_as_it_is():
    (line,) = [render_line(violation) for violation in violations_of("req-1:a.b@c")]

    assert "request req-1:a.b@c row" in line


def test_salts_and_extra_keys_of_tenants_are_shown_as_hashes_only():
    engine = Engine()
    tokens = list(range(30))
    engine.prefill(cached := engine.request(tokens=tokens, extra_key=SALT))
    prefix = engine.finish(cached, keep=30)
    engine.prefill(engine.request(tokens=[*tokens, 5, 6], extra_key="other-salt"), prefix=prefix)
    (violation,) = engine.violations

    shown = json.dumps(violation.to_dict()) + render_line(violation) + render_block(violation)
    assert violation.kind == "other_identity"
    assert SALT not in shown
    assert "other-salt" not in shown
    assert conceal(SALT) in shown
    assert conceal(SALT) != conceal("other-salt")
    assert conceal("") == conceal(None) == ""


def test_metrics_have_no_label_that_a_client_chooses():
    labels = {label for labels, _ in (*COUNTERS.values(), *GAUGES.values()) for label in labels}

    assert labels <= {"check", "tier", "reason", "during", "version", "mode", "checks", "state"}


# What is written where, and who may read it


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o640), (0o022, 0o640), (0o077, 0o600)])
def test_others_cannot_read_the_event_log(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        EventLog(tmp_path / "events.jsonl").close()
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "events.jsonl").stat().st_mode) == mode


def test_a_setting_that_is_refused_does_not_show_its_password():
    for name in ("flag", "variable"):
        setting = "/kv?index=redis://me:geheim@host/0&what=1"
        flags, environment = ({"hf3fs": setting}, {}) if name == "flag" else ({}, {"KVCANARY_HF3FS": setting})
        with pytest.raises(ConfigError, match="no setting what") as refused:
            read_config(environment, flags)
        assert "geheim" not in str(refused.value)
        assert "redis://***@host/0" in str(refused.value)
