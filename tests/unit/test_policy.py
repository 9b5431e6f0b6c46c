"""Mode quarantine on the real pool, allocator, request table, Req and radix cache of SGLang."""

from http import HTTPStatus

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvcanary_plugin.runtime.finding import Finding
from kvcanary_plugin.runtime.violation import Violation
from kvcanary_plugin.runtime.withheld import Withheld
from tests.unit.quarantined import LEVERS, QuarantinedEngine

WITHHOLD = 4
HIGH = 1.0  # the whole pool is looked at in a few forwards


@pytest.fixture
def engine(page_size):
    return QuarantinedEngine(page_size=page_size, scrub_budget=HIGH)


def is_ended(request):
    return request.to_finish is not None


def events(engine, name):
    return [fields for event, fields in engine.reporter.events if event == name]


def test_without_damage_nothing_is_ended_withheld_or_renamed(engine):
    tokens = list(range(40))
    first, second = engine.request(tokens=tokens), engine.request(tokens=[*tokens, 7, 8, 9])
    engine.start(first, second)
    engine.run(first, second)
    engine.settle_scrub()

    assert not is_ended(first)
    assert not is_ended(second)
    assert second.extra_key is None
    assert second.cached_tokens >= 32
    assert len(engine.policy.withheld) == 0
    assert engine.violations == []


def test_a_request_that_starts_on_a_damaged_prefix_is_ended_before_its_first_token(engine):
    writer = engine.request(tokens=list(range(50)))
    engine.start(writer)
    slot = int(engine.slots_of(writer)[20])
    engine.flip(slot)
    reader = engine.request(tokens=[*range(50), 1, 2, 3])
    engine.start(reader)

    assert reader.to_finish.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    message = reader.to_finish.message
    assert message.startswith("kvcanary: ")
    assert f"check content, layer 1 V, slot {slot}, position 20" in message
    assert "send it again" in message
    assert reader.finished_len == 0
    assert reader.skip_radix_cache_insert
    assert is_ended(writer)  # it holds that slot, too


def test_an_innocent_request_goes_on_and_its_prefix_is_still_found(engine):
    shared = list(range(100, 132))
    victim, innocent = engine.request(tokens=[*shared, *range(40)]), engine.request(tokens=[*shared, *range(40, 80)])
    engine.start(victim, innocent)
    engine.flip(int(engine.slots_of(victim)[60]))
    engine.settle_scrub()
    engine.run(innocent)

    assert is_ended(victim)
    assert not is_ended(innocent)
    later = engine.request(tokens=[*shared, *range(40, 80), 5])
    assert engine.look_up(later) >= 64
    assert later.extra_key is None


def test_damage_that_the_rotating_pass_finds_ends_every_request_that_holds_the_slot(engine):
    tokens = list(range(64))
    one, two = engine.request(tokens=[*tokens, 1]), engine.request(tokens=[*tokens, 2])
    engine.start(one, two)
    slot = int(engine.slots_of(one)[5])
    assert slot == int(engine.slots_of(two)[5])
    engine.flip(slot)
    engine.settle_scrub()

    assert is_ended(one)
    assert is_ended(two)
    assert "check content" in two.to_finish.message
    assert f"slot {slot}" in two.to_finish.message


def test_the_same_prompt_is_computed_afresh_and_then_found_again(engine):
    tokens = list(range(64))
    first = engine.request(tokens=tokens)
    engine.start(first)
    damaged = int(engine.slots_of(first)[40])
    engine.flip(damaged)
    engine.settle_scrub()
    engine.conclude(first)

    again = engine.request(tokens=[*tokens, 3])
    engine.start(again)
    assert again.cached_tokens == 0
    assert damaged not in engine.slots_of(again)
    third = engine.request(tokens=[*tokens, 4])
    engine.start(third)
    assert third.cached_tokens == 64
    assert third.extra_key == again.extra_key
    assert not is_ended(third)


