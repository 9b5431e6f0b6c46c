"""Flags, environment, refusals and traces, on SGLang's own parser and classes, in this process."""

import contextlib
import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import prepare_server_args

from kvcanary_plugin import activate as activation
from kvcanary_plugin.config import MODES, OPTIONS, Config, read_config
from kvcanary_plugin.errors import SeamError, UncoveredError
from kvcanary_plugin.pool_patcher import patch as patch_module
from kvcanary_plugin.pool_patcher.seams import SourceTree
from kvcanary_plugin.runtime.session import Session
from kvcanary_plugin.versions import installed_sglang
from tests.engine import Engine


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch):
    for option in OPTIONS:
        monkeypatch.setenv(option.variable, "")  # also makes monkeypatch take back what the parser exports
    monkeypatch.delenv("KVCANARY_ALLOW_INJECT", raising=False)
    yield
    activation.deactivate()


@pytest.fixture
def parse(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')

    def run(*flags):
        activation.activate()
        return prepare_server_args([f"--model-path={tmp_path}", "--device=cpu", "--skip-tokenizer-init", *flags])

    return run


def installed_patches(*modes):
    version = installed_sglang()
    listed = [(when, patch) for when, patch in activation.list_patches() if patch.applies_to(version)]
    return [patch for when, patch in listed if not modes or when in modes]


def held_by_targets():
    held = {}
    for patch in installed_patches():
        owner = getattr(importlib.import_module(patch.module), patch.owner)
        held[owner] = dict(vars(owner))
    return held


def changed(before):
    return {
        f"{owner.__name__}.{name}"
        for owner, attributes in before.items()
        for name in {*attributes, *vars(owner)}
        if attributes.get(name) is not vars(owner).get(name)
    }


def test_off_wraps_the_argument_parser_and_nothing_else():
    before = held_by_targets()
    activation.activate()

    assert changed(before) == {"ServerArgs.add_cli_args", "ServerArgs.from_cli_args"}
    activation.deactivate()
    assert changed(before) == set()


@pytest.mark.parametrize("mode", MODES[1:])
def test_on_wraps_every_declared_seam_and_leaves_no_trace_when_undone(monkeypatch, mode):
    monkeypatch.setenv("KVCANARY", mode)
    before = held_by_targets()
    activation.activate()
    activation.activate()  # harmless the second time

    expected = {f"{patch.owner}.{patch.attribute}" for patch in installed_patches("every mode", "unless off", mode)}
    assert changed(before) == expected
    activation.deactivate()
    assert changed(before) == set()


def test_flags_reach_children_through_the_environment(parse):
    parse("--kvcanary=raise", "--kvcanary-scrub-budget=0.1", "--kvcanary-allow-uncovered")

    assert read_config() == Config(mode="raise", scrub_budget=0.1, allow_uncovered=True)


def test_flag_off_beats_the_environment(parse, monkeypatch):
    monkeypatch.setenv("KVCANARY", "log")
    parse("--kvcanary=off")

    assert read_config().mode == "off"


def test_yaml_config_carries_the_flags(parse, tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("kvcanary: raise\nkvcanary-checks: chain\nkvcanary-allow-uncovered: true\n")
    parse("--config", str(config))

    assert read_config() == Config(mode="raise", checks=("chain",), allow_uncovered=True)


def test_unquoted_off_in_yaml_means_off(parse, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCANARY", "log")
    config = tmp_path / "server.yaml"
    config.write_text("kvcanary: off\n")
    parse("--config", str(config))

    assert read_config().mode == "off"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kvcanary=loud"], "--kvcanary='loud' is not one of off, log, raise"),
        (["--kvcanary=log", "--kvcanary-scrub-budget=2"], "'2' must be a share of time above 0 and at most 1"),
        (["--kvcanary=log", "--kvcanary-inject=flip_running@1"], "set KVCANARY_ALLOW_INJECT=1"),
        (["--kvcanary=log", "--kvcanary-log=/no/such/folder/events.jsonl"], "cannot append to --kvcanary-log"),
        (["--kvcanary=log", "--kv-canary=log"], "exclude each other"),
        (["--kvcanary=log", "--enable-lmcache"], "--enable-lmcache is not covered"),
        (
            ["--kvcanary=log", "--disaggregation-mode=prefill", "--disaggregation-transfer-backend=nixl"],
            "is not covered yet with --disaggregation-transfer-backend nixl",
        ),
        (["--kvcanary=log", "--speculative-algorithm=DFLASH"], "--speculative-algorithm is not covered"),
        (["--kvcanary=log", "--enable-pdmux"], "--enable-pdmux is not covered"),
        (["--kvcanary=log", "--use-ray"], "--use-ray is not covered"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_exit_code_2(parse, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        parse(*flags)

    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_a_slip_in_the_faults_is_refused_before_anything_is_loaded(parse, capsys, monkeypatch):
    monkeypatch.setenv("KVCANARY_ALLOW_INJECT", "1")
    with pytest.raises(SystemExit) as stop:
        parse("--kvcanary=log", "--kvcanary-inject=flip_runing@3")

    assert stop.value.code == 2
    assert "no fault 'flip_runing'; there are flip_running" in capsys.readouterr().err


def test_settings_without_the_switch_are_pointed_out(parse, caplog, capsys):
    parse("--kvcanary-checks=chain")

    # SGLang sends the log to stderr itself once it has set it up
    said = caplog.text + capsys.readouterr().err
    assert "--kvcanary is off, so the other --kvcanary flags have no effect" in said


def test_uncovered_modes_start_when_allowed(parse):
    parse("--kvcanary=log", "--enable-pdmux", "--kvcanary-allow-uncovered")

    assert read_config().is_on


def test_off_writes_nothing_to_the_environment(parse, monkeypatch):
    for option in OPTIONS:
        monkeypatch.delenv(option.variable)
    before = dict(os.environ)
    parse()

    assert {name for name in os.environ if name.startswith("KVCANARY")} <= set(before)


def test_uncovered_modes_are_none_of_our_business_when_off(parse):
    parse("--enable-pdmux")

    assert not read_config().is_on


def test_host_memory_is_refused_by_the_kind_of_pool_only(parse):
    """Which pool there will be is not known yet."""
    parse("--kvcanary=log", "--enable-hierarchical-cache")

    assert read_config().is_on


def test_a_drifted_seam_stops_the_process_and_wraps_nothing(monkeypatch, capsys):
    monkeypatch.setenv("KVCANARY", "log")

    def forward(self, batch):
        return batch

    monkeypatch.setattr(ModelRunner, "forward", forward)
    before = held_by_targets()
    with pytest.raises(SystemExit) as stop:
        activation.activate()

    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "ModelRunner.forward takes (self, batch); expected it to begin (self, forward_batch)" in error
    assert installed_sglang() in error
    activation.deactivate()
    assert changed(before) == {"ServerArgs.add_cli_args", "ServerArgs.from_cli_args"} or changed(before) == set()


def test_a_bug_of_our_own_stops_the_process_too(monkeypatch, capsys):
    monkeypatch.setenv("KVCANARY", "log")
    monkeypatch.setattr(patch_module.PatchSet, "install", lambda self, version: 1 / 0)
    with pytest.raises(SystemExit):
        activation.activate()

    assert "kvcanary: cannot start: ZeroDivisionError" in capsys.readouterr().err


def test_sglang_too_old_is_named(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.4.9")
    with pytest.raises(SeamError, match=r"SGLang 0\.4\.9 is older than"):
        installed_sglang()


@pytest.fixture
def pretend_version(monkeypatch):
    """SGLang says that it is another release; everything else says the truth."""
    true_version = importlib.metadata.version

    def pretend(version):
        monkeypatch.setattr(
            "importlib.metadata.version", lambda name: version if name == "sglang" else true_version(name)
        )

    activation.check_release.cache_clear()
    yield pretend
    activation.check_release.cache_clear()


def test_an_unknown_release_warns_and_starts_if_its_seams_hold(parse, pretend_version, monkeypatch, caplog, capsys):
    pretend_version(f"{installed_sglang()}.post9")
    monkeypatch.setenv("KVCANARY", "log")
    parse()

    said = caplog.text + capsys.readouterr().err
    assert ".post9 is not among the releases kvcanary was checked against" in said
    assert activation.engine_patches is not None
    assert activation.engine_patches.is_installed


def test_an_unknown_release_whose_seams_have_moved_does_not_start(parse, pretend_version, monkeypatch, capsys):
    pretend_version("99.0")  # nobody knows what it moves; this checks that it is looked at, and by flag alone
    parse()
    root = type("Empty", (), {"installed": classmethod(lambda cls: SourceTree(Path(os.devnull).parent))})
    monkeypatch.setattr("kvcanary_plugin.pool_patcher.seams.SourceTree", root)
    with pytest.raises(SystemExit) as stop:
        parse("--kvcanary=log")

    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "kvcanary: SGLang 99.0 does not look as kvcanary expects" in error
    assert "model_runner:ModelRunner.forward is missing: no such module" in error


def test_a_known_release_costs_no_look_at_the_sources(monkeypatch):
    activation.check_release.cache_clear()
    monkeypatch.setattr("kvcanary_plugin.pool_patcher.seams.SourceTree.installed", lambda: 1 / 0)
    activation.check_release(installed_sglang())


def test_a_process_without_a_scheduler_is_not_made_to_import_one():
    """Since 0.5.22 detokenizers and controllers load plugins too."""
    program = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
heavy = ("managers.scheduler", "managers.schedule_batch", "model_executor.model_runner")
assert not [name for name in heavy if f"sglang.srt.{name}" in sys.modules], "imported for nothing"
from kvcanary_plugin import activate
assert activate.parser_patches.is_installed and activate.engine_patches is None
import sglang.srt.managers.scheduler
assert activate.engine_patches.is_installed
"""
    environment = {**os.environ, "KVCANARY": "log", "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_scheduler_refuses_to_serve_without_the_guard_that_was_asked_for():
    with pytest.raises(UncoveredError, match="no guard is attached"):
        Session(Config(mode="log")).confirm(object())


class Runner:
    """A model runner as far as attaching looks at it."""

    def __init__(self, pool, allocator, rows):
        self.token_to_kv_pool, self.token_to_kv_pool_allocator, self.req_to_token_pool = pool, allocator, rows
        self.model = torch.nn.Identity()
        self.model_config = type("ModelConfig", (), {"model_path": "test"})


def test_uncovered_pool_is_refused_by_name():
    engine = Engine()
    pool = type("HomegrownPool", (), {})()
    session = Session(Config(mode="log"))
    with pytest.raises(UncoveredError, match=r"KV pool HomegrownPool .*covered"):
        session.attach(Runner(pool, engine.allocator, engine.rows), [], rank=0)


def test_uncovered_pool_runs_unguarded_when_allowed(caplog):
    engine = Engine()
    runner = Runner(object(), engine.allocator, engine.rows)
    session = Session(Config(mode="log", allow_uncovered=True))
    session.attach(runner, [], rank=0)
    session.confirm(runner)

    assert session.guard is None
    assert "NOT guarding this process" in caplog.text


def test_an_error_of_our_own_detaches_in_log_mode_and_stops_in_raise_mode(caplog):
    for mode, context in (("log", contextlib.nullcontext()), ("raise", pytest.raises(ZeroDivisionError))):
        engine = Engine(mode=mode)
        session = Session(Config(mode=mode))
        session.attach(Runner(engine.pool, engine.allocator, engine.rows), [], rank=0)
        with context:
            session.announce(lambda batch: 1 / 0, None)
        assert (session.guard is None) == (mode == "log")
    assert "DETACHED after an error of its own" in caplog.text
