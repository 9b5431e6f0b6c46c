"""A running server is asked and changed through SGLang's own HTTP server, by the commands people use."""

import json
import os
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from kvcanary_plugin.demo.server import Server
from kvcanary_plugin.demo.traffic import Traffic
from tests.live.conftest import describe

pytestmark = pytest.mark.live

KEY = "only-for-admins"


class Operator:
    """Runs ``kvcanary`` against a server."""

    def __init__(self, server, key=None):
        self._url = f"http://127.0.0.1:{server.port}"
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCANARY")}
        if key:
            self._environment["KVCANARY_API_KEY"] = key

    def __call__(self, command, *arguments):
        """Exit code, and what was printed where it is 2, else the JSON."""
        process = subprocess.run(
            [sys.executable, "-m", "kvcanary_plugin.cli", command, "--url", self._url, "--json", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if process.returncode == 2:
            assert process.stdout == ""
            return 2, process.stderr.strip()
        self.hint = process.stderr.strip()
        [outcome] = json.loads(process.stdout)
        return process.returncode, outcome


def drive(server, requests, seed):
    with Traffic(server, clients=4, seed=seed, abort_share=0) as traffic:
        traffic.stop_after(requests)
        traffic.join()
    assert traffic.counts["failed"] == 0, server.tail()


@pytest.mark.timeout(600)
def test_status_set_and_audit(guarded):
    flags = [
        "--kvcanary=log",
        "--max-total-tokens=2000",
        f"--admin-api-key={KEY}",
        "--kvcanary-scrub-budget=0.001",
        "--kvcanary-inject=flip_cached@1000000",  # never: faults cannot come in this way either
    ]
    with guarded(flags=flags, environment={"KVCANARY_ALLOW_INJECT": "1"}) as server:
        operator = Operator(server, KEY)
        drive(server, 20, seed=1)
        code, state = operator("status")
        assert (code, state["state"], state["mode"], state["violations"]) == (0, "guarding", "log", {})
        assert operator.hint == ""
        assert state["verified"] > 0
        assert state["scrub_budget"] == 0.001

        code, said = Operator(server)("set", "--scrub-budget=0.02")
        assert (code, "KVCANARY_API_KEY" in said) == (2, True), said
        code, said = Operator(server, "wrong")("audit")
        assert (code, "asks for a key" in said) == (2, True), said
        assert operator("status")[1]["scrub_budget"] == 0.001

        assert operator("set", "--scrub-budget=0.02", "--checks=chain,content,identity")[0] == 0
        code, state = operator("status")
        assert (code, state["scrub_budget"], state["checks"]) == (0, 0.02, ["chain", "content", "identity"])
        assert operator("set", "--checks=chain,content,presence,ownership,identity")[0] == 0
        code, said = operator("set", "--mode=quarantine")
        assert (code, "start it with --kvcanary quarantine" in said) == (2, True), said

        # Under load, and idle.
        with Traffic(server, clients=4, seed=2, abort_share=0) as traffic:
            code, audit = operator("audit")
            traffic.stop_after(20)
            traffic.join()
        assert (code, audit["state"], audit["slots"], audit["violations"]) == (0, "done", 2000, {})
        code, audit = operator("audit")
        assert (code, audit["number"], audit["violations"]) == (0, 2, {})

        # Switched off, nobody looks; switched on again, with the flush.
        assert operator("set", "--mode=off")[0] == 0
        forwards = operator("status")[1]["forwards"]
        drive(server, 20, seed=3)
        code, state = operator("status")
        assert (code, state["state"], state["forwards"]) == (1, "paused", forwards)
        assert operator("set", "--mode=log")[1]["state"] == "waiting"
        assert operator.hint.startswith("waiting: it takes effect with the next flush")
        drive(server, 10, seed=4)
        assert operator("set", "--flush")[1]["state"] == "guarding"
        assert operator.hint == "the cache was flushed"
        drive(server, 40, seed=5)
        code, audit = operator("audit")
        assert (code, audit["violations"]) == (0, {})
        assert operator("status")[1]["forwards"] > forwards

        assert server.process.poll() is None, server.tail()
        assert server.events("violation") == [], describe(server.events())
        names = [event["event"] for event in server.events() if event["event"] in ("changed", "resumed")]
        assert names == ["changed"] * 6 + ["resumed", "changed"], names
        assert "Traceback" not in server.log.read_text()


@pytest.mark.skipif(
    torch.get_device_module() is torch.cuda and not torch.cuda.is_available(),
    reason="with this torch, SGLang waits for a GPU before it gives memory back",
)
@pytest.mark.timeout(300)
def test_memory_that_is_given_back_and_taken_again(guarded):
    """On a CPU no memory goes; what SGLang calls, and what the guard is told, is the same."""
    with guarded(flags=["--kvcanary=log", "--max-total-tokens=2000"]) as server:
        operator = Operator(server)
        for seed, tags in enumerate(({"tags": ["kv_cache"]}, {}), 1):
            drive(server, 20, seed=seed)
            time.sleep(1)  # SGLang ends itself if it is asked while the last batch is still on its way
            server.post("/release_memory_occupation", tags)
            code, state = operator("status")
            assert (code, state["state"]) == (1, "released")
            server.post("/resume_memory_occupation", tags)
            assert operator("status")[1]["state"] == "guarding"
        drive(server, 20, seed=3)
        code, audit = operator("audit")
        assert (code, audit["state"], audit["violations"]) == (0, "done", {})
        assert server.process.poll() is None, server.tail()
        assert server.events("violation") == [], describe(server.events())
        names = [event["event"] for event in server.events() if event["event"] in ("resumed", "released")]
        assert names == ["released", "resumed"] * 2
        assert "Traceback" not in server.log.read_text()


@pytest.mark.timeout(300)
def test_an_audit_finds_what_the_rotating_pass_has_not_come_to(guarded):
    flags = [
        "--kvcanary=log",
        "--kvcanary-checks=chain,content",
        "--max-total-tokens=4000",
        "--kvcanary-inject=flip_cached@300",
    ]
    with guarded(flags=flags, environment={"KVCANARY_ALLOW_INJECT": "1"}) as server:
        operator = Operator(server)
        with Traffic(server, clients=4, seed=1, abort_share=0) as traffic:
            while not server.events("injected"):
                assert traffic.counts["sent"] < 2000
                server.get("/health")
            code, audit = operator("audit")
            traffic.stop_after(1)
            traffic.join()
        assert code == 1
        assert audit["violations"]["content"] >= 1
        code, state = operator("set", "--mode=raise")  # what is known does not stop the server
        assert (code, state["mode"]) == (0, "raise")
        assert operator("status")[0] == 1
        assert server.process.poll() is None, server.tail()
        [injected] = server.events("injected")
        assert {event["slot"] for event in server.events("violation")} == set(injected["slots"])


@pytest.mark.timeout(300)
def test_a_server_without_a_guard_says_so(model, tmp_path):
    with Server(model, ["--max-total-tokens=1000"], tmp_path / "log") as server:
        for command in (["status"], ["audit"], ["set", "--mode=off"]):
            code, said = Operator(server)(*command)
            assert code == 2
            assert "runs without kvcanary" in said
            assert "start it with --kvcanary log" in said
        body = json.dumps({"server_args": {"kvcanary?mode=off": 1}}).encode()
        url = f"http://127.0.0.1:{server.port}/set_internal_state"
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        assert json.loads(urllib.request.urlopen(request).read()) == [False]