def test_damage_in_nobodys_prefix_taints_it_before_anybody_finds_it(engine):
    writer = engine.request(tokens=list(range(48)))
    engine.start(writer)
    slot = int(engine.slots_of(writer)[10])
    writer.output_ids.append(1)
    writer.sampling_params.max_new_tokens = 1
    engine.conclude(writer)
    engine.flip(slot)
    engine.settle_scrub()

    reader = engine.request(tokens=[*range(48), 1])
    assert engine.look_up(reader) == 0
    shorter = engine.request(tokens=[*range(10), 900, 901])
    engine.look_up(shorter)
    assert shorter.extra_key is None  # it turns off ahead of the damage


def test_descendants_of_a_tainted_prefix_are_not_found_either(engine):
    parent = engine.request(tokens=list(range(32)))
    engine.start(parent)
    child = engine.request(tokens=list(range(80)))
    engine.start(child)
    engine.flip(int(engine.slots_of(parent)[3]))
    engine.settle_scrub()

    assert engine.look_up(engine.request(tokens=[*range(80), 1])) == 0


def test_damage_under_the_new_key_is_moved_away_from_as_well(engine):
    tokens = list(range(64))
    for _ in range(3):
        request = engine.request(tokens=[*tokens, 1])
        engine.start(request)
        assert request.cached_tokens == 0
        engine.flip(int(engine.slots_of(request)[30]))
        engine.settle_scrub()
        assert is_ended(request)
        engine.conclude(request)

    assert engine.look_up(engine.request(tokens=[*tokens, 1])) == 0
    assert len({key for key in [request.extra_key] if key}) == 1


def test_damage_in_a_generated_token_ends_that_request_only(engine):
    one, two = engine.request(tokens=list(range(40))), engine.request(tokens=list(range(50, 90)))
    engine.start(one, two)
    engine.run(one, two)
    engine.flip(int(engine.slots_of(one)[42]))
    engine.settle_scrub()

    assert is_ended(one)
    assert not is_ended(two)
    assert one.finished_len == 5


def test_a_row_that_names_the_wrong_slot_ends_its_request_and_not_the_owner_of_the_slot(engine):
    one, two = engine.request(tokens=list(range(40))), engine.request(tokens=list(range(50, 90)))
    engine.start(one, two)
    engine.rows.req_to_token[one.req_pool_idx, 7] = engine.rows.req_to_token[two.req_pool_idx, 7]
    engine.decode(one, two)

    assert is_ended(one)
    assert "check chain" in one.to_finish.message
    assert not is_ended(two)


def test_a_damaged_slot_is_not_handed_out_again_until_the_pool_is_flushed(engine):
    request = engine.request(tokens=list(range(40)))
    engine.start(request)
    engine.run(request)
    slot = int(engine.slots_of(request)[42])
    before = len(engine.free_slots)
    engine.flip(slot)
    engine.settle_scrub()
    held = engine.allocator.available_size()
    engine.conclude(request)

    assert slot not in engine.free_slots
    assert engine.policy.withheld.caught == engine.page_size
    # What SGLang's leak check adds up, with the size that the plugin tells it.
    total = engine.allocator.size - engine.policy.withheld.caught
    assert engine.allocator.available_size() + engine.tree.evictable_size() + engine.tree.protected_size() == total
    assert before == held

    engine.tree.reset()
    engine.allocator.clear()
    engine.policy.lift(engine.allocator)
    assert slot in engine.free_slots
    assert len(engine.policy.withheld) == engine.policy.withheld.caught == 0
    assert events(engine, "lifted") == [{"slot_count": engine.page_size}]
    assert engine.look_up(engine.request(tokens=list(range(40)))) == 0


