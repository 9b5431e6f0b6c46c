"""Servers of several ranks: each guards its own shard, and all do the same about what one of them finds."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from packaging.version import Version

from kvcanary_plugin.demo.traffic import Traffic
from kvcanary_plugin.versions import installed_sglang
from tests.live.conftest import describe
from tests.live.test_quarantine import NEW_TOKENS, PROMPTS, ask

# What it takes to have several ranks on a CPU was looked up for this release.
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(Version(installed_sglang()) != Version("0.5.15"), reason="no launcher for ranks on a CPU"),
]
MODES = {"tensor": ["--tp-size=2"], "replicas": ["--dp-size=2"], "stages": ["--pp-size=2"]}
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture
def start(guarded):
    """Starts a server of two ranks, in one of ``MODES``."""

    def make(mode, *flags, inject=""):
        spec = [f"--kvcanary-inject={inject}"] if inject else []
        flags = [*MODES[mode], "--max-total-tokens=3000", "--chunked-prefill-size=64", *flags, *spec]
        environment = {"KVCANARY_ALLOW_INJECT": "1", **(CORES if mode == "tensor" else {})}
        return guarded(flags=flags, environment=environment, launcher="tests.live.with_ranks")

    return make


def drive(server, requests, seed=1):
    with Traffic(server, clients=4, seed=seed) as traffic:
        traffic.stop_after(requests)
        traffic.join()
    assert traffic.counts["failed"] == 0, server.tail()
    assert server.process.poll() is None, server.tail()


def wait_for(condition, patience_s=120):
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and not condition():
        time.sleep(0.3)


@pytest.mark.parametrize("mode", MODES)
def test_each_rank_guards_its_shard_and_finds_what_is_damaged_there_alone(start, mode):
    with start(mode, "--kvcanary=log", inject="flip_running@200:rank=1") as server:
        assert {event["rank"] for event in server.events("attached")} == {0, 1}
        with Traffic(server, clients=4):
            wait_for(lambda: server.events("violation"))
        (injected,), violations = server.events("injected"), server.events("violation")
        drive(server, 40)
        found = server.events("violation")
    assert violations, describe(server.events())
    assert {(v["check"], v["rank"], v["slot"]) for v in found} == {("content", 1, injected["slots"][0])}
    assert {(v["layer"], v["half"]) for v in found} == {(injected["layer"], injected["half"])}
    if mode == "stages":
        assert injected["layer"] in (2, 3), "layers are counted through all stages"
    assert "detached" not in {event["event"] for event in server.events()}


@pytest.mark.parametrize("mode", ["tensor", "stages"])
def test_without_a_fault_no_rank_reports_anything(start, mode):
    with start(mode, "--kvcanary=log", "--kvcanary-scrub-budget=0.01") as server:
        for seed in range(2):
            drive(server, 60, seed)
            server.post("/flush_cache", {})
        assert server.events("violation") == [], describe(server.events("violation"))
        assert "detached" not in {event["event"] for event in server.events()}


def test_a_broken_row_on_one_stage_is_found_before_its_forward(start):
    with start("stages", "--kvcanary=log", inject="swap_entries@200:rank=1;free_running@240:rank=0") as server:
        with Traffic(server, clients=4):
            wait_for(lambda: len(server.events("injected")) == 2)
            time.sleep(1)
        injected, found = server.events("injected"), server.events("violation")
    for event, rank in zip(injected, (1, 0), strict=True):
        seen = [v for v in found if (v["check"], v["rank"], v["step"]) == (event["check"], rank, event["step"])]
        assert {v["slot"] for v in seen} >= set(event["slots"]), describe(server.events())


def ask_both_ways(server):
    """All prompts at once."""
    ways = ["native", "native stream"] * 2
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda way, prompt: ask(server, way, prompt), ways, PROMPTS))


def test_damage_on_one_rank_ends_the_request_on_both(start):
    """Everybody else, and both ranks, go on; the same prompt then has the right answer."""
    faults = ["flip_running", "swap_entries"]
    spec = ";".join(f"{name}@{450 + 130 * place}:rank=1" for place, name in enumerate(faults))
    ended = []
    with start("tensor", "--kvcanary=quarantine", "--kvcanary-scrub-budget=1", inject=spec) as server:
        expected = [answer.tokens for answer in ask_both_ways(server)]
        assert all(len(tokens) == NEW_TOKENS for tokens in expected)
        for _ in range(40):
            for answer, right in zip(ask_both_ways(server), expected, strict=True):
                assert answer.is_error or answer.tokens == right, describe(server.events())
                assert answer.tokens == right[: len(answer.tokens)], "a damaged token went out"
                ended += [answer] * answer.is_error
            if len(server.events("injected")) == len(faults):
                break
        assert [answer.tokens for answer in ask_both_ways(server)] == expected, describe(server.events())
        drive(server, 30)
        injected, violations = server.events("injected"), server.events("violation")
        quarantined = server.events("quarantined")
    assert [event["fault"] for event in injected] == faults, describe(server.events())
    assert {violation["rank"] for violation in violations} == {1}
    named = {event["request"] for event in injected}
    for pid in {event["pid"] for event in server.events("attached")}:  # both say that they ended them
        assert named <= {rid for event in quarantined if event["pid"] == pid for rid in event["requests"]}
    assert len(ended) >= len(faults)
    for answer in ended:  # the first rank answers, which has found nothing itself: of rows it knows no more than that
        assert re.search(r"is damaged \((found on another rank|check content, slot \d+, .*)\)", answer.error["message"])
        assert answer.status == (200 if "stream" in answer.api else 500)
