"""Installation, SGLang's choice of plugins, variables and devices, as ``kvcanary doctor`` sees them."""

import importlib.metadata
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from sglang.srt import plugins

from kvcanary_plugin.display import escape_controls, mask_secrets
from kvcanary_plugin.doctor import environment, gpu
from kvcanary_plugin.doctor.environment import examine_environment, find_entry_point, is_chosen
from kvcanary_plugin.doctor.gpu import examine_gpu


def facts_of(section):
    return {fact.name: fact.value for fact in section.facts}


def texts_of(section, severity):
    return [problem.text for problem in section.problems if problem.severity == severity]


def test_an_environment_as_it_should_be():
    section = examine_environment({"PATH": "/bin"})
    facts = facts_of(section)

    assert section.problems == ()
    assert facts["sglang"] == importlib.metadata.version("sglang")
    assert {"python", "os", "torch", "triton", "wrapt", "prometheus_client"} <= set(facts)
    assert facts["plugin"] == "found and loaded by SGLang"
    assert "editable" in facts["kvcanary"] or "installed" in facts["kvcanary"]
    assert all(fact.state == "ok" for fact in section.facts)


@pytest.mark.parametrize("chosen", ["", "kvcanary", " other , kvcanary ", "other", ",", " ", "kvcanary2"])
def test_the_choice_of_plugins_is_understood_as_sglang_does(monkeypatch, chosen):
    monkeypatch.setenv("SGLANG_PLUGINS", chosen)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    is_loaded = "kvcanary" in plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP)
    section = examine_environment({"SGLANG_PLUGINS": chosen})

    assert is_chosen({"SGLANG_PLUGINS": chosen}) == is_loaded
    assert bool(texts_of(section, "error")) != is_loaded


def test_a_choice_without_us_has_its_advice():
    (problem,) = examine_environment({"SGLANG_PLUGINS": "other"}).problems

    assert problem.severity == "error"
    assert "SGLANG_PLUGINS=other names others only" in problem.text
    assert problem.advice == "add kvcanary to SGLANG_PLUGINS, or unset it"


def test_a_plugin_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(environment, "GROUP", "sglang.srt.nothing")
    section = examine_environment({})

    assert texts_of(section, "error") == [
        "SGLang does not find the plugin: no entry point kvcanary in sglang.srt.nothing"
    ]
    assert facts_of(section)["plugin"] == "not found by SGLang"


def test_the_folder_doctor_is_run_from_does_not_count(tmp_path):
    """What ``python -m`` puts first on the path is not what a server's start has there."""
    info = tmp_path / "kvcanary-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcanary\nVersion: 9\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkvcanary = nowhere:activate\n")
    program = (
        "import sys, importlib.metadata as m; from kvcanary_plugin.doctor.environment import find_entry_point as f;"
        "print(m.version('kvcanary'), f().value)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )

    assert run.stdout.split() == ["9", "kvcanary_plugin.activate:activate"]


def test_a_plugin_that_cannot_be_loaded(monkeypatch):
    broken = importlib.metadata.EntryPoint("kvcanary", "kvcanary_plugin.nowhere:activate", "sglang.srt.plugins")
    monkeypatch.setattr(environment, "find_entry_point", lambda: broken)
    section = examine_environment({})

    assert texts_of(section, "error")[0].startswith("the plugin cannot be loaded: ModuleNotFoundError")
    assert find_entry_point() != broken


def test_no_sglang(monkeypatch):
    true_version = importlib.metadata.version

    def version(name):
        if name == "sglang":
            raise importlib.metadata.PackageNotFoundError(name)
        return true_version(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    section = examine_environment({})

    assert texts_of(section, "error") == [f"sglang is not installed for {sys.executable}"]
    assert facts_of(section)["sglang"] is None


def test_variables_in_force_are_shown_without_passwords():
    section = examine_environment(
        {
            "KVCANARY": "log",
            "KVCANARY_HF3FS": "/kv?index=redis://me:geheim@host/0",
            "KVCANARY_API_KEY": "geheim",
            "KVCANARY_REDIS_PASSWORD": "geheim",
            "OTHER": "x",
            "KVCANARYX": "y",
        }
    )
    facts = facts_of(section)

    assert section.problems == ()
    assert facts["KVCANARY"] == "log"
    assert facts["KVCANARY_API_KEY"] == facts["KVCANARY_REDIS_PASSWORD"] == "***"
    assert facts["KVCANARY_HF3FS"] == "/kv?index=redis://***@host/0"
    assert "OTHER" not in facts
    assert "KVCANARYX" not in facts


def test_a_variable_that_cannot_be_used_is_an_error_unless_a_flag_may_beat_it():
    wrong = {"KVCANARY": "loud", "KVCANARY_HF3FS": "/kv?index=redis://me:geheim@host/0&what=1"}

    (text,) = texts_of(examine_environment({"KVCANARY": "loud"}), "error")
    assert text == "KVCANARY='loud' is not one of off, log, raise, quarantine"
    (text,) = texts_of(examine_environment({"KVCANARY_HF3FS": wrong["KVCANARY_HF3FS"]}), "error")
    assert "no setting what" in text
    assert "geheim" not in text
    assert examine_environment(wrong, check_settings=False).problems == ()


def test_a_variable_that_nobody_reads_and_permission_to_inject_are_warnings():
    section = examine_environment({"KVCANARY_CHECK": "chain", "KVCANARY_ALLOW_INJECT": "1"})

    assert texts_of(section, "error") == []
    assert [text.split()[0] for text in texts_of(section, "warning")] == ["KVCANARY_CHECK", "KVCANARY_ALLOW_INJECT=1"]
    assert examine_environment({"KVCANARY_CHECKS": "chain", "KVCANARY_ALLOW_INJECT": "0"}).problems == ()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:p@ss@h:1/0?a=b", "redis://***@h:1/0?a=b"),
        ("rediss://u:p@h/0", "rediss://***@h/0"),
        ("/kv?index=redis%3A%2F%2Fu%3Ap%40h%2F0&client=local", "/kv?index=redis%3A%2F%2F***%40h%2F0&client=local"),
        ("redis://h/0?password=geheim&db=1", "redis://h/0?password=***&db=1"),
        ('{"token": "geheim"}', '{"token": "***"}'),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("/var/lib/kv?capacity=1T", "/var/lib/kv?capacity=1T"),
        ("me@example", "me@example"),
    ],
)
def test_secrets_are_masked_and_nothing_else(text, shown):
    assert mask_secrets(text) == shown


