import itertools

import pytest

from kvcanary_plugin.runtime.scrubber import FIRST_PASS_FORWARDS, Scrubber


def run(scrubber, forwards, seconds):
    ranges = []
    for _ in range(forwards):
        scrubber.observe_forward(seconds)
        ranges.append(scrubber.next_range())
    return ranges


def test_every_slot_but_the_padding_is_covered_once_a_pass():
    scrubber = Scrubber(16, 1016, budget=0.005, seconds_a_slot=1e-6)
    ranges = run(scrubber, scrubber.period_forwards, 0.01)
    folded = list(itertools.chain.from_iterable(range(start, start + count) for start, count in ranges))

    assert folded == list(range(16, 1016))
    assert scrubber.passes == 1


def test_rate_follows_from_budget_and_measured_forward(caplog):
    caplog.set_level("INFO", logger="kvcanary")
    scrubber = Scrubber(1, 10001, budget=0.01, seconds_a_slot=1e-6)
    run(scrubber, FIRST_PASS_FORWARDS, 0.01)

    assert scrubber.slots_a_forward == pytest.approx(100, abs=1)
    assert scrubber.period_forwards in (100, 101)
    assert "the whole pool of 10000 every 10" in caplog.text


def test_long_prefills_among_decode_steps_do_not_raise_the_rate():
    scrubber = Scrubber(1, 10001, budget=0.01, seconds_a_slot=1e-6)
    for _ in range(FIRST_PASS_FORWARDS // 2):
        run(scrubber, 1, 0.01)
        run(scrubber, 1, 3.0)

    assert scrubber.slots_a_forward == pytest.approx(100, abs=1)


def test_a_promised_period_is_never_lengthened_and_not_logged_again(caplog):
    caplog.set_level("INFO", logger="kvcanary")
    scrubber = Scrubber(1, 10001, budget=0.01, seconds_a_slot=1e-6)
    run(scrubber, FIRST_PASS_FORWARDS, 0.01)
    promised = scrubber.period_forwards
    run(scrubber, 20 * promised, 0.001)

    assert scrubber.period_forwards == promised
    assert caplog.text.count("content pass folds") == 1


def test_a_pool_smaller_than_the_budget_allows_is_folded_whole_and_said_once(caplog):
    caplog.set_level("INFO", logger="kvcanary")
    scrubber = Scrubber(1, 101, budget=0.5, seconds_a_slot=1e-6)
    run(scrubber, 1000, 0.01)

    assert scrubber.period_forwards == 1
    assert caplog.text.count("content pass folds") == 1


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("kvcanary_plugin.runtime.scrubber.time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("slots", [3, 255, 256, 257, 1000, 10_007])
def test_the_oldest_unverified_age_is_never_understated(clock, slots):
    """Against a record of when each slot was folded."""
    scrubber = Scrubber(1, slots + 1, budget=0.005, seconds_a_slot=1e-6)
    folded = [clock[0]] * (slots + 1)
    for _ in range(3 * scrubber.period_forwards):
        clock[0] += 1.0
        start, count = scrubber.next_range()
        folded[start : start + count] = [clock[0]] * count
        clock[0] += 0.5
        true = clock[0] - min(folded[1:])
        known = scrubber.oldest_age_seconds()
        assert true <= known <= true + 1.5 * (scrubber.period_forwards / min(slots, 256) + 2)


def test_where_there_is_time_more_is_folded_and_nothing_is_left_out():
    scrubber = Scrubber(1, 10001, budget=0.005, seconds_a_slot=1e-6)
    ranges = [scrubber.next_range(0.003) for _ in range(4)]
    assert ranges == [(1, 3000), (3001, 3000), (6001, 3000), (9001, 1000)]
    assert scrubber.passes == 1
    assert scrubber.next_range() == (1, scrubber.slots_a_forward)
