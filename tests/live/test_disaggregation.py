"""A prefill and a decode server, with SGLang's own queues and the mooncake backend over TCP on one host."""

import contextlib
import http.client
import importlib.util
import json
import random
import threading
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from packaging.version import Version

from kvcanary_plugin.demo.model import VOCABULARY
from kvcanary_plugin.demo.server import Server, ServerError, free_port
from kvcanary_plugin.demo.story import match_outcomes
from kvcanary_plugin.versions import installed_sglang
from tests.live.conftest import Guarded, describe


def has_mooncake():
    """It needs libibverbs as well, which a host without RDMA seldom has."""
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec("mooncake") is not None and bool(importlib.import_module("mooncake.engine"))
    return False


pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(Version(installed_sglang()) != Version("0.5.15"), reason="covered for SGLang 0.5.15"),
    pytest.mark.skipif(not has_mooncake(), reason="needs mooncake-transfer-engine-non-cuda and libibverbs1"),
]
ENVIRONMENT = {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1", "SGLANG_HOST_IP": "127.0.0.1"}
ALLOW = {"KVCANARY_ALLOW_INJECT": "1"}
INTERPRETED = {"TRITON_INTERPRET": "1"}  # pages take a kernel of SGLang
POOL = "--max-total-tokens=3000"


class Pair:
    """A prefill server, and a decode server that gets its KV. A context manager."""

    def __init__(self, model, folder, *, prefill=("--kvcanary=log",), decode=("--kvcanary=log",), flags=()):
        self._bootstrap = free_port()
        shared = [POOL, "--disaggregation-transfer-backend=mooncake", *flags]
        shared += [f"--disaggregation-bootstrap-port={self._bootstrap}"]
        self._stack = contextlib.ExitStack()
        self._starts = [
            (model, [*shared, f"--disaggregation-mode={role}", *own], folder / role)
            for role, own in (("prefill", prefill), ("decode", decode))
        ]
        self._rooms = iter(range(1000, 10**9))

    def __enter__(self):
        for _, _, folder in self._starts:
            folder.mkdir(exist_ok=True)
        environment = {**ENVIRONMENT, **ALLOW, **INTERPRETED}
        with contextlib.ExitStack() as stack:
            self.prefill, self.decode = (
                stack.enter_context(Guarded(*start, environment=environment)) for start in self._starts
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def _where(self):
        room = next(self._rooms)
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._bootstrap, "bootstrap_room": room}

    def ask(self, prompt, new_tokens):
        """What a router does: the same request to both, with the same room."""
        where = self._where()
        first = threading.Thread(target=self._prefill, args=(prompt, new_tokens, where), daemon=True)
        first.start()
        try:
            return self.decode.generate(prompt, new_tokens, **where)["output_ids"]
        finally:
            first.join(5)

    def stream(self, prompt, new_tokens):
        """Like :meth:`ask`: every answer that reaches the client, one for each token, until the connection ends."""
        where, answers = self._where(), []
        first = threading.Thread(target=self._prefill, args=(prompt, new_tokens, where), daemon=True)
        first.start()
        params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "stream": True, **where}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.decode.port}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        ends = contextlib.suppress(OSError, http.client.HTTPException)
        with ends, urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                text = line.decode().strip().removeprefix("data: ")
                if text not in ("", "[DONE]"):
                    answers.append(json.loads(text))
        first.join(5)
        return answers

    def _prefill(self, prompt, new_tokens, where):
        with contextlib.suppress(OSError):  # its own answer is of no use
            self.prefill.generate(prompt, new_tokens, **where)

    def give_up(self, prompt, *, is_sent, seconds):
        """A client that goes away so soon; unless ``is_sent``, the prefill server never hears of its request."""
        where, rid = self._where(), uuid.uuid4().hex
        servers = [self.prefill, self.decode] if is_sent else [self.decode]

        def ask(server):
            with contextlib.suppress(OSError):
                server.generate(prompt, 20, rid=rid, **where)

        threads = [threading.Thread(target=ask, args=(server,), daemon=True) for server in servers]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        for server in servers:
            server.post("/abort_request", {"rid": rid})
        for thread in threads:
            thread.join(60)

    def ask_many(self, prompts, new_tokens=12):
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, new_tokens), prompts))

    def violations(self):
        return [*self.prefill.events("violation"), *self.decode.events("violation")]


