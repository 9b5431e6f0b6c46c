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
