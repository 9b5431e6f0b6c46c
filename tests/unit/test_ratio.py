"""DeepSeek V4: a window of every position, and entries that stand for 4 or for 128 positions, on SGLang's own pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive
from sglang.srt.mem_cache.common import free_swa_out_of_window_slots
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvcanary_plugin.config import Config
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.pool_patcher.adapters import adapt_pool
from kvcanary_plugin.runtime.guard import Guard
from tests.engine import WITHOUT_OWNERSHIP, Engine, ListReporter
from tests.pools.composite import deepseek_v4

accessor = pytest.importorskip("sglang.srt.layers.attention.dsv4.index_buf_accessor")  # moved since 0.5.15

PAGE, WINDOW, CONTEXT = 256, 128, 1024
RATIOS = (4, 128, 0)  # of the layers; all of them keep a window too
PARTS = [
    *((layer, half, "window") for layer in range(3) for half in ("KV", "KV scale")),
    *((0, half, "c4") for half in ("KV", "KV scale", "index", "index scale")),
    *((1, half, "c128") for half in ("KV", "KV scale")),
]


class GroupedEngine(Engine):
    """A layer with entries for 4 positions, one with entries for 128, and one with a window only."""

    def __init__(self, content: str = "all", **options: Any) -> None:
        built = deepseek_v4(pages=12, page_size=PAGE, ratios=RATIOS, window=WINDOW)
        self.pool, self.allocator = built.pool, built.allocator
        self.rows = ReqToTokenPool(16, CONTEXT, "cpu", False)
        self.reporter = ListReporter()
        guarded = adapt_pool(self.pool, self.allocator, self.rows.req_to_token, content, model="test")
        options.setdefault("checks", WITHOUT_OWNERSHIP)
        self.guard = Guard(guarded, Config(mode="log", content=content, **options), self.reporter)
        self.spaces = {space.slots.name: space for space in self.guard.spaces}
        self.random = torch.Generator().manual_seed(0)
        self.page_size = PAGE
        self.skipped: tuple[int, str] | None = None  # layer and half that the next forward does not store
        self._count = 0
        for inner in (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator):
            self._watch(inner)

    def _watch(self, inner: Any) -> None:
        free = inner.free

        def watched(slots: torch.Tensor) -> None:
            self.guard.traffic.release(slots, inner)
            free(slots)

        inner.free = watched

    def prefill(self, *requests: Any, prefix: torch.Tensor | None = None, upto: int | None = None) -> None:
        super().prefill(*requests, prefix=prefix, upto=upto or CONTEXT)

    def forward(self, requests: Any, starts: list[int], ends: list[int], mode: ForwardMode) -> None:
        for request in requests:
            free_swa_out_of_window_slots(
                request,
                request.kv_committed_len,
                sliding_window_size=WINDOW,
                page_size=PAGE,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
            )
        rows = [request.req_pool_idx for request in requests]
        self._stored = [
            (row, position)
            for row, start, end in zip(rows, starts, ends, strict=True)
            for position in range(start, end)
        ]
        super().forward(requests, starts, ends, mode)

    def store(self, slots: torch.Tensor) -> None:
        rows, positions = torch.tensor(self._stored, dtype=torch.int64).view(-1, 2).unbind(1)
        kept = self._bytes_of(*self.skipped).clone() if self.skipped else None
        held = self.allocator.full_to_swa_index_mapping[slots]
        for layer, ratio in enumerate(RATIOS):
            self._pack(self.pool.swa_kv_pool, self.pool.swa_kv_pool.kv_buffer[layer], held)
            if ratio:
                _, index, part = self.pool.layer_mapping[layer]
                # As SGLang's metadata kernel has it: by the position, entry 0 where no group is complete.
                entries = torch.where((positions + 1) % ratio == 0, slots // ratio, 0)
                self._pack(part, part.kv_buffer[index], entries)
                if ratio == 4:
                    self._index(self.pool.c4_indexer_kv_pool.index_k_with_scale_buffer[index], entries)
        sums = self.pool.compress_state_pools[1]
        ring = sums.translate_from_req_position_to_state_loc(rows, positions)
        sums.kv_score_buffer.kv_score[ring] = torch.randn((len(slots), sums.last_dim), generator=self.random)
        if kept is not None:
            self._bytes_of(*self.skipped).copy_(kept)
            self.skipped = None

    def _pack(self, part: Any, buffer: torch.Tensor, entries: torch.Tensor) -> None:
        n = len(entries)
        pack = accessor.NopeFp8RopeBf16Pack(
            torch.randn((n, 448), generator=self.random).to(torch.float8_e4m3fn),
            torch.randn((n, 64), generator=self.random).bfloat16(),
            torch.randint(1, 255, (n, 7), generator=self.random).to(torch.uint8),
        )
        accessor._set_k_and_s_torch(buffer, entries, pack, part.page_size)

    def _index(self, buffer: torch.Tensor, entries: torch.Tensor) -> None:
        size = self.pool.c4_indexer_kv_pool.page_size
        for at in entries.tolist():
            page, place = buffer[at // size], at % size
            page[place * 128 : place * 128 + 128].random_(0, 256, generator=self.random)
            page[size * 128 + place * 4 : size * 128 + place * 4 + 4].random_(0, 256, generator=self.random)

    def _bytes_of(self, layer: int, half: str) -> torch.Tensor:
        """All rows of one half of a layer's entries, uint8 (pages, page size, width)."""
        table = self.spaces[f"c{RATIOS[layer]}"].slots.table
        return table.sources[table.names.index((layer, half))].rows

    def finish(self, request: Any, *, keep: int = 0) -> torch.Tensor:
        slots = self.slots_of(request)
        self.allocator.free(slots[keep:])
        self.rows.free_slots.append(request.req_pool_idx)
        request.req_pool_idx = None
        return slots[:keep]

    def place_of(self, space: str, request: Any, position: int) -> int:
        """Where ``position`` is kept, or the group it is in."""
        slot = int(self.slots_of(request)[position])
        if space == "window":
            return int(self.allocator.full_to_swa_index_mapping[slot])
        return slot // self.spaces[space].slots.ratio

    def settle_scrub(self) -> None:
        passes = [space.scrubber.period_forwards for space in self.guard.spaces if space.scrubber is not None]
        for _ in range(max(passes) + 1):
            self.forward([], [], [], ForwardMode.IDLE)

    def _allocate(self, requests: Any, starts: list[int], ends: list[int]) -> torch.Tensor:
        mapping = self.allocator.full_to_swa_index_mapping
        last = [
            int(self.rows.req_to_token[request.req_pool_idx, start - 1]) if start else -1
            for request, start in zip(requests, starts, strict=True)
        ]
        full = self._extend(self.allocator.full_attn_allocator, starts, ends, last)
        held = [int(mapping[slot]) if slot >= 0 else -1 for slot in last]
        mapping[full] = self._extend(self.allocator.swa_attn_allocator, starts, ends, held)
        return full

    @staticmethod
    def _extend(allocator: Any, starts: list[int], ends: list[int], last: list[int]) -> torch.Tensor:
        free, out = allocator.free_pages, torch.zeros(sum(ends) - sum(starts), dtype=torch.int64)
        alloc_extend_naive(torch.tensor(starts), torch.tensor(ends), torch.tensor(last), free, out, PAGE, "cpu")
        pages = sum(-(-end // PAGE) - -(-start // PAGE) for start, end in zip(starts, ends, strict=True))
        allocator.free_pages = free[pages:]
        return out


@pytest.fixture
def engine() -> GroupedEngine:
    return GroupedEngine()


def running(engine: GroupedEngine):
    """Two requests in the middle of a group; what is stored of every layer is known by then."""
    one, other = engine.request(385), engine.request(129)
    engine.prefill(other)
    for upto in (130, 200, 300, 384, 385):
        engine.prefill(one, upto=upto)
    engine.run(one, other, steps=6)
    return one, other


def test_requests_that_complete_groups_are_silent(engine: GroupedEngine):
    one, other = running(engine)
    engine.run(one, other, steps=130)
    third = engine.request(511)
    engine.prefill(third)
    engine.run(one, other, third, steps=3)
    engine.finish(one)
    engine.run(other, third, steps=5)
    engine.settle_scrub()
    assert engine.violations == []
    live = {
        name: int((space.records.hot[:, r.IDENTITY] & r.LIVE_BIT != 0).sum()) for name, space in engine.spaces.items()
    }
    committed = [request.kv_committed_len for request in (other, third)]
    assert live["positions"] == sum(committed)
    assert live["c4"] == sum(length // 4 for length in committed)
    assert live["c128"] == sum(length // 128 for length in committed)
    for name in ("window", "c4", "c128"):
        assert engine.spaces[name].presence.learned.unstored == ()
    assert engine.spaces["c4"].presence.learned.too_narrow == ((0, "index scale"),)
    assert sum(watch.compared for watch in engine.guard.states) > 50


def test_the_pace_of_every_space_is_set(engine: GroupedEngine):
    one, _ = running(engine)
    engine.run(one, steps=80)
    engine.settle_scrub()
    assert engine.guard.scrubber is None  # positions have no bytes of their own
    for name in ("window", "c4", "c128"):
        assert engine.spaces[name].scrubber.interval_seconds is not None


def test_pages_are_freed_and_taken_over_silently(engine: GroupedEngine):
    for length in (700, 255, 256, 257, 510, 129, 640, 900, 3, 127):
        request = engine.request(length)
        for upto in range(131, length + 131, 131):
            engine.prefill(request, upto=min(upto, length))
        engine.run(request, steps=7)
        engine.finish(request)
    engine.settle_scrub()
    assert engine.violations == []


@pytest.mark.parametrize("pages", [1, 2])
def test_prefixes_of_whole_pages_are_reused_silently(engine: GroupedEngine, pages: int):
    one, _ = running(engine)
    engine.run(one, steps=140 * (pages - 1))  # the window of the last page of the prefix must still be there
    prefix = engine.finish(one, keep=pages * PAGE)
    tokens = list(one.origin_input_ids) + list(one.output_ids)
    for extra in (1, 127, 260):
        again = engine.request(tokens=tokens[: pages * PAGE] + list(range(extra)))
        engine.prefill(again, prefix=prefix, upto=pages * PAGE + min(extra, 100))
        if extra > 100:
            engine.prefill(again)
        engine.run(again, steps=5)
        engine.finish(again, keep=pages * PAGE)
    assert engine.violations == []


@pytest.mark.parametrize("content", ["none", "partial"])
def test_spaces_with_less_of_their_bytes_or_none_are_silent(content: str):
    engine = GroupedEngine(content)
    one, other = running(engine)
    engine.run(one, other, steps=130)
    assert engine.violations == []
    engine.spaces["c4"].records.hot[engine.place_of("c4", one, 3), r.CHAIN] += 1
    engine.run(one)
    assert [(v.check, v.pool) for v in engine.violations] == [("chain", "DeepSeek V4/c4")]


@pytest.mark.parametrize(("layer", "half", "space"), PARTS)
def test_a_flipped_bit_is_placed_in_its_space(engine: GroupedEngine, layer: int, half: str, space: str):
    one, _ = running(engine)
    ratio = engine.spaces[space].slots.ratio
    position = one.kv_committed_len - 1 if ratio == 1 else 2 * ratio - 1
    at = engine.place_of(space, one, position)
    table = engine.spaces[space].slots.table
    rows = table.sources[table.names.index((layer, half))].rows
    rows[at // rows.shape[1], at % rows.shape[1], 3] ^= 16
    engine.settle_scrub()
    (violation,) = engine.violations
    assert (violation.check, violation.kind, violation.pool) == ("content", "content", f"DeepSeek V4/{space}")
    assert (violation.layer, violation.half) == (layer, half)
    assert (violation.slot, violation.position) == (at, position)
    assert violation.page == at // engine.spaces[space].slots.page_size


@pytest.mark.parametrize(("layer", "half", "space"), PARTS[6:])
def test_a_prefix_is_looked_at_when_a_request_starts_on_it(engine: GroupedEngine, layer: int, half: str, space: str):
    one, _ = running(engine)
    at = engine.place_of(space, one, 250)
    prefix = engine.finish(one, keep=PAGE)
    again = engine.request(tokens=[*list(one.origin_input_ids)[:PAGE], 1, 2, 3])
    engine._bytes_of(layer, half)[
        at // engine.spaces[space].slots.page_size, at % engine.spaces[space].slots.page_size, 0
    ] ^= 1
    engine.prefill(again, prefix=prefix)
    (violation,) = engine.violations
    assert (violation.check, violation.phase, violation.request) == ("content", "start", again.rid)
    assert (violation.pool, violation.slot, violation.layer, violation.half) == (
        f"DeepSeek V4/{space}",
        at,
        layer,
        half,
    )


def test_entries_of_freed_pages_are_nobodys_concern(engine: GroupedEngine):
    one, _ = running(engine)
    at = engine.place_of("c4", one, 3), engine.place_of("c128", one, 127)
    engine.finish(one)
    for layer, place in enumerate(at):
        rows = engine._bytes_of(layer, "KV")
        rows[place // rows.shape[1], place % rows.shape[1]] += 1
    engine.settle_scrub()
    assert engine.violations == []


def other_position(engine: GroupedEngine, one: Any, other: Any, space: str, ratio: int) -> int:
    del other
    return engine.place_of(space, one, 2 * ratio - 1)


def other_request(engine: GroupedEngine, one: Any, other: Any, space: str, ratio: int) -> int:
    del one
    return engine.place_of(space, other, ratio - 1)


@pytest.mark.parametrize(("space", "ratio"), [("c4", 4), ("c128", 128)])
@pytest.mark.parametrize(("take", "kind"), [(other_position, "position"), (other_request, "link")])
def test_the_entry_of_another_token_is_named(
    engine: GroupedEngine, space: str, ratio: int, take: Callable[..., int], kind: str
):
    one, other = running(engine)
    records = engine.spaces[space].records.hot
    at = engine.place_of(space, one, ratio - 1)
    records[at] = records[take(engine, one, other, space, ratio)]
    engine.decode(one, other)
    (violation,) = [v for v in engine.violations if v.check == "chain"]
    assert (violation.kind, violation.pool, violation.slot) == (kind, f"DeepSeek V4/{space}", at)
    assert (violation.request, violation.position) == (one.rid, ratio - 1)
    assert violation.expected_token == one.origin_input_ids[ratio - 1]
    assert violation.stored_position == (2 * ratio - 1 if kind == "position" else ratio - 1)


@pytest.mark.parametrize(("layer", "half", "space"), [part for part in PARTS[6:] if part[1] != "index scale"])
def test_an_entry_that_is_not_stored_is_named(engine: GroupedEngine, layer: int, half: str, space: str):
    one, _ = running(engine)
    ratio = engine.spaces[space].slots.ratio
    engine.run(one, steps=-(one.kv_committed_len + 1) % ratio)
    engine.skipped = (layer, half)
    engine.decode(one)  # the last position of its group
    assert one.kv_committed_len % ratio == 0
    (violation,) = engine.violations
    assert (violation.check, violation.kind, violation.request) == ("presence", "not_stored", one.rid)
    assert (violation.pool, violation.layer, violation.half) == (f"DeepSeek V4/{space}", layer, half)
    assert violation.slot == engine.place_of(space, one, one.kv_committed_len - 1)


@pytest.mark.parametrize(("space", "ratio"), [("c4", 4), ("c128", 128)])
def test_an_entry_whose_record_was_released_is_named(engine: GroupedEngine, space: str, ratio: int):
    one, other = running(engine)
    at = engine.place_of(space, one, ratio - 1)
    engine.spaces[space].records.hot[at, r.IDENTITY] &= ~r.LIVE_BIT
    engine.decode(one, other)
    (violation,) = engine.violations
    assert (violation.check, violation.kind) == ("chain", "dead_slot")
    assert (violation.pool, violation.slot, violation.position) == (f"DeepSeek V4/{space}", at, ratio - 1)


def test_a_page_that_is_freed_under_its_request_is_named_once(engine: GroupedEngine):
    one, other = running(engine)
    slots = engine.slots_of(one)
    first = slots[7:8]  # one slot frees its page
    engine.allocator.full_attn_allocator.free(first)
    engine.decode(one, other)
    dead = {v.position for v in engine.violations}
    assert {(v.check, v.kind, v.pool, v.request) for v in engine.violations} == {
        ("chain", "dead_slot", "DeepSeek V4", one.rid)
    }
    assert dead <= set(range(PAGE))
    for space, ratio in (("c4", 4), ("c128", 128)):
        live = (engine.spaces[space].records.hot[:, r.IDENTITY] & r.LIVE_BIT) != 0
        entries = slots[ratio - 1 :: ratio] // ratio
        assert live[entries].tolist() == [place * ratio >= PAGE for place in range(len(entries))]


def test_rows_that_name_other_slots_are_named_in_the_main_space(engine: GroupedEngine):
    one, other = running(engine)
    row = engine.rows.req_to_token[one.req_pool_idx]
    row[[3, 9]] = row[[9, 3]]  # the first is the last of its group, the second within one
    engine.decode(one, other)
    assert {(v.pool, v.position) for v in engine.violations} == {("DeepSeek V4", 3), ("DeepSeek V4", 9)}


def test_sums_that_changed_between_forwards_are_named(engine: GroupedEngine):
    one, other = running(engine)
    sums = engine.pool.compress_state_pools[1]
    for request in (one, other):  # whichever of them is watched now
        sums.kv_score_buffer.kv_score[request.req_pool_idx * 128 : (request.req_pool_idx + 1) * 128, 5] += 1
    engine.run(one, other, steps=3)
    (violation,) = engine.violations
    assert (violation.check, violation.kind, violation.pool) == ("content", "state", "DeepSeek V4/sums of 128")
    assert (violation.layer, violation.half) == (1, "sums")
    assert violation.request in (one.rid, other.rid)
