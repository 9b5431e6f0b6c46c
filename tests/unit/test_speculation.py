"""Speculative decoding on SGLang's own workers, sampler, pool and tree: faults are found, everything else is silent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from kvcanary_plugin.config import ALLOW_INJECT_VARIABLE
from kvcanary_plugin.errors import ConfigError, UncoveredError
from kvcanary_plugin.faults import speculation as faults
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.patches import speculation
from kvcanary_plugin.patches.modes import list_mode_gaps
from kvcanary_plugin.pool_patcher.patch import PatchSet
from kvcanary_plugin.versions import installed_sglang
from tests.speculating import Speculating, stand_in_for_kernels
from tests.unit.quarantined import LEVERS
from tests.unit.test_state import HybridEngine
from tests.unit.test_window import WindowEngine

pytestmark = pytest.mark.skipif(
    not speculation.SINCE <= installed_sglang() < speculation.UNTIL, reason="speculation is refused in this release"
)
ALGORITHMS = ("ngram", "eagle", "chain")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "1")  # moves without a GPU kernel
    monkeypatch.setenv(ALLOW_INJECT_VARIABLE, "1")


@pytest.fixture
def speculating():
    """Makes engines and closes them."""
    made: list[Speculating] = []

    def make(*args: Any, **options: Any) -> Speculating:
        made.append(Speculating(*args, **options))
        return made[-1]

    yield make
    for engine in reversed(made):
        engine.close()


def injected_into(engine: Speculating) -> dict[str, Any]:
    (fields,) = [fields for event, fields in engine.reporter.events if event == "injected"]
    return fields


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_everything_legal_is_silent(speculating, algorithm: str, overlap: bool, page_size: int):
    """Requests start, share a prefix, end while their next round runs, are retracted and come back."""
    engine = speculating(algorithm, overlap=overlap, page_size=page_size)
    one, two = engine.request(20), engine.request(33)
    engine.prefill(one, two)
    engine.run(12)
    three = engine.request(tokens=[*one.origin_input_ids, 1, 2, 3])
    engine.prefill(three)
    assert len(three.prefix_indices) >= 20 // page_size * page_size
    engine.run(3)
    engine.round(finish=[one])
    engine.run(5)
    engine.drain()
    engine.retract(two)
    engine.prefill(two)
    four = engine.request(tokens=[*one.origin_input_ids, *one.output_ids, 5])
    engine.prefill(four)
    assert len(four.prefix_indices) > 20  # what speculation committed was cached, and is read here
    engine.run(9)
    engine.drain()
    engine.finish(three)
    engine.cover()
    assert engine.violations == []
    assert 1.5 < engine.accepted / engine.rounds < engine.nodes
    assert "detached" not in dict(engine.reporter.events)


def test_what_is_committed_is_live_and_nothing_else(speculating):
    engine = speculating()
    request = engine.request(9)
    engine.prefill(request)
    for _ in range(8):
        engine.round()
        engine.drain()
        row = engine.rows.req_to_token[request.req_pool_idx, : request.kv_allocated_len].long()
        records = engine.guard.records.hot[row]
        live = records[:, r.IDENTITY] & r.LIVE_BIT != 0
        assert torch.equal(live, torch.arange(len(row)) < request.kv_committed_len)
        tokens = torch.tensor([*request.origin_input_ids, *request.output_ids][: request.kv_committed_len])
        assert torch.equal(records[: len(tokens), r.IDENTITY] & r.TOKEN_MASK, tokens)
    assert request.kv_allocated_len > request.kv_committed_len


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", [*faults.PATH_FAULTS, *faults.STORE_FAULTS])
def test_every_fault_is_found_in_the_right_place(speculating, name: str, algorithm: str, overlap: bool):
    engine = speculating(algorithm, overlap=overlap, inject=f"{name}@8")
    engine.prefill(engine.request(20), engine.request(33))
    engine.run(12)
    engine.cover()
    done = injected_into(engine)
    first = engine.violations[0]
    assert {violation.check for violation in engine.violations} == {done["check"]} == {faults.FOUND_BY[name]}
    if name == "skip_draft_store":
        assert (first.step, first.layer, first.half) == (done["step"], done["layer"], done["half"])
        assert first.request == done["request"]
        assert len(engine.violations) == 1
        return
    assert (first.slot, first.position) == (done["slots"][0], done["positions"][0])
    if name == "leave_rejected":
        assert (first.kind, first.step, first.request) == ("draft_path", done["step"], done["request"])
        assert first.stored_token != first.expected_token or first.stored_position != first.position
        assert {violation.slot for violation in engine.violations} == {first.slot}
    else:
        assert first.step <= done["step"] + done["bound_forwards"]
        assert len(engine.violations) == 1


def round_with(engine: Speculating, name: str, move: Any) -> int:
    """Rounds in which ``move`` stands for a method of the pool, until one has to move something; its step."""
    kept, counts = getattr(MHATokenToKVPool, name), []

    def counting(pool: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        counts.append(int((target != source).sum()))
        move(kept, pool, target, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MHATokenToKVPool, name, counting)
        for _ in range(20):
            engine.round()
            if counts[-1]:
                break
    step = engine.guard.forwards
    assert counts[-1]
    engine.drain()
    return step


def test_a_move_that_is_left_out_is_found_in_its_round(speculating):
    engine = speculating()
    engine.prefill(engine.request(20), engine.request(33))
    step = round_with(engine, "move_kv_cache", lambda *_: None)
    assert engine.violations
    assert {(violation.kind, violation.step) for violation in engine.violations} == {("draft_path", step)}


def test_a_move_of_the_wrong_rows_is_found_in_its_round(speculating):
    def move_wrong(move: Any, pool: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        used = int((source != 0).sum())
        order = [*range(1, used), 0] if bool((target != source).any()) else range(used)
        move(pool, target, torch.cat((source[:used][list(order)], source[used:])))

    engine = speculating()
    engine.prefill(engine.request(20), engine.request(33))
    step = round_with(engine, "move_kv_cache", move_wrong)
    assert engine.violations
    assert {(violation.kind, violation.step) for violation in engine.violations} == {("draft_path", step)}


def test_a_move_that_left_some_bytes_behind_is_found(speculating):
    def move_part(move: Any, pool: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        kept = pool.v_buffer[1].clone()
        move(pool, target, source)
        pool.v_buffer[1].copy_(kept)

    engine = speculating()
    engine.prefill(engine.request(20), engine.request(33))
    round_with(engine, "_move_kv_cache_impl", move_part)
    engine.cover()
    places = {(violation.check, violation.layer, violation.half) for violation in engine.violations}
    assert places == {("content", 1, "V")}


def test_a_token_that_the_scheduler_takes_for_another_is_found_when_it_is_read(speculating):
    """The device and the scheduler disagree on what was accepted."""
    engine = speculating()
    request = engine.request(20)
    engine.prefill(request)
    engine.run(4)
    engine.drain()
    request.output_ids[-2] = (request.output_ids[-2] + 1) % 90
    engine.round()
    engine.drain()
    assert [(violation.check, violation.position) for violation in engine.violations] == [
        ("chain", 20 + len(request.output_ids) - engine.accepted_last - 2)
    ]


@pytest.mark.parametrize("damage", ["free", "foreign"])
def test_slots_of_others_are_not_drafted_into(speculating, damage: str):
    engine = speculating()
    one, two = engine.request(20), engine.request(33)
    engine.prefill(one, two)
    engine.run(4)
    engine.drain()
    reserved = engine.rows.req_to_token[one.req_pool_idx]
    place = one.kv_committed_len + 1
    if damage == "free":
        engine.allocator.free(reserved[place : place + 1].long())
    else:
        reserved[place] = engine.rows.req_to_token[two.req_pool_idx, 3]
    engine.round()
    engine.drain()
    found = [violation for violation in engine.violations if violation.check == "ownership"]
    assert found
    assert found[0].slot == int(reserved[place])


def test_a_path_that_nobody_announced_is_an_error_of_ours(speculating):
    engine = speculating()
    engine.prefill(engine.request(20))
    engine.round()
    guard = engine.guard
    guard.commit(torch.ones(1), torch.ones(6))  # committed already: nothing to do
    guard.traffic.drafts.step = guard.verdicts.steps[guard.forwards % 4]
    engine.session.commit(torch.ones(2, dtype=torch.int32), torch.ones(12, dtype=torch.int32))
    assert engine.session.guard is None
    assert engine.reporter.events[-1][0] == "detached"


@pytest.mark.parametrize("make", [WindowEngine, HybridEngine], ids=["window", "state"])
def test_pools_with_more_than_one_space_are_refused(make: Any):
    with pytest.raises(UncoveredError, match="speculative decoding with pool"):
        make().guard.traffic.open_drafts()


def test_drills_say_which_check_would_find_them(speculating):
    with pytest.raises(ConfigError, match="move_wrong_draft: the check that finds it, content, is off"):
        speculating(inject="move_wrong_draft@8", checks=("chain",))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculative_algorithm": "NGRAM"}, []),
        ({"speculative_algorithm": "eagle3"}, []),
        ({"speculative_algorithm": "DFLASH"}, ["--speculative-algorithm is not covered"]),
        ({"speculative_algorithm": "EAGLE", "speculative_adaptive": True}, ["--speculative-adaptive is not covered"]),
        ({"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True}, ["--enable-multi-layer-eagle"]),
        ({"speculative_algorithm": "EAGLE", "decoupled_spec_role": "verifier"}, ["--decoupled-spec-role"]),
        ({"speculative_algorithm": "NGRAM", "enable_hierarchical_cache": True}, ["--enable-hierarchical-cache"]),
        ({"speculative_algorithm": "NGRAM", "enable_streaming_session": True}, ["--enable-streaming-session"]),
    ],
)
def test_what_is_covered(settings: dict[str, Any], words: list[str]):
    namespace = SimpleNamespace(**settings)
    gaps = list_mode_gaps(namespace)
    assert len(gaps) == len(words)
    assert all(word in gap for word, gap in zip(words, gaps, strict=True))


def test_made_up_acceptance_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(speculation.MADE_UP_LENGTHS, "2.5")
    (gap,) = speculation.list_draft_gaps(SimpleNamespace(speculative_algorithm="EAGLE"))
    assert speculation.MADE_UP_LENGTHS in gap
    assert speculation.list_draft_gaps(SimpleNamespace(speculative_algorithm=None)) == []


@pytest.mark.parametrize("version", ["0.5.14", "0.5.16", "0.5.23"])
def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(speculation, "installed_sglang", lambda: version)
    (gap,) = list_mode_gaps(SimpleNamespace(speculative_algorithm="NGRAM"))
    assert "--speculative-algorithm is not covered" in gap


def test_the_worker_tells_of_commits_and_is_left_as_it_was_afterwards():
    told: list[Any] = []
    session: Any = SimpleNamespace(commit=lambda *given: told.append(given))
    kept = vars(SpeculativeAlgorithm)["create_worker"]
    patches = PatchSet(speculation.declare_patches(session))
    stand_in_for_kernels()
    patches.install(installed_sglang())
    try:
        made = SpeculativeAlgorithm.STANDALONE.create_worker(SimpleNamespace(enable_multi_layer_eagle=False))
        assert made.__name__ == "StandaloneWorkerV2"
        (original,) = made.__bases__
        assert made.verify is not original.verify
        ngram = SpeculativeAlgorithm.NGRAM.create_worker(SimpleNamespace())
        assert ngram.forward_batch_generation is not ngram.__bases__[0].forward_batch_generation
    finally:
        patches.uninstall()
    assert vars(SpeculativeAlgorithm)["create_worker"] is kept
    other = type("DFlashWorkerV2", (), {})
    assert speculation.tell_commits(other, session) is other
    result = SimpleNamespace(accept_lens=1, next_token_ids=2)
    base = type("NGRAMWorker", (), {"forward_batch_generation": lambda self, batch: batch})
    worker = speculation.tell_commits(base, session)()
    assert worker.forward_batch_generation(result) is result
    assert worker.forward_batch_generation(SimpleNamespace(accept_lens=None)).accept_lens is None
    assert told == [(1, 2)]


def test_only_rounds_of_verification_have_trees():
    speculates = SimpleNamespace(is_none=lambda: False)
    scheduler = SimpleNamespace(spec_algorithm=speculates, draft_worker=SimpleNamespace(speculative_num_draft_tokens=8))
    for mode, requests, nodes in (
        (ForwardMode.DECODE, [1], 8),
        (ForwardMode.EXTEND, [1], 0),
        (ForwardMode.IDLE, [], 0),
    ):
        assert speculation.count_nodes(scheduler, SimpleNamespace(forward_mode=mode, reqs=requests)) == nodes
    scheduler.spec_algorithm = SimpleNamespace(is_none=lambda: True)
    assert speculation.count_nodes(scheduler, SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=[1])) == 0
    assert speculation.read_forward(SimpleNamespace(forward_mode=ForwardMode.DECODE)) is None


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_quarantine_ends_the_request_whose_path_is_wrong_and_no_other(speculating, overlap: bool):
    engine = speculating(mode="quarantine", inject="leave_rejected@8", overlap=overlap)
    engine.session.enforce(LEVERS, None, engine.tree)
    one, two = engine.request(20), engine.request(33)
    engine.prefill(one, two)
    while engine.guard.forwards < 8:
        engine.round()
    engine.drain()
    done = injected_into(engine)
    (victim,) = [request for request in (one, two) if request.rid == done["request"]]
    (other,) = {one, two} - {victim}
    assert victim.to_finish is not None
    assert victim.skip_radix_cache_insert
    assert other.to_finish is None
    engine.finish(victim)
    engine.run(6)
    engine.cover()
    assert {violation.request for violation in engine.violations} == {victim.rid}
