"""The guard on a GPU, where decode steps are replayed from graphs: the same is found as when kernels are launched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvcanary_plugin.kernels import launch, ledger
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.captured import CapturedLaunches

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "kernels"))

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def run(bs: int, captured: bool, damage: str | None):
    from host_step import DecodeLoop

    torch.manual_seed(bs)
    loop = DecodeLoop(bs, 300, torch.device("cuda"), captured=captured)
    found = []
    loop._reporter.report = lambda violations: found.extend(violations) or violations
    for _ in range(8):
        loop.step()
    assert found == []
    slot = int(loop._slots[bs - 1, 77])
    if damage == "chain":
        loop.guard.records.hot[slot, r.CHAIN] += 1
    elif damage == "content":
        loop.guard.pool.table.sources[9].rows[slot, 0, 5] ^= 4
    elif damage == "slot":
        loop.guard.pool.req_to_token[bs, 77] = -5
    period = loop.guard.scrubber.period_forwards
    for _ in range(min(period + 2, 200) if damage == "content" else 3):
        loop.step()
    if captured:
        assert any(isinstance(graph, CapturedLaunches) for graph in loop.guard._captured._graphs.values())
    return {(v.check, v.kind, v.slot, v.position, v.layer, v.half) for v in found}, slot


@pytest.mark.parametrize("damage", ["chain", "content", "slot"])
@pytest.mark.parametrize("bs", [1, 5, 64])
def test_graphs_find_what_single_launches_find(bs: int, damage: str):
    (found, slot), (expected, _) = run(bs, True, damage), run(bs, False, damage)
    assert found == expected
    assert found
    assert {place for _, _, place, *_ in found} == ({-5} if damage == "slot" else {slot})


def test_an_idle_pass_waits_for_what_the_scheduler_has_just_queued():
    """On its stream the copy of what was freed or inserted is still to come when the pass begins."""
    from host_step import DecodeLoop

    loop = DecodeLoop(4, 100, torch.device("cuda"), captured=False)
    loop.step()
    guard = loop.guard
    slots = loop._slots[2, 10:60].clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        guard.ledger.note_insert(slots)
        guard.idle()
    assert {ledger.state_of(word) for word in guard.ledger.words[slots].tolist()} == {ledger.State.CACHED}
    assert loop.violations == 0


@pytest.mark.parametrize("bs", [1, 2, 3, 31, 33, 200, pytest.param(700, marks=pytest.mark.slow)])
def test_clean_steps_are_silent(bs: int):
    from host_step import DecodeLoop

    loop = DecodeLoop(bs, 100, torch.device("cuda"), captured=True)
    for _ in range(250):
        loop.step()
    assert loop.violations == 0
    assert loop.guard.scrubber.passes >= 1


def list_kernels():
    from kvcanary_plugin.kernels import claim_triton, fold_triton, poison_triton, verify_triton, write_triton

    return (
        fold_triton._fold,
        verify_triton._verify_prefixes,
        write_triton._write_chain,
        claim_triton._claim_writes,
        claim_triton._check_reads,
        poison_triton._poison,
    )


def count_compiled() -> dict[str, int]:
    """Variants of each kernel that Triton holds for this device."""
    return {kernel.__name__: len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in list_kernels()}


def test_what_a_server_uses_was_compiled_ahead():
    """So that no forward stands still for a compiler."""
    from host_step import DecodeLoop

    for kernel in list_kernels():  # what other tests have compiled
        kernel.device_caches.clear()
    launch._compiled.clear()
    loop = DecodeLoop(5, 300, torch.device("cuda"), captured=True)
    loop.guard.ahead.wait()
    known = count_compiled()
    assert min(known.values()) > 0
    for _ in range(250):
        loop.step()
    loop.guard.idle()
    assert count_compiled() == known
    assert loop.violations == 0
