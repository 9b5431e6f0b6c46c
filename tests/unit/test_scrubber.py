import itertools

import pytest

from kvcanary_plugin.runtime.scrubber import FIRST_PASS_FORWARDS, LONGEST_SECONDS, PACE_SECONDS, Scrubber


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


def test_long_forwards_keep_the_pace_within_the_budget(clock):
    """Prefills only: at the rate of short decode steps one pass would take minutes."""
    scrubber = Scrubber(1, 100_001, budget=0.0025, seconds_a_slot=3e-8)
    run(scrubber, FIRST_PASS_FORWARDS, 0.001)
    assert scrubber.period_forwards > 1000
    began, passes = clock[0], scrubber.passes
    while scrubber.passes < passes + 2:
        clock[0] += 0.25
        _, count = scrubber.next_range(may_vary=True)
        assert count * scrubber.seconds_a_slot <= 0.0025 * 0.25
    assert clock[0] - began <= 2 * PACE_SECONDS + 1


def test_a_small_budget_bounds_them(clock):
    scrubber = Scrubber(1, 100_001, budget=1e-6, seconds_a_slot=3e-8)
    run(scrubber, 2 * FIRST_PASS_FORWARDS, 0.1)
    for _ in range(20):
        clock[0] += 0.25
        assert scrubber.next_range(may_vary=True)[1] == int(1e-6 * 0.25 / 3e-8) > scrubber.slots_a_forward


def test_time_without_forwards_is_not_made_up_for_at_once(clock):
    scrubber = Scrubber(1, 100_001, budget=0.5, seconds_a_slot=1e-6)
    run(scrubber, FIRST_PASS_FORWARDS, 0.001)
    clock[0] += 3600.0
    start, count = scrubber.next_range(may_vary=True)
    assert count == 100_000 * LONGEST_SECONDS / PACE_SECONDS
    assert scrubber.next_range(may_vary=True) == (start + count, scrubber.slots_a_forward)
    clock[0] += 3600.0
    assert scrubber.next_range()[1] == scrubber.slots_a_forward