def make_prompts(count, seed=0, shared=40):
    """Prompts, of which half begin alike."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, VOCABULARY) for _ in range(shared)]
    return [
        stem * (index % 2) + [rng.randrange(3, VOCABULARY) for _ in range(rng.choice((1, 15, 16, 17, 60, 130)))]
        for index in range(count)
    ]


def answer_alone(model, log, prompts, page_size):
    """What one server says, unguarded."""
    flags = [POOL, f"--page-size={page_size}"]
    with Server(model, flags, log, environment=INTERPRETED) as server, ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda prompt: server.generate(prompt, 12)["output_ids"], prompts))


@pytest.mark.parametrize("page_size", [1, 16])
def test_records_come_with_the_kv_and_nothing_is_reported(model, tmp_path, page_size):
    answers = answer_alone(model, tmp_path / "log", make_prompts(24), page_size)
    with Pair(model, tmp_path, flags=[f"--page-size={page_size}"]) as pair:
        assert pair.ask_many(make_prompts(24)) == answers
        for seed in range(1, 4):
            pair.ask_many(make_prompts(24, seed), new_tokens=30)
        for server in (pair.prefill, pair.decode):
            assert server.process.poll() is None, server.tail()
            assert [event["event"] for event in server.events() if event["event"] in ("detached", "uncovered")] == []
        assert pair.violations() == [], describe(pair.violations())


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_lost_or_exchanged_on_the_way_is_found_when_it_has_come(model, tmp_path, page_size):
    faults = ["drop_sent_page", "short_transfer", "wrong_slot", "swap_sent_pages", "swap_sent_rows", "late_page"]
    spec = ";".join(f"{name}@{60 + 40 * place}" for place, name in enumerate(faults))
    decode = ["--kvcanary=log", f"--kvcanary-inject={spec}"]
    with Pair(model, tmp_path, decode=decode, flags=[f"--page-size={page_size}"]) as pair:
        for seed in range(20):
            pair.ask_many(make_prompts(12, seed), new_tokens=20)
            if len(pair.decode.events("injected")) == len(faults):
                break
        assert pair.prefill.events("violation") == []
    phases = {violation["check"]: violation["phase"] for violation in pair.decode.events("violation")}
    assert (phases["chain"], phases["content"]) == ("arrival", "arrival"), describe(pair.decode.events("violation"))
    outcomes, unexplained = match_outcomes(pair.decode.events())
    assert [outcome.injected["fault"] for outcome in outcomes] == faults, describe(pair.decode.events())
    for outcome in outcomes:
        assert outcome.is_found, outcome
        assert outcome.forwards == 0
        assert {violation["position"] for violation in outcome.found} - {None} <= set(outcome.injected["positions"])
    assert unexplained == [], describe(unexplained)


@pytest.mark.parametrize("fault", ["drop_sent_page", "swap_sent_rows"])
@pytest.mark.parametrize("mode", ["log", "raise"])
def test_damage_is_told_ahead_of_the_first_token(model, tmp_path, mode, fault):
    """In ``raise`` that token does not go out at all; in ``log`` it does, and no forward is needed to find it."""
    decode = [f"--kvcanary={mode}", f"--kvcanary-inject={fault}@1"]
    prompt = list(range(3, 103))
    with Pair(model, tmp_path, decode=decode) as pair:
        answers = pair.stream(prompt, 1)
        found = pair.decode.events("violation")
        if mode == "raise":
            assert pair.decode.process.wait(60) != 0
            assert pair.decode.events("stopped") != []
    (injected,) = pair.decode.events("injected")
    assert {violation["phase"] for violation in found} == {"arrival"}, describe(found)
    assert {violation["check"] for violation in found} == {injected["check"]}
    assert {violation["position"] for violation in found} == set(injected["positions"])
    assert {violation["request"] for violation in found} == {injected["request"]}
    tokens = [answer["output_ids"] for answer in answers if "output_ids" in answer]
    assert [len(each) for each in tokens] == ([1] if mode == "log" else []), answers


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_given_up_lets_go_of_its_slots(model, tmp_path, page_size):
    """Every slot of the pool is used again and again behind it, so one that is still held would be told."""
    with Pair(model, tmp_path, flags=[f"--page-size={page_size}"]) as pair:
        pair.ask_many(make_prompts(4))
        rng = random.Random(0)
        for prompt in make_prompts(12, 1):
            pair.give_up(prompt, is_sent=False, seconds=0.3)
        for prompt in make_prompts(24, 2):
            pair.give_up(prompt, is_sent=True, seconds=rng.uniform(0.0, 0.15))
        for seed in range(3, 7):
            pair.ask_many(make_prompts(24, seed), new_tokens=30)
        assert pair.decode.log.read_text().count("Decode transfer failed") >= 12
        assert pair.violations() == [], describe(pair.violations())
        for server in (pair.prefill, pair.decode):
            assert server.process.poll() is None, server.tail()
            assert [event["event"] for event in server.events() if event["event"] == "detached"] == []


@pytest.mark.parametrize("guarded", ["prefill", "decode"])
def test_a_server_that_sends_no_records_is_turned_away(model, tmp_path, guarded):
    """Else one side would write where the other does not look for it."""
    other = {"prefill": "decode", "decode": "prefill"}[guarded]
    with Pair(model, tmp_path, **{other: ["--kvcanary=off"]}) as pair:
        with pytest.raises((OSError, ServerError)):
            pair.ask([5, 6, 7, 8] * 8, 8)
        log = pair.decode.log.read_text()
    assert "KV cache dtype mismatch" in log
    assert "with records kvcanary-2" in log
