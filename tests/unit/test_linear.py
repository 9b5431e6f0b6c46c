"""What a step takes grows with what it reads and stores, not with its square: whole steps of the guard on a CPU.

numpy does not let its operations be counted, so this is processor time of the thread, the least of several steps, with
room for caches: the square would take sixteen times as long. tests/kernels/test_linear.py counts, for the kernels.
"""

from __future__ import annotations

import time

import pytest

from tests.large import MILLION, LargeEngine

LENGTHS = (MILLION >> 3, MILLION >> 2, MILLION >> 1)
FOUR_TIMES_AT_MOST = 8  # four, and room for caches that hold a short row only


class TimedEngine(LargeEngine):
    """Keeps how long the guard's part of each forward took."""

    def store(self, slots):
        """Nothing, so that what is timed is the guard; only records are looked at here."""

    def forward(self, *arguments):
        start = time.thread_time()
        super().forward(*arguments)
        self.step_s = time.thread_time() - start


def least(engine, act, times=5):
    taken = []
    for _ in range(times):
        act()
        taken.append(engine.step_s)
    return min(taken)


@pytest.fixture
def engine():
    return TimedEngine(size=MILLION, checks=("chain", "ownership"))


def test_a_decode_step_is_linear_in_what_it_reads(engine):
    taken = []
    for length in LENGTHS:
        request = engine.request(length)
        engine.prefill(request, upto=length)
        taken.append(least(engine, lambda request=request: engine.decode(request)))
        engine.finish(request)
    assert engine.violations == []
    assert taken[2] / taken[0] < FOUR_TIMES_AT_MOST, taken


def test_a_prefill_is_linear_in_what_it_stores(engine):
    taken = []
    for length in LENGTHS:

        def prefill(length=length):
            request = engine.request(length)
            engine.prefill(request, upto=length)
            engine.finish(request)

        taken.append(least(engine, prefill, times=3))
    assert engine.violations == []
    assert taken[2] / taken[0] < FOUR_TIMES_AT_MOST, taken
