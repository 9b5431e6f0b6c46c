"""Translations in ``patches/`` that need no server."""

from types import SimpleNamespace

import pytest
import torch

from kvcanary_plugin.patches import disaggregation, stages
from kvcanary_plugin.patches.allocators import declare_patches, slots_of_pages
from kvcanary_plugin.patches.fence import Fence
from kvcanary_plugin.patches.modes import list_mode_gaps
from kvcanary_plugin.patches.scheduler import declare_patches as declare_scheduler_patches


def test_slots_of_pages():
    assert slots_of_pages(torch.tensor([3, 1]), 4).tolist() == [12, 13, 14, 15, 4, 5, 6, 7]
    assert slots_of_pages(torch.tensor([], dtype=torch.int64), 4).tolist() == []


def test_pages_that_are_released_are_slots_that_are_released():
    released = []
    session = SimpleNamespace(release=lambda allocator, slots: released.append((allocator, slots.tolist())))
    (patch,) = [patch for patch in declare_patches(session) if patch.attribute == "_release_page_ids"]
    allocator = SimpleNamespace(page_size=2)
    pages = (torch.tensor([1]), torch.tensor([3]))

    assert patch.wrapper(lambda *args: args, allocator, pages, {}) == pages
    assert released == [(allocator, [2, 3]), (allocator, [6, 7])]


def test_a_fence_on_a_cpu_waits_for_nothing():
    fence = Fence()
    fence.is_needed = True
    fence.wait()
    fence.set_behind_reads(torch.device("cpu"))
    fence.wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_fenced", [True, False], ids=["fenced", "control"])
def test_the_schedulers_stream_writes_rows_only_after_the_forwards_stream_has_read_them(is_fenced):
    fence, device = Fence(), torch.device("cuda")
    fence.is_needed = is_fenced
    schedule, forward = torch.cuda.Stream(), torch.cuda.Stream()
    row, seen = torch.ones(1024, device=device), torch.empty(1024, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(schedule):
        with torch.cuda.stream(forward):
            torch.cuda._sleep(200_000_000)  # the forward before this one; about 0.1 s
            seen.copy_(row)
            fence.set_behind_reads(device)
        fence.wait()
        row.zero_()
    torch.cuda.synchronize()

    assert bool((seen == 1).all()) == is_fenced


def test_beam_search_is_turned_away_only_while_a_guard_is_on():
    session = SimpleNamespace(guard=None)
    (patch,) = [p for p in declare_scheduler_patches(session, Fence()) if p.attribute == "validate_and_init"]

    assert patch.wrapper(lambda *args: None, None, (object(), object()), {}) is None
    session.guard = object()
    assert "Beam search is not covered by kvcanary" in patch.wrapper(lambda *args: None, None, (object(), object()), {})


def test_a_setting_that_a_release_does_not_have_is_not_set():
    assert list_mode_gaps(SimpleNamespace()) == []
    assert list_mode_gaps(SimpleNamespace(pp_size=1, disaggregation_mode="null")) == []
    assert ["--enable-pdmux" in line for line in list_mode_gaps(SimpleNamespace(enable_pdmux=True))] == [True]


def stage_gaps(mode="log", **settings):
    return list_mode_gaps(SimpleNamespace(**settings), mode)


def test_how_many_stages_are_followed(monkeypatch):
    monkeypatch.setattr(stages, "installed_sglang", lambda: "0.5.15")
    assert stage_gaps(pp_size=2) == stage_gaps(pp_size=4, pp_async_batch_depth=0) == []
    (gap,) = stage_gaps("quarantine", pp_size=2)
    assert "--pp-size above 1 is not covered yet with --kvcanary quarantine" in gap
    assert stage_gaps("quarantine", pp_size=1) == []
    (gap,) = stage_gaps(pp_size=3, pp_async_batch_depth=2)
    assert "--pp-size 3 with --pp-async-batch-depth 2" in gap
    assert ["--pp-size" in gap for gap in stage_gaps(pp_size=8)] == [True, True]
    (gap,) = stage_gaps(pp_size=2, enable_hierarchical_cache=True)
    assert "--enable-hierarchical-cache" in gap
    monkeypatch.setattr(stages, "installed_sglang", lambda: "0.5.16")
    assert ["--pp-size above 1 is not covered" in gap for gap in stage_gaps(pp_size=2)] == [True]


def test_a_launch_and_its_result_are_tied_by_what_both_have():
    batch, result = object(), object()
    assert stages.pick_token(SimpleNamespace(ps=SimpleNamespace(pp_size=1)), batch, result) is result
    assert stages.pick_token(SimpleNamespace(), batch, result) is result
    # With stages the result that is processed is the one of the last stage.
    assert stages.pick_token(SimpleNamespace(ps=SimpleNamespace(pp_size=2)), batch, result) is batch
    assert stages.pick_token(SimpleNamespace(pp_size=2), batch, result) is batch


def test_which_servers_of_two_are_followed(monkeypatch):
    monkeypatch.setattr(disaggregation, "installed_sglang", lambda: "0.5.15")
    role = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "mooncake"}
    assert stage_gaps(**role) == stage_gaps(**role | {"disaggregation_mode": "prefill"}) == []
    for more, words in (
        ({"disaggregation_transfer_backend": "nixl"}, "--disaggregation-transfer-backend nixl; covered is mooncake"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disaggregation_decode_enable_radix_cache": True}, "radix cache on the decode side"),
    ):
        (gap,) = stage_gaps(**role | more)
        assert words in gap
    assert any("--kvcanary quarantine" in gap for gap in stage_gaps("quarantine", **role))
    monkeypatch.setattr(disaggregation, "installed_sglang", lambda: "0.5.16")
    (gap,) = stage_gaps(**role)
    assert "--disaggregation-mode is not covered (KV arrives" in gap
