"""The parts of mode quarantine by themselves: bursts, tainted points, withheld pages."""

import torch

from kvcanary_plugin.runtime.burst import MAX_LINES, MAX_PLACES, WINDOW_S, Burst
from kvcanary_plugin.runtime.taint import MAX_TAINTS, Taints
from kvcanary_plugin.runtime.truth import TruthTable, true_chains
from kvcanary_plugin.runtime.withheld import Withheld
from tests.unit.quarantined import QuarantinedEngine


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Asked:
    """A request that is not running."""

    def __init__(self, tokens, extra_key=None):
        self.rid, self.origin_input_ids, self.output_ids = "r", list(tokens), []
        self.extra_key, self.retraction_count = extra_key, 0
        self.multimodal_inputs = None


def make_taints():
    truth = TruthTable(4, (("model", "test"),))
    return Taints(truth), truth


def point_of(truth, request, position):
    return position, int(true_chains(request, truth.anchor_of(request), position + 1)[-1])


def test_a_burst_is_one_state_until_a_window_passes_without_new_damage():
    clock = Clock()
    burst = Burst(clock)
    assert not burst.note(range(MAX_PLACES))
    assert burst.note(range(1000))
    assert not burst.note(range(1000, 2000))
    clock.now += WINDOW_S - 1
    assert not burst.ends()
    clock.now += 2
    assert burst.ends()
    assert not burst.is_on
    assert not burst.ends()


def test_damage_that_trickles_in_is_no_burst():
    clock = Clock()
    burst = Burst(clock)
    for place in range(10 * MAX_PLACES):
        clock.now += WINDOW_S / MAX_PLACES + 0.1
        assert not burst.note([place])


def test_lines_are_few_in_a_window_and_one_a_window_in_a_burst():
    clock = Clock()
    burst = Burst(clock)
    assert sum(burst.may_write() for _ in range(1000)) == MAX_LINES
    burst.note(range(1000))
    assert sum(burst.may_write() for _ in range(1000)) == 0
    clock.now += WINDOW_S
    assert sum(burst.may_write() for _ in range(1000)) == 1


def test_a_request_leaves_a_key_only_if_it_passes_the_point():
    taints, truth = make_taints()
    tokens = list(range(50))
    taints.add([point_of(truth, Asked(tokens), 20)])
    through, short, other, turning = Asked(tokens), Asked(tokens[:20]), Asked(range(9, 60)), Asked([*range(20), 999])

    assert taints.admit(through)
    assert not any(taints.admit(request) for request in (short, other, turning))
    assert not taints.admit(through)
    assert not taints.admit(Asked(tokens, "another tenant"))


def test_a_request_whose_tokens_end_at_the_point_passes_it():
    taints, truth = make_taints()
    taints.add([point_of(truth, Asked(range(50)), 20)])

    assert taints.admit(Asked(range(21)))


def test_keys_of_different_tenants_stay_different_and_keep_their_end():
    taints, truth = make_taints()
    tokens = list(range(50))
    one, two = Asked(tokens, "salt-a-lora"), Asked(tokens, "salt-b-lora")
    taints.add([point_of(truth, one, 5), point_of(truth, two, 5)])
    taints.admit(one)
    taints.admit(two)

    assert one.extra_key.endswith("salt-a-lora")
    assert two.extra_key.endswith("salt-b-lora")
    assert one.extra_key != two.extra_key


def test_everything_is_disowned_when_points_are_too_many_and_the_memory_for_them_stays_bounded():
    taints, _ = make_taints()
    for number in range(2 * MAX_TAINTS):
        taints.add([(number % 40, 12345 + number)])
    assert len(taints) <= MAX_TAINTS
    innocent = Asked(range(500, 560))

    assert taints.admit(innocent)
    key = innocent.extra_key
    assert not taints.admit(innocent)
    later = Asked(range(500, 560))
    taints.admit(later)
    assert later.extra_key == key  # it finds what that one stored


def test_after_a_flush_keys_are_as_they_were_and_new_ones_are_not_reused():
    taints, truth = make_taints()
    first, again = Asked(range(50)), Asked(range(50))
    taints.add([point_of(truth, first, 5)])
    taints.admit(first)
    taints.clear()
    assert not taints.admit(again)
    taints.add([point_of(truth, again, 5)])
    taints.admit(again)

    assert first.extra_key != again.extra_key


def test_withheld_pages_are_filtered_whole_and_counted_once():
    withheld = Withheld(16, 64 * 16, torch.device("cpu"))
    assert withheld.add([35, 36, 100, 3, -5, 64 * 16]) == [2, 6]
    slots = torch.arange(16, 64)

    assert withheld.keep_back(slots).tolist() == [*range(16, 32), *range(48, 64)]
    assert withheld.keep_back(torch.tensor([40])).tolist() == []
    assert withheld.keep_back(torch.tensor([1, 2, 3]), are_pages=True).tolist() == [1, 3]
    assert withheld.caught == 16
    assert len(withheld) == 32


def test_a_thousand_violations_in_a_step_and_in_many_steps_say_little(page_size):
    clock = Clock()
    engine = QuarantinedEngine(size=4096, page_size=page_size, scrub_budget=1.0, clock=clock)
    requests = [engine.request(200) for _ in range(12)]
    engine.start(*requests)
    for request in requests:
        for slot in engine.slots_of(request)[:100].tolist():
            engine.flip(slot)
    for _ in range(40):
        engine.settle_scrub()

    names = [name for name, _ in engine.reporter.events if name in ("quarantined", "degraded", "recovered")]
    assert names.count("degraded") == 1
    assert len(names) <= MAX_LINES
    assert all(request.to_finish is not None for request in requests)
    assert len(engine.policy.withheld) <= 4096 / 8 + 2 * page_size
    clock.now += WINDOW_S + 1
    engine.policy.act()
    assert engine.reporter.events[-1][0] == "recovered"
