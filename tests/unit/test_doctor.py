"""What ``kvcanary doctor`` says and returns."""

import io

from rich.console import Console
from sglang.srt.managers.scheduler import Scheduler

from kvcanary_plugin.doctor import run_doctor
from kvcanary_plugin.patches.modes import MODE_GAPS
from kvcanary_plugin.pool_patcher.seams import SourceTree
from kvcanary_plugin.versions import installed_sglang


def examine():
    output = io.StringIO()
    code = run_doctor(Console(file=output, width=200))
    return code, output.getvalue()


def test_an_installation_as_expected():
    code, text = examine()

    assert code == 0
    assert f"sglang {installed_sglang()}" in text
    assert "all seams as expected" in text
    (covered,) = [line for line in text.splitlines() if line.startswith("pools ")]
    (uncovered,) = [line for line in text.splitlines() if line.startswith("uncovered ")]
    assert "MHATokenToKVPool" in covered
    assert "HiSparseDSATokenToKVPool" in uncovered
    assert all(gap.setting in text for gap in MODE_GAPS)


def test_a_method_that_changed_under_it(monkeypatch):
    monkeypatch.setattr(Scheduler, "run_batch", lambda self, work: work)
    code, text = examine()

    assert code == 1
    assert "Scheduler.run_batch takes (self, work); expected it to begin (self, batch)" in text


def test_a_field_that_is_gone(monkeypatch):
    true_has = SourceTree.has
    monkeypatch.setattr(SourceTree, "has", lambda self, field: field.name != "extend_lens" and true_has(self, field))
    code, text = examine()

    assert code == 1
    assert "extend_lens" in text
