"""Real servers under mixed traffic without a fault: nothing may be reported."""

import random
import threading
import time

import pytest

from benchmarks.server.adapters import make_adapter
from kvcanary_plugin.demo.model import VOCABULARY
from kvcanary_plugin.demo.traffic import Traffic
from tests.live.conftest import describe

pytestmark = pytest.mark.live


HARMLESS = ("attached", "learned", "heartbeat", "weights", "mixed_weights")


def drive(server, requests, **options):
    with Traffic(server, **options) as traffic:
        traffic.stop_after(requests)
        traffic.join()
    assert traffic.counts["failed"] == 0, server.tail()
    return traffic.counts


def assert_clean(server):
    assert server.process.poll() is None, server.tail()
    assert server.events("attached"), server.tail()
    bad = [event for event in server.events() if event["event"] not in HARMLESS]
    assert bad == [], describe(bad)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_thousand_requests_with_hits_aborts_chunks_retraction_and_flushes(guarded):
    flags = [
        "--kvcanary=log",
        "--max-total-tokens=900",
        "--chunked-prefill-size=64",
        "--schedule-conservativeness=0.05",
        "--kvcanary-scrub-budget=0.02",
    ]
    # A small pool makes SGLang retract by itself, but not every release with this traffic: so it is told to as well.
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "150"}
    with guarded(flags=flags, environment=retract) as server:
        counts = drive(server, 1000, clients=8, seed=1, abort_share=0.1)
        server.post("/flush_cache", {})
        more = drive(server, 1000, clients=8, seed=2, abort_share=0.1)
        assert_clean(server)
        log = server.log.read_text()

    assert counts["sent"] + more["sent"] >= 2000
    assert counts["hit"] > 100
    assert counts["aborted"] > 10
    assert "Cache flushed successfully" in log
    assert "#retracted_reqs: " in log


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        pytest.param(["--disable-overlap-schedule"], {}, id="no-overlap"),
        pytest.param(["--enable-mixed-chunk", "--chunked-prefill-size=48"], {}, id="mixed-chunk"),
        pytest.param(["--disable-radix-cache", "--chunked-prefill-size=48"], {}, id="no-radix"),
        # SGLang allocates pages with a Triton kernel, which a CPU runs in the interpreter only.
        pytest.param(["--page-size=16", "--chunked-prefill-size=64"], {"TRITON_INTERPRET": "1"}, id="page16"),
    ],
)
def test_modes_of_the_scheduler(guarded, flags, environment):
    small = ["--kvcanary=log", "--max-total-tokens=1600", "--kvcanary-scrub-budget=0.02"]
    with guarded(flags=[*small, *flags], environment=environment) as server:
        drive(server, 150, clients=8, seed=3)
        assert_clean(server)


