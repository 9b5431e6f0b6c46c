"""What ``kvcanary doctor`` says of a server's command line, parsed by SGLang's own parser."""

import json
import os
from dataclasses import asdict, replace

import pytest

from kvcanary_plugin import activate as activation
from kvcanary_plugin.config import CHECKS, OPTIONS, Config
from kvcanary_plugin.doctor import command_line
from kvcanary_plugin.doctor.command_line import ask_plan, judge, split_command
from kvcanary_plugin.patches.command_line import ServerPlan, plan_server
from kvcanary_plugin.patches.modes import MODE_GAPS

COVERED = ServerPlan(config=Config(mode="log"))


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch):
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv("KVCANARY_ALLOW_INJECT", raising=False)
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)  # SGLang writes some of its settings there


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')

    def run(*flags):
        return plan_server([f"--model-path={tmp_path}", "--device=cpu", "--skip-tokenizer-init", *flags])

    return run


def facts_of(section):
    return {fact.name: fact.value for fact in section.facts}


def problems_of(section, severity):
    return [(problem.text, problem.advice) for problem in section.problems if problem.severity == severity]


@pytest.mark.parametrize(
    "command",
    [
        "--model-path M --kvcanary log",
        "sglang serve --model-path M --kvcanary log",
        "/opt/bin/sglang serve --model-type llm --model-path M --kvcanary log",
        "sglang serve --model-path M --model-type=auto --kvcanary log",
        "python -m sglang.launch_server --model-path M --kvcanary log",
        "/usr/bin/python3.11 -X dev -m sglang.launch_server --model-path M --kvcanary log",
    ],
)
def test_the_start_of_a_command_is_left_out(command):
    assert split_command(command.split()) == ({}, ["--model-path", "M", "--kvcanary", "log"])


def test_variables_in_front_are_kept_apart():
    variables, arguments = split_command(["A=1", "B=x=y", "sglang", "serve", "--log-requests-level=2", "C=3"])

    assert variables == {"A": "1", "B": "x=y"}
    assert arguments == ["--log-requests-level=2", "C=3"]


def test_a_diffusion_server_is_not_taken(plan):
    _, arguments = split_command(["sglang", "serve", "--model-type", "diffusion", "--model-path", "M"])

    assert "diffusion" in plan(*arguments[:2]).refused


def test_a_covered_command_line(plan):
    section = judge(plan("--kvcanary=log", "--page-size=16"))

    assert section.problems == ()
    assert facts_of(section)["mode"] == "log"
    assert facts_of(section)["checks in force"] == tuple(check for check in CHECKS if check != "order")
    assert facts_of(section)["not order"] == "nothing can be out of order on a CPU"
    assert facts_of(section)["settled by SGLang"] is True
    assert "--enable-metrics" in facts_of(section)["/metrics"]
    assert facts_of(judge(COVERED))["checks in force"] == CHECKS  # on a device that is not known to be a CPU


def test_parsing_leaves_no_trace(plan):
    from sglang.srt.server_args import ServerArgs

    before = dict(vars(ServerArgs))
    plan("--kvcanary=raise")

    assert dict(vars(ServerArgs)) == before
    assert "KVCANARY" not in os.environ
    assert activation.parser_patches is None


def test_an_active_plugin_is_left_active(plan):
    activation.activate()
    try:
        installed = activation.parser_patches
        assert plan("--kvcanary=raise").config.mode == "raise"
        assert activation.parser_patches is installed
        assert installed.is_installed
    finally:
        activation.deactivate()


def test_metrics_are_served_if_asked_for(plan, monkeypatch):
    made = plan("--kvcanary=log", "--enable-metrics")
    assert facts_of(judge(made))["/metrics"] == "with kvcanary's"
    assert facts_of(judge(replace(made, config=Config())))["/metrics"] == "without kvcanary's: mode off"

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problems_of(judge(made), "warning") == [
        ("--enable-metrics, but prometheus_client is not installed", "pip install prometheus_client")
    ]


