"""Mode quarantine on real servers: who is ended and how, who is not, and what the next one with that prompt gets."""

import json
import random
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import pytest

from kvcanary_plugin.demo.model import VOCABULARY, add_tokenizer, make_model
from kvcanary_plugin.demo.server import Server
from kvcanary_plugin.demo.traffic import Traffic
from tests.live.conftest import Guarded, describe

pytestmark = pytest.mark.live
ALLOW = {"KVCANARY_ALLOW_INJECT": "1"}
NEW_TOKENS = 60
PROMPTS = [[random.Random(i).randrange(3, VOCABULARY) for _ in range(60)] for i in range(4)]
APIS = ("native", "native stream", "openai", "openai stream")


@pytest.fixture(scope="module")
def talking_model(tmp_path_factory):
    """A model with a tokenizer, which the OpenAI API needs: token 7 is the word t7."""
    return add_tokenizer(make_model(tmp_path_factory.mktemp("talking")))


@dataclass
class Answer:
    """What a client got."""

    api: str
    status: int
    tokens: list[int]
    error: dict = field(default_factory=dict)

    @property
    def is_error(self):
        return bool(self.error)

    def assert_explained(self):
        """It is an error that says where the damage is and what to do."""
        assert self.status == (200 if "stream" in self.api else 500)  # a stream has begun by then
        assert self.error["message"].startswith("kvcanary: the KV cache of this request is damaged (check ")
        assert "send it again" in self.error["message"]
        assert self.error.get("status_code", self.error.get("code")) in (500, "500")


