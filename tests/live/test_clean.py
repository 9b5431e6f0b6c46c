"""Real servers under mixed traffic without a fault: nothing may be reported."""

import pytest

from kvcanary_plugin.demo.traffic import Traffic
from tests.live.conftest import describe

pytestmark = pytest.mark.live


def drive(server, requests, **options):
    with Traffic(server, **options) as traffic:
        traffic.stop_after(requests)
        traffic.join()
    assert traffic.counts["failed"] == 0, server.tail()
    return traffic.counts


def assert_clean(server):
    assert server.process.poll() is None, server.tail()
    assert server.events("attached"), server.tail()
    bad = [event for event in server.events() if event["event"] not in ("attached", "learned", "heartbeat")]
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
