"""The metrics themselves, and the dashboard, the alerts and the page about them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from kvcanary_plugin import __version__
from kvcanary_plugin.report.metrics import COUNTERS, GAUGES, STATES, Metrics
from kvcanary_plugin.runtime import heartbeat
from kvcanary_plugin.runtime.figures import Figures, Sweep, Vitals
from kvcanary_plugin.tiers.digest_store import open_digests
from kvcanary_plugin.tiers.finding import EXPLANATIONS, TierViolation, listen, report
from kvcanary_plugin.tiers.outcomes import REJECTED, PageTotals, total_pages
from kvcanary_plugin.tiers.page_check import PageCheck
from tests.unit.sessions import Served

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "examples" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "examples" / "grafana" / "kvcanary.json"
NAME = re.compile(r"\bkvcanary_[a-z_]+")

SWEEP = Sweep(
    pool="full", folded=70, folded_bytes=7000, passes=2, period_forwards=20, period_seconds=1.5, oldest_monotonic=0.0
)
VITALS = Vitals(
    state="guarding",
    mode="quarantine",
    checks=("chain", "content"),
    figures=Figures(forwards=9, verified=100, stored=40, sweeps=(SWEEP,)),
    serving_seconds=0.25,
    idle_seconds=2.0,
    quarantine={"state": "degraded", "ended_total": 3, "withheld_slots": 16, "refused_slots": 1, "tainted_points": 2},
    pages={"kv": PageTotals(verified=5, stored=7)},
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [heartbeat.time.monotonic()]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


class Exported(Served):
    """With ``--enable-metrics``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.session.heartbeat.export(rank=3)
        assert self.reporter.metrics is not None
        self.metrics: Metrics = self.reporter.metrics

    def value(self, name: str, **labels: str) -> float | None:
        labels = {"rank": "3", "pool": self.guard.pool.name, **labels}
        return self.metrics.registry.get_sample_value(f"kvcanary_{name}", labels)