def ask(server, api, prompt, new_tokens=NEW_TOKENS):
    """One greedy completion."""
    if api.startswith("native"):
        parameters = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        path, body = "/generate", {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
    else:
        path = "/v1/completions"
        body = {"model": "m", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}",
        data=json.dumps({**body, "stream": "stream" in api}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        answer = json.loads(error.read())
        return Answer(api, error.code, [], answer.get("error", answer))
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")] or [text]
    return read(api, [json.loads(line) for line in lines if line != "[DONE]"])


def read(api, chunks):
    """Tokens and error of the chunks of one answer."""
    words, ids, error = "", [], {}
    for chunk in chunks:
        if "error" in chunk:
            error = chunk["error"]
        elif "choices" in chunk:
            words += chunk["choices"][0]["text"]
        else:
            ids = chunk["output_ids"]  # all so far
            seen = [token for _, token, _ in chunk["meta_info"].get("output_token_logprobs", [])]
            assert seen == ids[: len(seen)]  # nor does a damaged token leak out by its probability
            reason = chunk["meta_info"]["finish_reason"]
            if reason is not None and reason["type"] == "abort":
                error = reason
    return Answer(api, 200, ids or [int(word[1:]) for word in words.replace("t", " t").split()], error)


def ask_all(server, shift=0):
    """All prompts at once, over all ways in."""
    answers = [None] * len(PROMPTS)

    def run(index):
        answers[index] = ask(server, APIS[(index + shift) % len(APIS)], PROMPTS[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def settle(server, expected):
    """Serve until the rotating pass is as fast as it gets, which is a few forwards here."""
    for shift in range(4):
        assert [answer.tokens for answer in ask_all(server, shift)] == expected


@pytest.fixture(scope="module")
def expected(talking_model, tmp_path_factory):
    """The right answers: those of a server without the canary."""
    log = tmp_path_factory.mktemp("off") / "log"
    with Server(talking_model, ["--max-total-tokens=4096"], log) as server:
        return [ask(server, "native", prompt).tokens for prompt in PROMPTS]


FAULTS = ("flip_running", "swap_entries", "overwrite_slot", "alias_row", "flip_cached")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        pytest.param([], {}, id="page1"),
        pytest.param(["--page-size=16"], {"TRITON_INTERPRET": "1"}, id="page16"),
        pytest.param(["--disable-radix-cache", "--disable-overlap-schedule"], {}, id="no-radix-no-overlap"),
    ],
)
def test_those_who_read_damage_get_an_error_and_everybody_else_the_right_tokens(
    talking_model, tmp_path, expected, flags, environment
):
    faults = [name for name in FAULTS if name != "flip_cached" or "--disable-radix-cache" not in flags]
    spec = ";".join(f"{name}@{450 + 130 * index}" for index, name in enumerate(faults))
    flags = [
        "--max-total-tokens=4096",
        "--kvcanary=quarantine",
        "--kvcanary-scrub-budget=1",
        f"--kvcanary-inject={spec}",
        *flags,
    ]
    ended = []
    with Guarded(talking_model, flags, tmp_path, environment={**ALLOW, **environment}) as server:
        settle(server, expected)
        for shift in range(40):
            for answer, right in zip(ask_all(server, shift), expected, strict=True):
                if answer.is_error:
                    ended.append(answer)
                else:
                    assert answer.tokens == right, describe(server.events())
                assert answer.tokens == right[: len(answer.tokens)]  # no damaged token went out
            if len(server.events("injected")) == len(faults):
                break
        # Everything that was damaged is computed afresh.
        assert [answer.tokens for answer in ask_all(server)] == expected, describe(server.events())
        server.get("/health_generate")
        events = server.events()
        last = server.events("quarantined")[-1]
        server.post("/flush_cache", {})
        assert [answer.tokens for answer in ask_all(server, 1)] == expected, describe(server.events())
        lifted = server.events("lifted")
        log = server.log.read_text()

    named = [rid for event in events if event["event"] == "quarantined" for rid in event["requests"]]
    damaged = {slot for event in events if event["event"] == "quarantined" for slot in event["slots"]}
    injected = [event for event in events if event["event"] == "injected"]
    assert [event["fault"] for event in injected] == faults, describe(events)
    assert len(named) == len(set(named)) == len(ended) >= len(faults) - 1, describe(events)
    assert damaged >= {slot for event in injected if event["check"] == "content" for slot in event["slots"]}
    assert [event["request"] for event in injected if "request" in event and event["request"] not in named] == []
    assert [event["slot_count"] for event in lifted] == [last["withheld_slots"]]
    assert "leak" not in log
    for answer in ended:
        answer.assert_explained()


@pytest.mark.timeout(600)
def test_every_way_in_gives_the_error_in_its_own_form(talking_model, tmp_path, expected):
    spec = ";".join(f"flip_running@{450 + 80 * index}" for index in range(len(APIS)))
    flags = ["--max-total-tokens=4096", "--kvcanary=quarantine", "--kvcanary-scrub-budget=1"]
    with Guarded(talking_model, [*flags, f"--kvcanary-inject={spec}"], tmp_path, environment=ALLOW) as server:
        settle(server, expected)
        for api in APIS:
            answers = []
            while len(answers) < 6 and not (answers and answers[-1].is_error):
                answers.append(ask(server, api, PROMPTS[3]))
            *good, ended = answers
            assert all(answer.tokens == expected[3] for answer in good)
            ended.assert_explained()
            assert ended.tokens == expected[3][: len(ended.tokens)]
            assert ask(server, api, PROMPTS[3]).tokens == expected[3]

    assert len(server.events("injected")) == len(APIS)


@pytest.mark.timeout(900)
def test_chunks_retraction_eviction_and_aborts_go_on_under_repeated_damage(talking_model, tmp_path):
    """A small pool under pressure: SGLang's own leak checks must add up, and nobody else may fail."""
    spec = ";".join(f"{FAULTS[index % len(FAULTS)]}@{100 + 25 * index}" for index in range(25))
    flags = [
        "--max-total-tokens=1200",
        "--chunked-prefill-size=64",
        "--schedule-conservativeness=0.05",
        "--kvcanary=quarantine",
        "--kvcanary-scrub-budget=1",
        f"--kvcanary-inject={spec}",
    ]
    strict = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with Guarded(talking_model, flags, tmp_path, environment={**ALLOW, **strict}) as server:
        with Traffic(server, clients=8, seed=1, abort_share=0.1) as traffic:
            traffic.stop_after(260)
            traffic.join()
        time.sleep(2)  # idle: SGLang checks for leaks
        assert server.process.poll() is None, server.tail()
        server.get("/health_generate")
        ended = server.log.read_text().count("500 Internal Server Error")
        injected = server.events("injected")

    assert len(injected) >= 15
    assert 0 < traffic.counts["failed"] == ended <= 3 * len(injected)
    assert traffic.counts["answered"] > 150
    assert server.events("detached") == []


@pytest.mark.timeout(600)
def test_a_burst_ends_requests_without_flooding_the_log(talking_model, tmp_path, expected):
    """Many faults in a row; the server goes on, and what it says is bounded."""
    spec = ";".join(f"overwrite_slot@{450 + index}" for index in range(120))
    flags = [
        "--max-total-tokens=4096",
        "--kvcanary=quarantine",
        "--kvcanary-scrub-budget=1",
        f"--kvcanary-inject={spec}",
    ]
    with Guarded(talking_model, flags, tmp_path, environment=ALLOW) as server:
        settle(server, expected)
        for shift in range(60):
            ask_all(server, shift)
            if len(server.events("injected")) == 120:
                break
        assert [answer.tokens for answer in ask_all(server)] == expected, describe(server.events()[-40:])
        log = server.log.read_text()

    assert len(server.events("injected")) == 120
    assert len(server.events("degraded")) == 1
    assert log.count("kvcanary: degraded") == 1
    assert log.count("kvcanary: quarantined") <= 30
