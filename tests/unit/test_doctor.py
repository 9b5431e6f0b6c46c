"""What ``kvcanary doctor`` says and returns, as a whole: seams, coverage, both renderings, real runs."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from sglang.srt.managers.scheduler import Scheduler

from kvcanary_plugin.doctor import examine
from kvcanary_plugin.doctor.checkup import Checkup, Fact, Problem, Section
from kvcanary_plugin.doctor.render import render_json, render_text
from kvcanary_plugin.doctor.seams import examine_seams
from kvcanary_plugin.patches.modes import MODE_GAPS
from kvcanary_plugin.pool_patcher.seams import SourceTree
from kvcanary_plugin.versions import installed_sglang

ROOT = Path(__file__).parents[2]
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "intermediate_size": 256,
}


def rendered(checkup, width=200):
    output = io.StringIO()
    render_text(checkup, Console(file=output, width=width, no_color=True))
    return output.getvalue()


def drift_of(sections):
    return [problem.text for section in sections for problem in section.problems if problem.severity == "error"]


def run_doctor(*arguments, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVCANARY", "SGLANG_PLUGINS"))}
    return subprocess.run(
        [sys.executable, "-m", "kvcanary_plugin.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=kept | variables,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


def test_an_installation_as_expected():
    seams, coverage = examine_seams()
    facts = {fact.name: fact.value for fact in coverage.facts}

    assert drift_of((seams, coverage)) == []
    assert installed_sglang() in {fact.name: fact.value for fact in seams.facts}["SGLang"]
    assert {row["state"] for row in seams.rows} == {"ok"}
    assert "MHATokenToKVPool" in facts["pools"]
    assert "HiSparseDSATokenToKVPool" in facts["uncovered"]
    refused = {f"other {gap.setting}" if gap.covered else gap.setting for gap in MODE_GAPS}
    assert refused < set(facts["refused"])
    assert [text.split(":")[0] for text in facts["partly covered"]] == [
        "--disaggregation-mode",
        "--speculative-algorithm",
        "--pp-size above 1",
    ]
    assert "all seams as expected" in rendered(Checkup("0", (seams, coverage)))


def test_a_method_that_changed_under_it(monkeypatch):
    monkeypatch.setattr(Scheduler, "run_batch", lambda self, work: work)
    sections = examine_seams()

    assert any(
        "Scheduler.run_batch takes (self, work); expected it to begin (self, batch)" in line
        for line in drift_of(sections)
    )
    assert {row["state"] for row in sections[0].rows if "Scheduler.run_batch" in row["wrapped"]} == {"drifted"}
    assert Checkup("0", sections).code == 1


def test_a_field_that_is_gone(monkeypatch):
    true_has = SourceTree.has
    monkeypatch.setattr(SourceTree, "has", lambda self, field: field.name != "extend_lens" and true_has(self, field))
    sections = examine_seams()

    assert any("extend_lens" in line for line in drift_of(sections))
    assert Checkup("0", sections).code == 1


def test_a_release_that_nobody_has_looked_at_is_a_warning(monkeypatch):
    monkeypatch.setattr("kvcanary_plugin.versions.CHECKED_SGLANG", ("0.5.11",))
    (warning,) = examine_seams()[0].problems

    assert warning.severity == "warning"
    assert f"SGLang {installed_sglang()} is not among the releases" in warning.text


def test_no_sglang_is_an_error(monkeypatch):
    monkeypatch.setattr(SourceTree, "installed", classmethod(lambda cls: cls(Path("/nowhere"))))
    monkeypatch.setattr("kvcanary_plugin.versions.CHECKED_SGLANG", ("99.0",))
    (section,) = examine_seams()

    assert "is older than 99.0" in section.problems[0].text


def test_problems_are_numbered_the_most_severe_first_each_with_its_advice():
    sections = (
        Section("one", (Fact("a", None, "warning"),), problems=(Problem("warning", "cracked", "glue it"),)),
        Section("two", (Fact("b", True),), problems=(Problem("error", "broken", "replace it"),)),
    )
    text = rendered(Checkup("0", sections))

    assert Checkup("0", sections).code == 1
    assert [line.strip() for line in text.splitlines()[-5:]] == [
        "1 problem keeps kvcanary from working; 1 warning",
        "1. error: broken",
        "-> replace it",
        "2. warning: cracked",
        "-> glue it",
    ]


def test_warnings_alone_are_no_failure():
    section = Section("one", problems=(Problem("warning", "cracked", "glue it"),))

    assert Checkup("0", (section,)).code == 0
    assert Checkup("0", ()).code == 0


@pytest.mark.parametrize("width", [80, 120])
def test_every_column_is_whole_and_nothing_is_wider_than_the_terminal(width):
    owner = "SchedulerWeightUpdaterManager"
    row = {"wrapped": f"managers.thing {owner}.update_weights_from_disk", "when": "quarantine", "state": "drifted"}
    section = Section("seams", (Fact("a", "b" * 300),), ({"why": "because of this and that " * 5} | row,))
    section = Section("seams", section.facts, ({name: section.rows[0][name] for name in (*row, "why")},))
    text = rendered(Checkup("0", (section,)), width)

    assert max(map(len, text.splitlines())) <= width
    assert {owner, "quarantine", "drifted"} <= set(text.replace(".update", " ").split())


def test_what_would_steer_a_terminal_or_mark_up_is_shown_as_it_is():
    hostile = "\x1b]0;owned\x07\r\n[red]x[/nothing]"
    text = rendered(Checkup("0", (Section("one", (Fact("a", hostile),), problems=(Problem("error", hostile, ""),)),)))

    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count(r"\x1b]0;owned\x07\r\n[red]x[/nothing]") == 2


def test_json_says_the_same():
    section = Section("one", (Fact("a", ("x", "y")),), ({"k": "v"},), (Problem("error", "broken", "replace it"),))

    assert json.loads(render_json(Checkup("0", (section,)))) == {
        "schema": 1,
        "kvcanary": "0",
        "exit_code": 1,
        "problems": [{"severity": "error", "section": "one", "problem": "broken", "advice": "replace it"}],
        "sections": {"one": {"a": ["x", "y"], "rows": [{"k": "v"}]}},
    }


def test_variables_in_front_of_the_command_line_count_for_everything(model):
    command = ["SGLANG_PLUGINS=other", "KVCANARY=log", "sglang", "serve", f"--model-path={model}", "--device=cpu"]
    facts = {section.name: section for section in examine(command, None).sections}

    assert any("SGLANG_PLUGINS=other" in problem.text for problem in facts["environment"].problems)
    assert {fact.name: fact.value for fact in facts["command line"].facts}["mode"] == "log"


def test_a_real_run_of_a_covered_command_line(model):
    run = run_doctor("--", "sglang", "serve", f"--model-path={model}", "--device=cpu", "--kvcanary=log")

    assert run.returncode == 0, run.stdout + run.stderr
    assert "all seams as expected" in run.stdout
    assert "nothing keeps kvcanary from working" in run.stdout


def test_a_real_run_of_a_refused_one_in_json(model):
    arguments = ("--json", "--", "python", "-m", "sglang.launch_server", f"--model-path={model}", "--kvcanary=log")
    run = run_doctor(*arguments, "--device=cpu", "--dllm-algorithm=LowConfidence", "--enable-metrics")

    answer = json.loads(run.stdout)
    assert run.returncode == answer["exit_code"] == 1
    (problem,) = [problem for problem in answer["problems"] if problem["severity"] == "error"]
    assert problem["section"] == "command line"
    assert "--dllm-algorithm is not covered" in problem["problem"]
    assert "drop --dllm-algorithm" in problem["advice"]


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--model-path", "M"], ["--json=1"]])
def test_a_wrong_call_is_a_usage_error(arguments):
    run = run_doctor(*arguments)

    assert run.returncode == 2
    assert run.stdout == ""
