"""What a real server exports: from the scheduler's process, through SGLang's endpoint, without a loss or a doubling."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcanary_plugin.demo.traffic import Traffic

pytestmark = pytest.mark.live
FAULT_STEP = 300  # far behind what the clean phase runs


def scrape(server: Any) -> dict[str, float]:
    """Every sample of ours; the labels that differ within this server are part of the name."""
    samples = {}
    for family in text_string_to_metric_families(server.get("/metrics").decode()):
        for sample in family.samples:
            if sample.name.startswith("kvcanary_"):
                labels = dict(sample.labels)
                assert (labels.pop("rank"), labels.pop("pool")) == ("0", "rows"), sample
                if sample.name == "kvcanary_info":
                    labels.pop("version")
                samples[" ".join((sample.name, *(labels[name] for name in sorted(labels))))] = sample.value
    return samples


def wait_for(condition: Callable[[], Any], what: str, patience_s: float = 120) -> Any:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.5)
    raise AssertionError(f"{what} did not happen within {patience_s:.0f} s")


def at_rest(server: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and heartbeat event of a server that has had nothing to do for a while."""
    known = len(server.events("heartbeat"))
    beat = wait_for(lambda: server.events("heartbeat")[known:], "a heartbeat")[0]
    return scrape(server), beat


def check_equal(metrics: dict[str, float], beat: dict[str, Any]) -> None:
    assert metrics["kvcanary_forwards_total"] == beat["forwards"]
    assert metrics["kvcanary_verified_slots_total"] == beat["verified"]
    assert metrics["kvcanary_stored_slots_total"] == beat["stored"]
    counted = {name.split()[1]: value for name, value in metrics.items() if "violations_total" in name and value}
    assert counted == beat["violations"]


def test_the_endpoint_has_what_the_guard_did_and_found(guarded):
    flags = [
        "--kvcanary=log",
        "--enable-metrics",
        "--max-total-tokens=4096",
        f"--kvcanary-inject=swap_entries@{FAULT_STEP}",
    ]
    with guarded(flags=flags, environment={"KVCANARY_ALLOW_INJECT": "1"}) as server:
        server.generate(list(range(1, 100)), 20)
        clean, beat = at_rest(server)
        assert FAULT_STEP > clean["kvcanary_forwards_total"] >= 20
        assert clean["kvcanary_verified_slots_total"] > 99
        assert clean["kvcanary_violations_total chain device"] == 0
        assert clean["kvcanary_guard_state guarding"] == 1
        assert clean["kvcanary_guard_state detached"] == 0
        (attached,) = server.events("attached")
        assert clean[f"kvcanary_info {'+'.join(attached['checks'])} log"] == 1
        assert abs(clean["kvcanary_heartbeat_timestamp_seconds"] - time.time()) < 30
        check_equal(clean, beat)

        with Traffic(server):
            wait_for(lambda: scrape(server)["kvcanary_violations_total chain device"], "a violation")
        damaged, beat = at_rest(server)
        assert [event["fault"] for event in server.events("injected")] == ["swap_entries"]
        assert {event["check"] for event in server.events("violation")} == set(beat["violations"])
        check_equal(damaged, beat)
        assert damaged["kvcanary_heartbeat_timestamp_seconds"] > clean["kvcanary_heartbeat_timestamp_seconds"]
        assert damaged["kvcanary_folded_bytes_total"] > clean["kvcanary_folded_bytes_total"] > 0
        assert damaged["kvcanary_host_seconds_total serving"] > clean["kvcanary_host_seconds_total serving"] > 0
        assert damaged["kvcanary_scrub_oldest_age_seconds"] < 120