def test_a_damaged_slot_that_is_free_already_is_taken_out_at_once(engine):
    slot = engine.page_size * 20
    assert slot in engine.free_slots
    engine.policy._findings.add(Finding(slot, -1, 0, WITHHOLD, 1))
    engine.policy.act()

    assert slot not in engine.free_slots
    assert engine.policy.withheld.caught == engine.page_size


def test_slots_of_the_tree_are_held_back_when_it_evicts_them(engine):
    writer = engine.request(tokens=list(range(64)))
    engine.start(writer)
    slot = int(engine.slots_of(writer)[10])
    writer.output_ids.append(1)
    writer.sampling_params.max_new_tokens = 1
    engine.conclude(writer)
    engine.flip(slot)
    engine.settle_scrub()
    assert engine.policy.withheld.caught == 0
    engine.tree.evict(EvictParams(num_tokens=64))

    assert slot not in engine.free_slots
    assert engine.allocator.available_size() == engine.allocator.size - engine.page_size


def test_no_more_than_an_eighth_of_the_pool_is_withheld(engine):
    pages = engine.guard.pool.slot_count // engine.page_size
    engine.policy.withheld.add(range(engine.guard.pool.slot_count))

    assert len(engine.policy.withheld) == pages // 8 * engine.page_size
    assert engine.policy.withheld.refused == (pages - 1 - pages // 8) * engine.page_size


def test_a_request_in_the_middle_of_its_prompt_ends_with_the_last_chunk(engine):
    request = engine.request(tokens=list(range(96)))
    engine.prefill(request, upto=32)
    request.inflight_middle_chunks = 1
    slot = int(engine.slots_of(request)[9])
    engine.flip(slot)
    engine.settle_scrub()
    assert not is_ended(request)
    assert not request.skip_radix_cache_insert  # SGLang's next chunk builds on what the tree holds
    request.inflight_middle_chunks = 0
    engine.prefill(request, upto=64)
    assert not is_ended(request)
    engine.prefill(request)

    assert is_ended(request)
    assert request.finished_len == 0


def test_a_request_that_was_retracted_starts_again_instead_of_ending(engine):
    request = engine.request(tokens=list(range(40)))
    engine.start(request)
    request.is_retracted = True
    engine.flip(int(engine.slots_of(request)[9]))
    engine.settle_scrub()

    assert not is_ended(request)
    engine.rows.free(request)
    assert engine.look_up(request) == 0
    assert request.extra_key.startswith("kvcanary-taint-")


def test_a_copy_of_a_damaged_prefix_in_the_making_stays_out_of_the_cache(page_size):
    """Two requests with one prompt run before either is cached: the second would be given the slots of the first."""
    engine = QuarantinedEngine(page_size=page_size, scrub_budget=HIGH)
    tokens = list(range(64))
    one, two = engine.request(tokens=tokens), engine.request(tokens=tokens)
    engine.look_up(one)
    engine.look_up(two)
    engine.prefill(one, two)
    one.full_untruncated_fill_ids = one.origin_input_ids
    one.set_extend_range(0, 64)
    engine.tree.cache_unfinished_req(one)
    engine.flip(int(engine.slots_of(one)[12]))
    engine.settle_scrub()

    assert is_ended(one)
    assert not is_ended(two)
    assert two.skip_radix_cache_insert


def test_violations_that_could_not_be_described_end_every_request_of_the_forward():
    engine = QuarantinedEngine(size=2000)
    requests = [engine.request(200) for _ in range(3)]
    engine.start(*requests)
    engine.rows.req_to_token[:, :200] = 0
    engine.decode(*requests)

    assert all(is_ended(request) for request in requests)
    assert engine.look_up(engine.request(tokens=list(requests[2].origin_input_ids))) == 0


def test_damage_that_stays_is_reported_once(engine):
    writer = engine.request(tokens=list(range(48)))
    engine.start(writer)
    engine.flip(int(engine.slots_of(writer)[10]))
    for _ in range(4):
        engine.settle_scrub()

    assert len(events(engine, "quarantined")) == 1
    assert events(engine, "quarantined")[0]["requests"] == [writer.rid]


def test_what_another_pool_names_is_not_taken_for_a_slot_of_this_one(engine):
    request = engine.request(tokens=list(range(40)))
    engine.start(request)
    other = Violation("content", "content", "other pool", 0, 1, "scrub", int(engine.slots_of(request)[3]), position=3)
    step = engine.guard.verdicts.steps[0]
    step.number, step.hidden = engine.guard.forwards, 0
    engine.policy.judge(step, [other])
    engine.policy.act()

    assert not is_ended(request)
    assert len(engine.policy.withheld) == 0
    later = engine.request(tokens=list(range(40)))
    assert engine.look_up(later) == 0  # whose it is, is not known: nothing cached is trusted


def test_a_policy_that_was_stopped_keeps_back_what_it_withheld(engine):
    engine.policy.withheld.add([engine.page_size * 5])
    engine.policy.stop()
    engine.policy._findings.add(Finding(engine.page_size * 7, -1, 0, WITHHOLD, 1))
    engine.policy.act()

    kept = engine.policy.keep_back(engine.allocator, torch.tensor([engine.page_size * 5, engine.page_size * 7]))
    assert kept.tolist() == [engine.page_size * 7]


def test_the_last_forward_before_a_flush_that_is_judged_behind_it_changes_nothing(engine):
    writer = engine.request(tokens=list(range(40)))
    engine.start(writer)
    slot = int(engine.slots_of(writer)[9])
    step = engine.guard.verdicts.steps[0]
    step.number, step.hidden = engine.guard.forwards, 0
    engine.tree.reset()
    engine.allocator.clear()
    engine.policy.lift(engine.allocator)
    stale = Violation("content", "content", engine.guard.pool.name, 0, step.number, "scrub", slot, position=9)
    engine.policy.judge(step, [stale])
    engine.policy.act()

    assert len(engine.policy.withheld) == 0
    assert engine.policy.taints.is_empty


def test_whoever_was_promised_room_gets_it_although_withheld_slots_do_not_come_free(page_size):
    """The cache counts slots as evictable that are not to be handed out again, and evicts only as much as is asked."""
    engine = QuarantinedEngine(page_size=page_size, size=256, scrub_budget=HIGH)
    for start in (0, 64, 128):
        writer = engine.request(tokens=list(range(start, start + 64)))
        engine.start(writer)
        slot = int(engine.slots_of(writer)[10])
        writer.output_ids.append(1)
        writer.sampling_params.max_new_tokens = 1
        engine.conclude(writer)
        engine.flip(slot)
    engine.settle_scrub()
    withheld = {1: 3, 16: 32}[page_size]  # with pages, a third one would be more than an eighth of the pool
    assert engine.policy.withheld.pending == len(engine.policy.withheld) == withheld
    available = engine.policy.less_pending(engine.allocator, engine.allocator.available_size())
    promised = available + engine.tree.evictable_size()
    assert promised == 256 - withheld

    engine.tree.evict(EvictParams(num_tokens=promised - engine.allocator.available_size()))
    engine.policy.make_room(engine.allocator, promised)
    slots = engine.allocator.alloc(promised)
    assert slots is not None
    assert not {int(slot) // page_size for slot in slots} & set(engine.policy.withheld._pages)
    engine.policy.make_room(engine.allocator, 10**6)  # what cannot be had does not hang


def test_nothing_is_withheld_from_an_allocator_that_is_not_known(engine):
    withheld = Withheld(engine.page_size, engine.guard.pool.slot_count, torch.device("cpu"), is_possible=False)

    assert withheld.add([engine.page_size * 5]) == []
    assert len(withheld) == 0
    assert withheld.refused == engine.page_size
    assert LEVERS.count_free(engine.tree) is None
    assert LEVERS.count_free(engine.allocator) == engine.allocator.available_size()