def make_prompt(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


def ask_at_once(server, jobs, delay_s=0.0):
    """Answers to (prompt, new tokens, options), each sent ``delay_s`` behind the one before it, none waited for."""
    answers = [None] * len(jobs)

    def ask(index):
        prompt, new_tokens, more = jobs[index]
        answers[index] = server.generate(prompt, new_tokens, **more)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
        time.sleep(delay_s)
    for thread in threads:
        thread.join()
    return answers


def cached_of(answer):
    return answer["meta_info"]["cached_tokens"]


def reuse_prefixes_around_multiples(server, page):
    """Prefixes that end a token ahead of a page or chunk, with it, and a token behind it, and go on from there."""
    for length in [multiple + step for multiple in (page, 2 * page, 64, 128) for step in (-1, 0, 1)]:
        prompt = make_prompt(f"edge {length}", length) or [5]
        server.generate(prompt, page + 1)
        again = server.generate(prompt, page + 1)  # the last token of a prompt is always computed
        longer = server.generate([*prompt, 7, 8], 2)
        assert cached_of(again) == (len(prompt) - 1) // page * page
        assert cached_of(longer) >= len(prompt) // page * page


def abort_most(server, page):
    """Forty requests of several chunks, nearly all aborted: waiting, between two chunks, while they decode."""
    rng = random.Random(page)
    jobs = [(make_prompt(f"storm {i % 4}", 150) + make_prompt(i, 60), 40, {"rid": f"storm-{i}"}) for i in range(40)]

    def abort():
        for index in rng.sample(range(len(jobs)), 36):
            time.sleep(rng.uniform(0, 0.05))
            server.post("/abort_request", {"rid": f"storm-{index}"})

    aborting = threading.Thread(target=abort)
    aborting.start()
    answers = ask_at_once(server, jobs, delay_s=0.01)
    aborting.join()
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons.count("abort") >= 10


def change_the_batch_size(server, page):
    """The same prompt alone and among others: kernels give other last bits, and the KV of each is right."""
    prompt = make_prompt("batch", 100)
    for size in (1, 2, 7, 3, 12, 1):
        jobs = [([*prompt, 3 + index], 4 + 5 * index, {}) for index in range(size)]
        answers = ask_at_once(server, jobs)
        assert all(cached_of(answer) for answer in answers) or size == 1


def split_nodes_that_are_still_written(server, page):
    """Requests that leave a prefix in the middle while the one that makes it is between two chunks, or decodes."""
    hits = 0
    for number in range(6):
        prompt = make_prompt(f"split {number}", 400)
        cuts = (330, 200, 90, 40)
        jobs = [(prompt, 30, {}), *(([*prompt[:cut], 5, 6, 7], 12, {}) for cut in cuts)]
        _, *others = ask_at_once(server, jobs, delay_s=0.03)
        hits += sum(0 < cached_of(answer) <= cut for answer, cut in zip(others, cuts, strict=True))
    assert hits > 6


def update_weights_with_a_flush(server, page):
    prompt = make_prompt("update", 80)
    for _ in range(2):
        server.generate(prompt, 8)
        time.sleep(3)  # SGLang ends itself if weights are updated while an aborted request still runs
        answer = server.post("/update_weights_from_disk", {"model_path": server.model, "flush_cache": True})
        assert answer["success"], answer
        assert cached_of(server.generate(prompt, 8)) == 0
        assert cached_of(server.generate(prompt, 8)) > 0
    assert [event["older_slots"] for event in server.events("weights")] == [0, 0]


CONTROLS = (
    reuse_prefixes_around_multiples,
    split_nodes_that_are_still_written,
    change_the_batch_size,
    abort_most,
    update_weights_with_a_flush,
    split_nodes_that_are_still_written,
)


@pytest.mark.parametrize(
    ("page", "flags", "environment"),
    [
        pytest.param(1, [], {}, id="page1"),
        pytest.param(16, ["--page-size=16"], {"TRITON_INTERPRET": "1"}, id="page16"),
    ],
)
def test_what_false_alarms_would_come_from(guarded, model, page, flags, environment):
    small = ["--kvcanary=log", "--max-total-tokens=4096", "--chunked-prefill-size=64", "--kvcanary-scrub-budget=0.02"]
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "100"}
    with guarded(flags=[*small, *flags], environment={**environment, **retract}) as server:
        server.model = str(model)
        for control in CONTROLS:
            control(server, page)
            assert_clean(server)
        log = server.log.read_text()

    assert "#retracted_reqs: " in log


def test_adapters_have_prefixes_of_their_own(guarded, model, tmp_path):
    """The same tokens under two adapters and none, one after the other, at once, and again from the cache."""
    adapters = [f"{name}={make_adapter(tmp_path / name, model, seed)}" for seed, name in enumerate("ab")]
    flags = ["--kvcanary=log", "--max-total-tokens=4096", "--lora-backend=torch_native", "--max-loras-per-batch=3"]
    prompt, names = make_prompt("adapters", 90), (None, "a", "b", "a", None, "b")
    jobs = [(prompt, 12, {"lora_path": name} if name else {}) for name in names]
    with guarded(flags=[*flags, "--lora-paths", *adapters], launcher="benchmarks.server.unpinned") as server:
        alone = [server.generate(prompt, new_tokens, **more) for prompt, new_tokens, more in jobs]
        together = ask_at_once(server, jobs * 2)
        assert_clean(server)

    assert [cached_of(answer) > 0 for answer in alone] == [False, False, False, True, True, True]
    assert all(cached_of(answer) for answer in together)
    assert len({tuple(answer["output_ids"]) for answer in alone[:3]}) == 3
    assert [answer["output_ids"] for answer in together] == [alone[index % 6]["output_ids"] for index in range(12)]
