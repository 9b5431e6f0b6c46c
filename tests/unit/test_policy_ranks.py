"""Two processes that serve the same requests, as tensor-parallel ranks do: what one finds, both act upon.

Each has the real pool, allocator, request table, requests and radix cache of SGLang; gloo carries the verdicts.
"""

import datetime
import json

import pytest
import torch.distributed as dist
import torch.multiprocessing
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvcanary_plugin.runtime.consensus import Consensus
from tests.unit.quarantined import QuarantinedEngine


def run_rank(rank, folder):
    """One rank; leaves what it did in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    outcomes = {}
    for name, scenario in SCENARIOS.items():
        outcomes[name] = scenario(rank, dist.group.WORLD)
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def state_of(engine, *requests):
    """Everything in which ranks must not differ."""
    reasons = {request.rid: request.to_finish or request.finished_reason for request in requests}
    return {
        "ended": [rid for rid, reason in reasons.items() if reason is not None],
        "skipped": [request.rid for request in requests if request.skip_radix_cache_insert],
        "withheld": list(engine.policy.withheld._pages),
        "free": sorted(engine.free_slots),
        "points": [list(point) for point in engine.policy.taints._points],
        "messages": [reason.message for reason in reasons.values() if reason is not None],
    }


def find_again(engine, tokens):
    request = engine.request(tokens=tokens)
    return engine.look_up(request), request.extra_key


def damage_on_rank_1(rank, group):
    """A bit flips in the KV of rank 1; rank 0 sees nothing."""
    engine = QuarantinedEngine(group=group, scrub_budget=1.0)
    victim, innocent = engine.request(tokens=list(range(40))), engine.request(tokens=list(range(50, 90)))
    engine.start(victim, innocent)
    engine.run(victim, innocent)
    if rank == 1:
        engine.flip(int(engine.slots_of(victim)[7]))
    reader = engine.request(tokens=[*range(40), 1])
    engine.start(reader)
    engine.run(innocent)
    engine.conclude(victim)
    outcome = state_of(engine, victim, innocent, reader)
    return {
        **outcome,
        "violations": len(engine.violations),
        "again": find_again(engine, [*range(40), 1]),
        "innocent again": find_again(engine, [*range(50, 90), 1]),
    }


def verdict_with_a_detached_rank(rank, group):
    """The guard of rank 1 is gone; what rank 0 finds is acted upon by both."""
    engine = QuarantinedEngine(group=group, scrub_budget=1.0)
    victim, innocent = engine.request(tokens=list(range(40))), engine.request(tokens=list(range(50, 90)))
    engine.start(victim, innocent)
    engine.run(victim, innocent)
    if rank == 1:
        detach(engine.guard)
    else:
        engine.flip(int(engine.slots_of(victim)[7]))
    reader = engine.request(tokens=[*range(40), 1])
    engine.start(reader)
    engine.run(innocent)
    engine.conclude(victim)
    return {
        **state_of(engine, victim, innocent, reader),
        "violations": len(engine.violations),
        "again": find_again(engine, [*range(40), 1]),
    }


def detach(guard):
    """The guard is not called any more, as after an error of its own."""
    for name in ("announce", "before", "after", "note_launched", "settle", "release"):
        setattr(guard, name, lambda *_: None)


def different_damage_on_each(rank, group):
    """Each rank finds something else in the same step."""
    engine = QuarantinedEngine(group=group, scrub_budget=1.0)
    requests = [engine.request(tokens=list(range(start, start + 40))) for start in (0, 50, 100)]
    engine.start(*requests)
    engine.flip(int(engine.slots_of(requests[rank])[5]))
    for _ in range(400):  # more than the rotating pass needs; how many that are depends on the speed of the rank
        engine.forward([], [], [], ForwardMode.IDLE)
    return state_of(engine, *requests)


def row_damage_on_rank_1(rank, group):
    """The row table of one rank is damaged, so the ranks cannot even agree about who reads what."""
    engine = QuarantinedEngine(group=group, scrub_budget=1.0)
    one, two = engine.request(tokens=list(range(40))), engine.request(tokens=list(range(50, 90)))
    engine.start(one, two)
    kept = engine.rows.req_to_token.clone()
    if rank == 1:
        engine.rows.req_to_token[one.req_pool_idx, 3] = engine.rows.req_to_token[two.req_pool_idx, 3]
    engine.decode(one, two)
    engine.rows.req_to_token[:, :40] = kept[:, :40]
    return state_of(engine, one, two)


def no_damage(rank, group):
    """Nothing happens, and ranks meet in every step all the same."""
    engine = QuarantinedEngine(group=group, scrub_budget=1.0)
    request = engine.request(tokens=list(range(40)))
    engine.start(request)
    engine.run(request, steps=20)
    return state_of(engine, request)


def reductions(rank, group):
    """The two kinds of message by themselves."""
    consensus = Consensus(group)
    highest = consensus.highest([rank, 1 - rank, 5])
    union = consensus.union([(rank, -7), (9, 9)][: 2 - rank], 2, 2)
    nothing = consensus.union([], 0, 2)
    return {"highest": highest, "union": union, "nothing": nothing}


SCENARIOS = {
    function.__name__: function
    for function in (
        damage_on_rank_1,
        verdict_with_a_detached_rank,
        different_damage_on_each,
        row_damage_on_rank_1,
        no_damage,
        reductions,
    )
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, (folder,), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def outcomes(ranks):
    return lambda scenario: [outcomes[scenario] for outcomes in ranks]


def assert_alike(zero, one):
    for name in ("ended", "skipped", "withheld", "free", "points"):
        assert zero[name] == one[name], name


def test_both_ranks_act_on_what_only_the_second_has_found(outcomes):
    zero, one = outcomes("damage_on_rank_1")

    assert_alike(zero, one)
    assert zero["ended"] == ["r1", "r3"]
    assert (zero["violations"], one["violations"]) == (0, 1)
    assert "check content" in zero["messages"][0]
    assert zero["again"] == one["again"]
    assert zero["again"][0] == 0
    assert zero["innocent again"] == one["innocent again"] == [40, None]
    assert len(zero["withheld"]) == 1


def test_a_rank_whose_guard_has_detached_goes_on_joining_in(outcomes):
    zero, one = outcomes("verdict_with_a_detached_rank")

    assert_alike(zero, one)
    assert zero["ended"] == ["r1", "r3"]
    assert one["violations"] == 0
    assert zero["again"] == one["again"]
    assert zero["again"][0] == 0


def test_what_each_finds_is_put_together(outcomes):
    zero, one = outcomes("different_damage_on_each")

    assert_alike(zero, one)
    assert zero["ended"] == ["r1", "r2"]
    assert len(zero["withheld"]) == 2


def test_ranks_whose_rows_differ_end_the_same_requests(outcomes):
    zero, one = outcomes("row_damage_on_rank_1")

    assert_alike(zero, one)
    assert zero["ended"] == ["r1"]
    assert zero["messages"] != one["messages"]  # only one of them knows the place
    assert "check chain" in one["messages"][0]


def test_without_damage_ranks_agree_on_nothing_to_do(outcomes):
    zero, one = outcomes("no_damage")

    assert_alike(zero, one)
    assert zero["ended"] == []


def test_the_highest_of_each_value_and_every_finding_once(outcomes):
    zero, one = outcomes("reductions")

    assert zero == one == {"highest": [1, 1, 5], "union": [[0, -7], [1, -7], [9, 9]], "nothing": []}


def test_one_rank_sends_nothing():
    assert not dist.is_initialized()
    consensus = Consensus()

    assert consensus.size == 1
    assert consensus.highest([3, 0]) == [3, 0]
    assert consensus.union([(2, 1), (1, 2)], 2, 2) == [(1, 2), (2, 1)]
