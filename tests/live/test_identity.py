"""Weights that are updated under a live server: what was cached for the old ones must not pass for the new."""

import pytest

from tests.live.conftest import describe

pytestmark = pytest.mark.live

PROMPT = [7, 8, 9, 10] * 12
HARMLESS = ("attached", "learned", "heartbeat", "weights", "mixed_weights")


def update(server, model, *, flush):
    answer = server.post("/update_weights_from_disk", {"model_path": str(model), "flush_cache": flush})
    assert answer["success"], answer


def test_reuse_across_an_update_without_a_flush_is_reported_at_the_match(guarded, model):
    with guarded(flags=["--kvcanary=log", "--max-total-tokens=4096"]) as server:
        before = server.generate(PROMPT, 8, rid="old")
        update(server, model, flush=False)
        after = server.generate(PROMPT, 8, rid="new")
        events = server.events()

    assert after["meta_info"]["cached_tokens"] > 0
    assert after["output_ids"] == before["output_ids"]  # the weights are the same ones: only the canary can tell
    (weights,) = [event for event in events if event["event"] == "weights"]
    assert not weights["flushed"]
    assert weights["older_slots"] >= len(PROMPT)
    violations = [event for event in events if event["event"] == "violation"]
    assert [(event["check"], event["kind"], event["request"]) for event in violations] == [
        ("identity", "other_identity", "new")
    ], describe(events)
    ((tag, expected, found),) = violations[0]["differs"]
    assert (tag, found) == ("weights", "0")
    assert expected == weights["version"]


def test_an_update_with_a_flush_is_silent(guarded, model):
    with guarded(flags=["--kvcanary=log", "--max-total-tokens=4096"]) as server:
        server.generate(PROMPT, 8)
        for _ in range(2):
            update(server, model, flush=True)
            server.generate(PROMPT, 8)
            server.generate(PROMPT, 8)
        events = server.events()

    assert [event["older_slots"] for event in events if event["event"] == "weights"] == [0, 0]
    bad = [event for event in events if event["event"] not in HARMLESS]
    assert bad == [], describe(bad)


def test_sessions_pass_slots_on_so_that_nobody_is_said_to_own_them(guarded):
    with guarded(flags=["--kvcanary=log", "--max-total-tokens=4096", "--enable-streaming-session"]) as server:
        session = server.post("/open_session", {"capacity_of_str_len": 1000, "streaming": True})
        for turn in range(3):
            server.generate([*PROMPT, turn], 8, session_params={"id": session})
        events = server.events()

    (attached,) = [event for event in events if event["event"] == "attached"]
    assert "ownership" not in attached["checks"]
    bad = [event for event in events if event["event"] not in HARMLESS]
    assert bad == [], describe(bad)
