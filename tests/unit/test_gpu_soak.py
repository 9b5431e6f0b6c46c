"""What decides in the soak of a GPU server: its modes, its models, and what counts as clean and as found."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "server"))

import gpu_soak
import soak_board
import soak_drill
import soak_modes
import soak_shapes

from kvcanary_plugin.faults.injector import Injector

FLIP = {"event": "injected", "fault": "flip_running", "step": 100, "check": "content", "slots": [7], "positions": [3]}
FLIP |= {"bound_forwards": 20, "layer": 2, "half": "V", "bit": 5}
HOST_FLIP = {"event": "injected", "fault": "flip_host", "step": 100, "check": "content", "slots": [], "positions": []}
HOST_FLIP |= {"bound_forwards": 20, "layer": 2, "half": "V", "bit": 5, "host_slot": 40}
LATE = {"event": "injected", "fault": "skip_layer_wait", "step": 50, "check": "order", "slots": [], "positions": []}
LATE |= {"bound_forwards": 0}
SWAP = {**HOST_FLIP, "fault": "swap_host_pages", "host_slot": 64, "other_host_slot": 192, "entries": 64}


def violation(**fields):
    """An event as the log has it."""
    base = {"event": "violation", "check": "content", "kind": "content", "pool": "rows", "rank": 0, "step": 110}
    base |= {"phase": "scrub", "slot": 7, "position": 3, "layer": 2, "half": "V", "host_slot": None}
    return base | fields


def loaded(**fields):
    return violation(phase="load", slot=11, host_slot=40, **fields)


@pytest.mark.parametrize(
    ("events", "faults", "problem"),
    [
        ([FLIP, violation()], ["flip_running"], None),
        ([FLIP, violation(), {"event": "changed"}, {"event": "heartbeat"}], ["flip_running"], None),
        ([FLIP], ["flip_running"], "not found"),
        ([], ["flip_running"], "flip_running was not injected"),
        ([FLIP, violation(layer=1)], ["flip_running"], "not found in its place"),
        ([FLIP, violation(position=4)], ["flip_running"], "not found in its place"),
        ([FLIP, violation(step=121)], ["flip_running"], "in time"),
        ([FLIP, violation(), violation(slot=8)], ["flip_running"], "unexplained content/content of slot 8"),
        ([FLIP, violation(), {"event": "detached", "why": "oops"}], ["flip_running"], "detached: oops"),
        ([FLIP, violation(), {"event": "more", "hidden": 3}], ["flip_running"], "event more"),
        ([HOST_FLIP, loaded()], ["flip_host"], None),
        ([HOST_FLIP, {**HOST_FLIP, "host_slot": 41}, loaded()], ["flip_host"] * 2, None),
        ([HOST_FLIP], ["flip_host"], "none of 1 flip_host was found"),
        ([HOST_FLIP, loaded(layer=1)], ["flip_host"], "unexplained"),
        ([HOST_FLIP, loaded(), violation(slot=11)], ["flip_host"], None),
        ([HOST_FLIP, loaded(), violation(slot=12)], ["flip_host"], "unexplained content/content of slot 12"),
        ([FLIP, violation(), loaded()], ["flip_running"], None),  # damaged on its way to host memory
        ([FLIP, violation(), loaded(layer=1)], ["flip_running"], "unexplained"),
        ([LATE, violation(check="order", kind="unordered_load", layer=None, half=None)], ["skip_layer_wait"], None),
        ([LATE], ["skip_layer_wait"], "not found"),
        ([SWAP, violation(host_slot=127), violation(host_slot=192)], ["swap_host_pages"], None),
        ([SWAP, violation(host_slot=127), violation(host_slot=128)], ["swap_host_pages"], "unexplained"),
    ],
)
def test_drill_wants_every_fault_in_its_place_and_nothing_else(events, faults, problem):
    problems = soak_drill.judge(events, faults).problems

    assert not problems if problem is None else any(problem in each for each in problems), problems


def test_a_drill_that_is_passed_says_how_many():
    verdict = soak_drill.judge([FLIP, violation(), HOST_FLIP, loaded()], ["flip_running", "flip_host"])

    assert verdict.render() == "2 of 2 found, nothing unexplained"
    assert verdict.injected == verdict.found == {"flip_running": 1, "flip_host": 1}


def test_what_a_clean_server_says_is_no_report():
    quiet = [{"event": name} for name in (*soak_drill.QUIET, "injected")]

    assert soak_drill.find_reports(quiet) == []
    assert len(soak_drill.find_reports([*quiet, violation(), {"event": "detached"}, {"event": "uncovered"}])) == 3


def row(**fields):
    return soak_board.Row(**{"state": soak_board.DONE, "is_passed": True, **fields})


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([row(), row()], 0),
        ([row(), row(reports=[violation()])], 1),
        ([row(), row(is_passed=False)], 1),
        ([row(), row(state=soak_board.ENDED)], 1),
        ([row(), row(state=soak_board.NOT_STARTED)], 2),
        ([row(), row(state=soak_board.NOT_RUN)], 2),
        ([row(state=soak_board.NOT_STARTED), row(is_passed=False)], 1),
    ],
)
def test_exit_code_tells_damage_from_what_did_not_start(rows, code, tmp_path):
    board = soak_board.Board([str(n) for n in range(len(rows))], tmp_path, {})
    board.rows.update({str(n): each for n, each in enumerate(rows)})

    assert board.exit_code() == code


def test_what_was_saved_can_be_looked_at(tmp_path):
    board = soak_board.Board(["page1", "mla"], tmp_path, {"device": "some card"})
    board.rows["page1"].state, board.rows["page1"].clean_seconds = soak_board.CLEAN, 61.0
    board.rows["page1"].counts["verified"] = 1234567
    board.rows["mla"].state, board.rows["mla"].why = soak_board.NOT_STARTED, "arm mla ended:\nno such module"
    board.save()
    text = soak_board.render_file(tmp_path)

    assert "some card" in text
    assert "| page1 | clean | 61 | 0 | 0 | 0 | 0 | 0 | 1,234,567 | 0 | 0 | 0 |  |" in text
    assert "mla not started: arm mla ended:\nno such module" in text


def test_groups_are_expanded_once_and_to_what_the_device_can():
    assert soak_modes.expand_modes("page16,plain", "cuda")[0] == "page16"
    assert len(soak_modes.expand_modes("plain,all", "cuda")) == len(soak_modes.MODES)
    assert "fp8" not in soak_modes.expand_modes("all", "cpu")
    with pytest.raises(ValueError, match="no mode 'page2'"):
        soak_modes.expand_modes("page2", "cuda")
    with pytest.raises(ValueError, match="mode fp8 needs a GPU"):
        soak_modes.expand_modes("page1,fp8", "cpu")


def test_a_mode_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_soak.parse_options(["--modes", "page2"])
    assert "no mode 'page2'" in capsys.readouterr().err


@pytest.mark.parametrize("name", soak_modes.MODES)
def test_sglang_knows_every_argument_and_its_value(name, tmp_path):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    choices = {action.dest: action.choices for action in parser._actions if action.choices}
    arguments = gpu_soak.make_arguments(name, "cuda", tmp_path)

    assert set(arguments) <= {field.name for field in dataclasses.fields(ServerArgs)}
    assert all(value in choices.get(key, [value]) for key, value in arguments.items())
    assert json.loads((Path(arguments["model_path"]) / "config.json").read_text())["architectures"]


@pytest.mark.parametrize("name", soak_modes.MODES)
def test_the_injector_reads_every_drill(name):
    faults = soak_modes.MODES[name].faults
    planned = Injector.parse(soak_drill.make_spec(faults, "0"))._planned

    assert [each.name for each in planned] == list(faults)
    assert len({each.options["seed"] for each in planned}) == len(faults)


def test_a_path_of_its_own_comes_behind_that_of_the_host(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/site")
    variables = gpu_soak.make_environment(soak_modes.MODES["mla"], "cuda")

    assert variables["PYTHONPATH"] == f"/site{os.pathsep}{soak_modes.STAND_IN}"
    assert gpu_soak.make_environment(soak_modes.MODES["page16"], "cuda") == {}
    assert gpu_soak.make_environment(soak_modes.MODES["page16"], "cpu") == soak_modes.INTERPRETED


@pytest.mark.parametrize(
    ("name", "is_mla", "window_layers"),
    [("llama", False, 0), ("eagle", False, 0), ("mla", True, 0), ("swa", False, 4), ("hybrid", False, 0)],
)
def test_sglang_takes_every_shape_for_what_it_is(name, is_mla, window_layers, tmp_path):
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    config = ModelConfig(str(soak_shapes.SOAK_MODELS[name].write(tmp_path)), dtype="bfloat16")

    assert (config.attention_arch == AttentionArch.MLA) == is_mla
    assert len(getattr(config, "swa_attention_layer_ids", None) or ()) == window_layers
    assert config.vocab_size == soak_shapes.SOAK_MODELS[name].vocabulary
    assert (config.hf_config.model_type == "falcon_h1") == (name == "hybrid")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is not None, reason="what is stood in for is installed")
@pytest.mark.parametrize("path", ["", str(soak_modes.STAND_IN)])
def test_the_model_of_mla_imports_with_the_stand_in_only(path):
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", "import sglang.srt.models.deepseek_v2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert (done.returncode == 0) == bool(path), done.stderr
