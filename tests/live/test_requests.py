"""Requests of a kind that a guard cannot follow are turned away, each with a reason; the server goes on guarded."""

import urllib.error

import pytest
from packaging.version import Version

from kvcanary_plugin.demo.traffic import Traffic
from kvcanary_plugin.versions import installed_sglang
from tests.live.conftest import describe

pytestmark = pytest.mark.live


@pytest.mark.skipif(Version(installed_sglang()) < Version("0.5.19"), reason="this SGLang has no beam search")
def test_beam_search_is_turned_away_and_others_are_served(guarded):
    prompt = list(range(3, 60))
    with guarded(flags=["--kvcanary=log", "--max-total-tokens=2048"]) as server:
        with pytest.raises(urllib.error.HTTPError) as refusal:
            server.post("/generate", {"input_ids": prompt, "sampling_params": {"beam_width": 2, "max_new_tokens": 8}})
        assert refusal.value.code == 400
        assert b"Beam search is not covered by kvcanary" in refusal.value.read()
        with Traffic(server, clients=3) as traffic:
            traffic.stop_after(30)
            traffic.join()
        events = server.events()

    assert traffic.counts["failed"] == 0
    assert {event["event"] for event in events} <= {"attached", "learned", "heartbeat"}, describe(events)