def test_variables_and_yaml_count(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCANARY", "quarantine")
    (tmp_path / "server.yaml").write_text("kvcanary-checks: chain\nenable-metrics: true\n")
    config = plan("--config", str(tmp_path / "server.yaml")).config

    assert (config.mode, config.checks) == ("quarantine", ("chain",))


@pytest.mark.parametrize("text", ["", "what: 1\n", "["], ids=["missing", "unknown", "no yaml"])
def test_a_yaml_file_that_cannot_be_used_is_refused(plan, tmp_path, text):
    path = tmp_path / "server.yaml"
    if text:
        path.write_text(text)

    section = judge(plan("--config", str(path)))
    assert "does not take the command line" in problems_of(section, "error")[0][0]


def test_checks_that_are_left_out_have_a_reason(plan):
    section = judge(plan("--kvcanary=log", "--kvcanary-checks=chain,content,ownership", "--kvcanary-content=none"))
    facts = facts_of(section)

    assert facts["checks in force"] == ("chain", "ownership")
    assert facts["not content"] == "--kvcanary-content none"
    assert facts["not identity"] == "--kvcanary-checks"
    assert section.problems == ()


def test_sessions_leave_ownership_out(plan):
    facts = facts_of(judge(plan("--kvcanary=log", "--enable-streaming-session")))

    assert facts["checks in force"] == tuple(check for check in CHECKS if check not in ("ownership", "order"))
    assert "--enable-streaming-session" in facts["not ownership"]


def test_every_mode_that_is_refused_has_its_advice(plan):
    section = judge(plan("--kvcanary=log", "--dllm-algorithm=LowConfidence", "--enable-pdmux"))
    errors = problems_of(section, "error")

    assert [text.split()[1] for text, _ in errors] == ["--enable-pdmux", "--dllm-algorithm"]
    assert errors[1][1].startswith("drop --dllm-algorithm, or pass --kvcanary-allow-uncovered")
    assert all(any(gap.why in text for gap in MODE_GAPS) for text, _ in errors)


def test_a_waiver_makes_them_warnings_and_leaves_no_check(plan):
    section = judge(plan("--kvcanary=log", "--enable-pdmux", "--kvcanary-allow-uncovered"))

    assert problems_of(section, "error") == []
    assert "--enable-pdmux" in problems_of(section, "warning")[0][0]
    assert facts_of(section)["checks in force"] == "none"


def test_off_refuses_nothing_and_says_that_nothing_is_checked(plan):
    section = judge(plan("--enable-pdmux"))

    assert problems_of(section, "error") == []
    assert ("the mode is off, so nothing is checked", "add --kvcanary log") in problems_of(section, "warning")
    assert facts_of(section)["checks in force"] == "none"


def test_off_with_storage_is_as_it_should_be(plan, tmp_path):
    section = judge(plan("--enable-hierarchical-cache", f"--kvcanary-hf3fs={tmp_path}"))

    assert problems_of(section, "error") == []
    assert not any("the mode is off" in text for text, _ in problems_of(section, "warning"))


def test_storage_without_the_cache_behind_which_it_lies(plan, tmp_path):
    errors = problems_of(judge(plan("--kvcanary=log", f"--kvcanary-hf3fs={tmp_path}")), "error")

    assert "add --enable-hierarchical-cache" in errors[0][0]


def test_a_second_canary(plan):
    assert problems_of(judge(replace(COVERED, in_tree="raise")), "error") == [
        ("--kvcanary log and SGLang's own --kv-canary raise exclude each other", "drop one of them")
    ]
    found = plan("--kvcanary=log", "--kv-canary=raise")
    assert found.in_tree == "raise" or "--kv-canary" in (found.refused or "")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--kvcanary=loud", "'loud' is not one of off"),
        ("--kvcanary-scrub-budget=2", "a share of time"),
        ("--kvcanary-inject=flip_running@3", "KVCANARY_ALLOW_INJECT=1"),
        ("--kvcanary-checks=identity", "identity without chain"),
        ("--kvcanary-hf3fs=/kv?what=redis://u:geheim@h", "no setting what"),
    ],
)
def test_a_setting_that_cannot_be_used_is_an_error(plan, flag, words):
    mode = () if flag.startswith("--kvcanary=") else ("--kvcanary=log",)
    section = judge(plan(*mode, flag))
    errors = problems_of(section, "error")

    assert any(words in text for text, _ in errors)
    assert "geheim" not in str(section)