def test_controls_are_escaped_and_nothing_else():
    assert escape_controls("a\x1b[31m\nb\u202ec\x9b") == r"a\x1b[31m\nb\u202ec\x9b"
    assert escape_controls("größe 'x' \\ 日本") == "größe 'x' \\ 日本"


def test_this_machine_without_a_gpu_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    section = examine_gpu()

    assert section.problems == ()
    assert facts_of(section)["devices"] is None
    assert facts_of(section)["checks run on"] == "numpy on the CPU, since torch sees no GPU"


@pytest.mark.gpu
def test_this_machine_with_a_gpu_names_it():
    section = examine_gpu()

    assert section.problems == ()
    assert facts_of(section)["devices"][0].startswith("0: ")
    assert facts_of(section)["checks run on"] == "triton on cuda"
    assert facts_of(section)["driver"]


def make_torch(device, error=None):
    def properties(_):
        if error is not None:
            raise error
        return device

    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_properties=properties)
    return SimpleNamespace(cuda=cuda)


def test_how_devices_are_named():
    nvidia = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 * 2**30)
    amd = SimpleNamespace(name="MI300X", major=9, minor=4, gcnArchName="gfx942", total_memory=2**30)

    assert gpu.list_devices(make_torch(nvidia), []) == ["0: NVIDIA H200, compute capability 9.0, 139 GiB"]
    assert gpu.list_devices(make_torch(amd), []) == ["0: MI300X, gfx942, 1 GiB"]


def test_a_device_that_is_broken_is_a_warning():
    problems = []

    assert gpu.list_devices(make_torch(None, RuntimeError("CUDA error: uncorrectable\nmore")), problems) == []
    assert [problem.text for problem in problems] == ["torch cannot look at cuda devices: CUDA error: uncorrectable"]


def test_the_driver_is_read_from_its_file_or_asked(tmp_path, monkeypatch):
    version = tmp_path / "version"
    monkeypatch.setattr(gpu, "NVIDIA_DRIVER", version)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.find_driver() is None

    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 555.42\necho 555.42\n")
    os.chmod(script, 0o755)
    assert gpu.find_driver() == "555.42"

    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n")
    assert gpu.find_driver() == "570.86.15"


def test_a_driver_without_a_device_is_a_warning(monkeypatch):
    monkeypatch.setattr(gpu, "find_driver", lambda: "570.1")
    monkeypatch.setattr(gpu, "list_devices", lambda torch, problems: [])
    (text,) = texts_of(examine_gpu(), "warning")

    assert text == "there is a driver (570.1), but torch sees no GPU"