def series(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample, by name and values of its labels."""
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for sample in samples
        if not sample.name.endswith("_created")
    }


def test_metrics_and_event_say_the_same(clock: list[float]):
    engine = Exported()
    engine.prefill(request := engine.request(30))
    engine.run(request, steps=4)
    clock[0] += heartbeat.PERIOD_SECONDS
    engine.decode(request)
    (beat,) = [fields for name, fields in engine.reporter.events if name == "heartbeat"]
    assert beat["verified"] == engine.value("verified_slots_total") == sum(range(30, 35))
    assert beat["stored"] == engine.value("stored_slots_total") == 35
    assert beat["forwards"] == engine.value("forwards_total") == 6
    assert beat["folded"] == engine.value("folded_slots_total") > 0
    assert beat["folded_bytes"] == engine.value("folded_bytes_total")
    assert beat["period_forwards"] == engine.value("scrub_period_forwards")
    assert beat["oldest_unverified_seconds"] == pytest.approx(engine.value("scrub_oldest_age_seconds"), abs=1e-3)
    assert beat["serving_seconds"] == pytest.approx(engine.value("host_seconds_total", during="serving"), abs=1e-3)
    assert engine.value("slots") == engine.guard.pool.slot_count
    assert engine.value("resident_bytes") == engine.guard.resident_bytes
    assert engine.value("guard_state", state="guarding") == 1
    assert engine.value("info", version=__version__, mode="log", checks="+".join(engine.guard.checks)) == 1


def test_metrics_are_brought_up_to_date_by_the_clock_and_not_by_the_step(clock: list[float]):
    engine = Exported()
    engine.prefill(request := engine.request(30))
    engine.run(request, steps=3)
    assert engine.value("forwards_total") == 0
    clock[0] += heartbeat.METRICS_PERIOD_SECONDS
    engine.decode(request)
    assert engine.value("forwards_total") == 5
    engine.decode(request)
    assert engine.value("forwards_total") == 5
    clock[0] += heartbeat.METRICS_PERIOD_SECONDS
    engine.session.idle()
    assert engine.value("forwards_total") == 6


def test_damage_is_counted_at_once_with_repeats_and_a_clean_pool_has_zeros(clock: list[float]):
    engine = Exported()
    engine.prefill(request := engine.request(30))
    engine.run(request, steps=3)
    found = {key: value for key, value in series(engine.metrics).items() if key[0] == "kvcanary_violations_total"}
    assert {key[3] for key in found} >= {"chain", "content", "presence", "ownership", "identity", "unlisted"}
    assert set(found.values()) == {0}
    engine.rows.req_to_token[request.req_pool_idx, 5] = engine.rows.req_to_token[request.req_pool_idx, 6]
    engine.decode(request)
    engine.decode(request)
    assert engine.value("violations_total", check="chain", tier="device") == engine.reporter.counts["chain"] >= 2
    assert engine.value("violations_total", check="content", tier="device") == 0


def test_a_detached_guard_stays_visible_as_such(clock: list[float]):
    engine = Exported()
    pool = engine.guard.pool.name
    engine.prefill(engine.request(30))
    engine.session.announce(lambda batch: 1 / 0, None)
    engine.session.settle(object())
    told = series(engine.metrics)
    states = {state: told["kvcanary_guard_state", "3", pool, state] for state in STATES}
    assert states == {**dict.fromkeys(STATES, 0), "detached": 1}
    assert told["kvcanary_stored_slots_total", "3", pool] == 30
    first = told["kvcanary_heartbeat_timestamp_seconds", "3", pool]
    clock[0] += heartbeat.METRICS_PERIOD_SECONDS
    engine.session.idle()
    assert series(engine.metrics)["kvcanary_heartbeat_timestamp_seconds", "3", pool] > first


def test_containment_is_shown_and_ends_with_a_flush():
    metrics = Metrics(0, "full", slots={"full": 512})
    metrics.show(VITALS)
    told = series(metrics)
    assert told["kvcanary_degraded", "0", "full"] == 1
    assert told["kvcanary_ended_requests_total", "0", "full"] == 3
    assert told["kvcanary_withheld_slots", "0", "full"] == 16
    assert told["kvcanary_refused_slots", "0", "full"] == 1
    assert told["kvcanary_tainted_prefixes", "0", "full"] == 2
    assert told["kvcanary_scrub_period_seconds", "0", "full"] == 1.5
    metrics.show(Vitals("guarding", "quarantine", quarantine={"state": "normal", "ended_total": 3}))
    told = series(metrics)
    assert (told["kvcanary_degraded", "0", "full"], told["kvcanary_withheld_slots", "0", "full"]) == (0, 0)
    assert told["kvcanary_ended_requests_total", "0", "full"] == 3


def test_violations_of_host_memory_begin_at_zero_once_there_is_any():
    metrics = Metrics(0, "full")
    metrics.show(Vitals("guarding", "log"))
    assert "host" not in {label for key in series(metrics) for label in key}
    metrics.show(Vitals("guarding", "log", has_host=True))
    told = series(metrics)
    assert told["kvcanary_violations_total", "0", "full", "content", "host"] == 0
    assert told["kvcanary_violations_total", "0", "full/host", "ownership", "host"] == 0


def test_only_the_mode_in_force_is_1():
    metrics = Metrics(0, "full")
    for mode in ("log", "off", "log"):
        metrics.show(Vitals("guarding", mode, ("chain",)))
    told = series(metrics)
    assert told["kvcanary_info", "0", "full", __version__, "log", "chain"] == 1
    assert told["kvcanary_info", "0", "full", __version__, "off", "chain"] == 0


def test_pages_of_storage_and_their_violations_are_counted_by_reason_and_tier(clock: list[float]):
    engine = Exported()
    backends: list[dict[str, Counter[str]]] = [{"kv": Counter(hit=4, absent=9)}, {"kv": Counter(verified=1, unknown=2)}]
    for status in backends:
        engine.session.heartbeat.watch_storage(lambda status=status: status)
    clock[0] += heartbeat.METRICS_PERIOD_SECONDS
    engine.session.idle()
    assert engine.value("storage_pages_verified_total", pool="kv") == 5
    assert engine.value("storage_pages_rejected_total", pool="kv", reason="unknown") == 2
    assert engine.value("storage_pages_rejected_total", pool="kv", reason="digest") == 0
    assert engine.value("violations_total", pool="kv", check="content", tier="storage") == 0
    listen(engine.reporter)
    report([TierViolation("digest", "kv", 3, "a key", "somewhere")] * 2)
    listen(None)
    backends[0]["kv"]["digest"] += 2
    clock[0] += heartbeat.METRICS_PERIOD_SECONDS
    engine.session.idle()
    assert engine.value("violations_total", pool="kv", check="content", tier="storage") == 2
    assert engine.value("storage_pages_rejected_total", pool="kv", reason="digest") == 2
    assert "a key" not in generate_latest(engine.metrics.registry).decode()


def test_every_outcome_of_a_page_that_came_back_has_its_place():
    outcomes = ("hit", "verified", "stored", *REJECTED, "absent", "duplicate", "evicted")
    totals = total_pages([{"kv": dict.fromkeys(outcomes, 1)}])["kv"]
    assert (totals.verified, totals.stored, sum(totals.rejected.values())) == (2, 1, len(REJECTED))


def test_the_outcomes_that_a_guard_around_a_backend_counts_are_known(tmp_path: Path):
    digests = open_digests(str(tmp_path / "digests.sqlite"))
    check = PageCheck(digests, b"i" * 16, pool="kv", rank=0, place="a backend", is_exclusive=True)
    page, other = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    check.note(["a", "b"], [(page,), (page,)], lambda key: True)
    check.verify(["a", "b", "c", "d"], [(page,), (other,), (page,), None])
    digests.close()
    totals = total_pages([{"kv": check.counts}])["kv"]
    told = {"verified": 1, "stored": 2, "rejected": {"damaged": 1, "unknown": 1}}
    assert totals.to_dict() == told
    assert sum(check.counts.values()) == 5  # none of them went by unnoticed


def test_every_reason_for_which_a_page_of_the_verified_tier_is_damaged_is_known():
    assert set(EXPLANATIONS) - {"scope"} <= set(REJECTED)  # what a guard calls "damaged" is "digest" or "scope"


def test_an_error_of_the_metrics_ends_them_and_nothing_else(clock: list[float], monkeypatch: Any, caplog: Any):
    engine = Exported(mode="raise")
    monkeypatch.setattr(engine.metrics, "_set", lambda *_: 1 / 0)
    for _ in range(2):
        clock[0] += heartbeat.PERIOD_SECONDS
        engine.prefill(engine.request(3))
    assert engine.session.state == "guarding"
    assert caplog.text.count("metrics are no longer exported") == 1
    assert len([name for name, _ in engine.reporter.events if name == "heartbeat"]) == 2
    engine.reporter.count("chain", "device", "full")
    assert engine.reporter.counts["chain"] == 1


def test_metrics_that_cannot_be_opened_leave_the_guard_alone(monkeypatch: Any, caplog: Any):
    engine = Served()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    engine.session.heartbeat.export(rank=3)
    engine.prefill(engine.request(3))
    assert engine.session.state == "guarding"
    assert "no metrics are exported" in caplog.text


PROGRAM = """\
import sys
from kvcanary_plugin.report.metrics import Metrics
from kvcanary_plugin.runtime.figures import Figures, Vitals
rank, forwards, state = sys.argv[1:]
metrics = Metrics(int(rank), "full", slots={"full": 512})
metrics.count_violations("chain", "device", "full", 3)
for so_far in (4, int(forwards)):
    metrics.show(Vitals(state, "log", ("chain",), Figures(forwards=so_far)))
"""


def write_from_a_process(folder: Path, rank: int, forwards: int, state: str) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rank), str(forwards), state],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_processes_write_is_read_exactly_and_the_last_process_of_a_rank_counts(tmp_path: Path):
    def value(name: str, rank: int, **labels: str) -> float | None:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(tmp_path))
        return registry.get_sample_value(f"kvcanary_{name}", {"rank": str(rank), "pool": "full", **labels})

    write_from_a_process(tmp_path, 0, 10, "detached")
    write_from_a_process(tmp_path, 1, 20, "guarding")
    assert (value("forwards_total", 0), value("forwards_total", 1)) == (10, 20)
    assert value("violations_total", 0, check="chain", tier="device") == 3
    assert value("slots", 0) == 512
    assert value("guard_state", 0, state="detached") == 1
    write_from_a_process(tmp_path, 0, 5, "guarding")  # started anew in a folder that was kept
    assert value("guard_state", 0, state="detached") == 0
    assert value("guard_state", 0, state="guarding") == 1
    assert value("forwards_total", 0) == 15
    assert value("slots", 0) == 512


def test_nothing_is_loaded_before_it_is_asked_for():
    program = "import sys, kvcanary_plugin.report.metrics, kvcanary_plugin.runtime.heartbeat\n"
    program += "assert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120, check=True)


# The dashboard, the alerts and the page


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of all series that the real object gives, as a scrape has them."""
    metrics = Metrics(0, "full", slots={"full": 512}, states=["full/mamba"], resident_bytes=1)
    metrics.show(VITALS)
    return {sample.name for family in metrics.registry.collect() for sample in family.samples} - {
        f"kvcanary_{name}_created" for name in COUNTERS
    }


def test_every_declared_metric_is_exported(exported: set[str]):
    assert exported == {f"kvcanary_{name}_total" for name in COUNTERS} | {f"kvcanary_{name}" for name in GAUGES}


def read_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def read_queries() -> list[str]:
    """Expressions of all panels, and of the variables."""
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return targets + [entry["definition"] for entry in dashboard["templating"]["list"] if entry["type"] == "query"]


def test_alerts_name_metrics_that_exist_and_say_what_to_do(exported: set[str]):
    rules = read_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 7
    for rule in rules:
        named = set(NAME.findall(rule["expr"]))
        assert named, rule["alert"]
        assert named <= exported, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == "docs/operations.md#when-it-fires"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_alerts_and_dashboard_use_labels_that_their_metrics_have():
    labels = {f"kvcanary_{name}_total": {"rank", "pool", *more} for name, (more, _) in COUNTERS.items()}
    labels |= {f"kvcanary_{name}": {"rank", "pool", *more} for name, (more, _) in GAUGES.items()}
    for query in [rule["expr"] for rule in read_rules()] + read_queries():
        for name, selector in re.findall(r"\b(kvcanary_[a-z_]+)\{([^}]*)\}", query):
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert asked <= labels[name] | {"job", "instance"}, query


def test_states_and_reasons_that_alerts_look_for_exist():
    known = {"state": set(STATES), "reason": set(REJECTED)}
    for rule in read_rules():
        for label, _, values in re.findall(r'(state|reason)(=~|!~|=)"([^"]*)"', rule["expr"]):
            assert set(values.split("|")) <= known[label], rule["alert"]


def test_the_dashboard_shows_metrics_that_exist_from_a_source_that_can_be_chosen(exported: set[str]):
    dashboard = json.loads(DASHBOARD.read_text())
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Health", "Findings", "Containment", "Cost", "Storage"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    sources = {json.dumps(panel["datasource"]) for panel in dashboard["panels"] if panel["type"] != "row"}
    assert sources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    assert "__inputs" not in dashboard
    named = {name for query in read_queries() for name in NAME.findall(query)}
    assert named == exported


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_page_has_every_metric_with_its_labels_and_alerts(exported: set[str]):
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()
        if line.startswith("| `kvcanary_")
    ]
    assert {row[0].strip("`") for row in rows} == exported
    rules = read_rules()
    for name, kind, labels, _, _, alerts in rows:
        family, declared = name.strip("`"), COUNTERS if kind == "counter" else GAUGES
        short = family.removeprefix("kvcanary_").removesuffix("_total")
        assert re.findall(r"`(\w+)`", labels) == list(declared[short][0]), name
        using = {rule["alert"] for rule in rules if family in NAME.findall(rule["expr"])}
        assert set(re.findall(r"`(\w+)`", alerts)) == using, name


def test_promtool_finds_nothing_wrong():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (in Debian's package prometheus) is not installed: the rules were only parsed as YAML")
    done = subprocess.run([promtool, "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scrape_example_reads_the_rules_under_the_job_that_they_name():
    config = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())
    assert config["rule_files"] == [ALERTS.name]
    jobs = set(re.findall(r'job="(\w+)"', ALERTS.read_text()))
    assert jobs == {entry["job_name"] for entry in config["scrape_configs"]}