def test_several_settings_that_cannot_be_used_are_all_named(plan):
    errors = problems_of(judge(plan("--kvcanary=loud", "--kvcanary-content=some", "--enable-pdmux")), "error")

    assert [text.split("=")[0] for text, _ in errors] == ["--kvcanary", "--kvcanary-content"]


def test_injection_that_is_allowed_is_a_warning_and_a_fault_that_does_not_exist_an_error(plan, monkeypatch):
    monkeypatch.setenv("KVCANARY_ALLOW_INJECT", "1")
    section = judge(plan("--kvcanary=log", "--kvcanary-inject=flip_running@3"))
    assert problems_of(section, "error") == []
    assert problems_of(section, "warning")[0][0] == "faults would be injected: flip_running@3"

    assert "melt" in problems_of(judge(plan("--kvcanary=log", "--kvcanary-inject=melt@3")), "error")[0][0]


@pytest.mark.parametrize("flags", [["--nonsense"], ["--page-size", "many"]])
def test_what_sglang_does_not_take(plan, flags):
    ((text, advice),) = problems_of(judge(plan("--kvcanary=log", *flags)), "error")

    assert flags[0] in text
    assert "--help" in advice


def test_a_model_that_is_not_here_is_judged_by_what_is_written():
    plan = plan_server(["--model-path=s3://bucket/model", "--kvcanary=log", "--enable-pdmux"])
    section = judge(plan)

    assert len(problems_of(section, "error")) == 1
    assert "s3://bucket/model is not on this machine" in problems_of(section, "warning")[0][0]
    assert facts_of(section)["settled by SGLang"] is False


def test_the_code_of_a_model_is_not_run(plan, tmp_path):
    assert "would run the model's own code" in plan("--kvcanary=log", "--trust-remote-code").unsettled


def test_what_sglang_cannot_settle_on_this_machine_does_not_matter(plan):
    found = plan("--kvcanary=log", "--attention-backend=fa3", "--tp-size=4096", "--enable-dp-attention")

    assert found.refused is None
    assert judge(found).facts
    assert any("--enable-dp-attention" in gap for gap in found.gaps)


def test_an_event_log_that_cannot_be_written_is_an_error_and_none_is_made(tmp_path):
    good, bad = tmp_path / "events.jsonl", tmp_path / "none" / "events.jsonl"
    ((text, advice),) = problems_of(judge(replace(COVERED, config=Config(mode="log", log=str(bad)))), "error")
    assert (text, advice) == (f"the event log {bad} cannot be written", f"make {bad.parent} a folder it may write to")
    ((text, _),) = problems_of(judge(replace(COVERED, config=Config(mode="log", log=str(tmp_path)))), "error")
    assert "cannot be written" in text

    for _ in range(2):  # missing, then there
        section = judge(replace(COVERED, config=Config(mode="log", log=str(good))))
        assert section.problems == ()
        assert facts_of(section)["event log"] == f"{good}, can be written"
        assert not good.exists() or good.read_text() == ""
        good.touch()


def test_a_plan_survives_json(plan):
    made = plan("--kvcanary=log", "--enable-pdmux", "--kvcanary-checks=chain")

    assert ServerPlan.from_json(json.dumps(asdict(made))) == made


def test_the_plan_of_another_process_is_the_same(tmp_path):
    arguments = [f"--model-path={tmp_path}", "--kvcanary-log=x", "--enable-pdmux"]
    plan = ask_plan(arguments, os.environ | {"KVCANARY": "log"})

    assert plan.config == Config(mode="log", log="x")
    assert len(plan.gaps) == 1
    assert plan.unsettled is not None  # there is no config.json


def test_a_process_that_dies_or_hangs_is_a_refusal(monkeypatch):
    monkeypatch.setattr(command_line, "PROGRAM", "kvcanary_plugin.no_such_program")
    assert "exit code 1: " in ask_plan([], os.environ).refused

    monkeypatch.setattr(command_line, "PROGRAM", "kvcanary_plugin.patches.command_line")
    monkeypatch.setattr(command_line, "TIMEOUT_SECONDS", 0.01)
    assert "did not settle" in ask_plan([], os.environ).refused
