from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import make_table, poisoned_violations, random_bytes, random_words, rows_of

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.kernels.mixing import locate_source
from kvcanary_plugin.pool_patcher.sources import SourceTable, make_row_source, make_source, view_slots

# widths of the sources in bytes, unused bytes between rows, slots a page, groups of a page
LAYOUTS = {
    "plain": ([64, 64, 64, 64], 0, 1),
    "rows apart": ([64, 64], 16, 1),
    "odd rows": ([13, 13, 13], 0, 1),
    "tiny": ([4, 4], 0, 1),
    "one byte": ([1], 0, 1),
    "two-byte units": ([18, 18], 4, 1),
    "packed 584": ([584, 584], 576, 4),
    "packed odd": ([7, 7], 5, 3),
    "groups of 32": ([4, 4], 0, 128, 4),
    "groups of one": ([16, 5], 0, 3, 3),
    "groups of odd rows": ([13, 7, 13], 3, 24, 8),
    "groups of long rows": ([584, 32], 8, 12, 2),
    "of every width": ([32, 8, 32, 13, 584, 8], 8, 1),
    "long": ([2056], 0, 1),
}


@pytest.fixture(params=LAYOUTS, ids=str)
def table(request: pytest.FixtureRequest, device: torch.device) -> SourceTable:
    widths, apart, page_size, *groups = LAYOUTS[request.param]
    return make_table(widths, 48, device, apart=apart, page_size=page_size, groups=groups[0] if groups else 1)


def fold(backend: Backend, table: SourceTable, slots: torch.Tensor) -> torch.Tensor:
    sums = random_words(2, slots.shape[0], device=slots.device, seed=9)
    backend.fold_slots(table, slots, digest=sums[0], locator=sums[1])
    return sums


def test_equals_the_reference(triton_backend: Backend, table: SourceTable, device: torch.device):
    slots = torch.randperm(48)[:7].to(device)
    assert torch.equal(fold(triton_backend, table, slots), fold(REFERENCE, table, slots))


@pytest.mark.parametrize("tuning", [(2, 2, 1, 1), (4, 2, 1, 3), (16, 16, 2, 2), (64, 8, 4, 1), (256, 128, 4, 64)])
def test_every_split_gives_the_same(device: torch.device, triton_backend: Backend, tuning: tuple[int, int, int, int]):
    from kvcanary_plugin.kernels.fold_triton import OUTPUT, launch_fold

    table = make_table([32, 8, 32, 13, 8], 20, device)
    slots = torch.tensor([19, 0, 7], device=device)
    expected = fold(REFERENCE, table, slots)
    for _ in range(2):  # the scratch is left zeroed
        sums = random_words(2, 3, device=device, seed=4)
        launch_fold(OUTPUT, table=table, slots=slots, records=sums, digest=sums[0], locator=sums[1], tuning=tuning)
        assert torch.equal(sums, expected)


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("head_dim", [8, 13, 64])
def test_rows_in_pieces_of_a_head_each(triton_backend: Backend, device: torch.device, page_size: int, head_dim: int):
    """The HND layout: (page, head, slot of the page, element)."""
    named = []
    for index, half in enumerate("KVKV"):
        buffer = random_bytes(48 // page_size, 3, page_size, 2 * head_dim, device=device, seed=index)
        pieces = view_slots(buffer.view(torch.bfloat16), slot_axes=(2,))
        assert [piece.shape for piece in pieces] == [(48 // page_size, page_size, 2 * head_dim)] * 3
        named += [((index // 2, half), make_source(piece, 2 * head_dim)) for piece in pieces]
    table = SourceTable(named, 48, device)
    slots = torch.randperm(48)[:19].to(device)
    before = fold(REFERENCE, table, slots)
    assert torch.equal(fold(triton_backend, table, slots), before)
    table.sources[7].rows[int(slots[5]) // page_size, int(slots[5]) % page_size, -1] ^= (
        64  # the second head of layer 1 K
    )
    after = fold(triton_backend, table, slots)
    assert torch.equal(after, fold(REFERENCE, table, slots))
    assert torch.nonzero((after != before).any(0)).flatten().tolist() == [5]
    assert locate_source(*before[:, 5].tolist(), *after[:, 5].tolist(), len(table.sources)) == 7


@pytest.mark.parametrize("lanes", [8, 5])
@pytest.mark.parametrize(("heads", "width"), [(2, 4), (3, 1), (1, 13)])
def test_groups_in_pieces_of_a_head_each(
    triton_backend: Backend, device: torch.device, lanes: int, heads: int, width: int
):
    """The layout of MXFP8 scales: (page, head, slot of a group, group, byte)."""
    buffer = random_bytes(2, heads, lanes, 4, width, device=device, seed=lanes)
    named = [((0, "K scale"), make_source(piece, width)) for piece in view_slots(buffer, slot_axes=(3, 2))]
    assert len(named) == heads
    table = SourceTable(named, 2 * 4 * lanes, device)
    places = {(0, 0, 0, 1), (1, heads - 1, lanes - 1, 3), (1, 0, 2, 0)}  # page, head, slot of a group, group
    damaged = {(page * 4 + group) * lanes + lane: head for page, head, lane, group in places}
    slots = torch.tensor([0, 1, *damaged, lanes - 1, 4 * lanes], device=device)
    before = fold(REFERENCE, table, slots)
    assert torch.equal(fold(triton_backend, table, slots), before)
    for page, head, lane, group in places:
        buffer[page, head, lane, group, -1] ^= 1
    after = fold(triton_backend, table, slots)
    assert torch.equal(after, fold(REFERENCE, table, slots))
    located = {
        int(slots[at]): locate_source(*before[:, at].tolist(), *after[:, at].tolist(), heads)
        for at in torch.nonzero((after != before).any(0)).flatten().tolist()
    }
    assert located == damaged


def test_no_slots_and_no_sources(triton_backend: Backend, device: torch.device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert fold(triton_backend, make_table([8], 4, device), none).shape == (2, 0)
    assert not fold(triton_backend, SourceTable([], 4, device), torch.tensor([1, 2], device=device)).any()


def test_seal_keeps_the_sums(triton_backend: Backend, device: torch.device):
    table = make_table([64, 24, 8, 200], 40, device)
    slots = torch.tensor([0, 39, 7, 8, 20], device=device)
    sealed = []
    for backend in (REFERENCE, triton_backend):
        records = random_words(40, r.RECORD_WORDS, device=device, seed=3)
        backend.seal_slots(records=records, table=table, slots=slots)
        sealed.append(records)
    assert torch.equal(*sealed)


def test_slots_past_two_gigabytes(triton_backend: Backend, device: torch.device):
    """Addresses need more than 31 bits: three rows of a buffer that is never written as a whole."""
    slot_count, width = 9_000_000, 256
    buffer = torch.empty((slot_count, width), dtype=torch.uint8, device=device)
    slots = torch.tensor([8_388_608, 8_999_999, 1], device=device)  # 2^31 bytes and on
    buffer[slots] = torch.arange(3 * width, device=device).view(3, width).to(torch.uint8)
    table = SourceTable([((0, "K"), make_row_source(layer_buffer=buffer, read_bytes=width)[0])], slot_count, device)
    assert torch.equal(fold(triton_backend, table, slots), fold(REFERENCE, table, slots))


@pytest.mark.gpu
def test_large_pool():
    from kvcanary_plugin.kernels.backend import load_triton

    device = torch.device("cuda")
    table = make_table([2048] * 6 + [584] * 3, 20_011, device)
    for count in (1, 63, 513, 5003, 20_011):
        slots = torch.randperm(20_011, device=device)[:count]
        assert torch.equal(fold(load_triton(), table, slots), fold(REFERENCE, table, slots))


CPU = torch.device("cpu")


def digest_of(table: SourceTable, slot: int) -> tuple[int, int]:
    sums = fold(REFERENCE, table, torch.tensor([slot]))
    return int(sums[0]), int(sums[1])


@given(source=st.integers(0, 5), slot=st.integers(0, 4), byte=st.integers(0, 12), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_one_flipped_bit_changes_the_digest_and_is_located(source: int, slot: int, byte: int, bit: int):
    table = make_table([16, 24, 16, 13, 584, 13], 5, CPU)
    before = digest_of(table, slot)
    table.sources[source].rows[slot, 0, byte] ^= 1 << bit
    after = digest_of(table, slot)
    assert before[0] != after[0]
    assert locate_source(*before, *after, len(table.sources)) == source


@given(data=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_exchanges_change_the_digest(data: st.DataObject, seed: int):
    table = make_table([32] * 4, 6, CPU, seed=seed)
    words = [source.words for source in table.sources]
    before = digest_of(table, 3)
    what = data.draw(st.sampled_from(["words", "slots", "layers", "shift"]))
    first, second = data.draw(st.permutations(range(4)))[:2]
    if what == "words":
        words[first][3, [0, second or 1]] = words[first][3, [second or 1, 0]]
    elif what == "slots":
        words[first][[3, 4]] = words[first][[4, 3]]
    elif what == "layers":
        kept = words[first][3].clone()
        words[first][3] = words[second][3]
        words[second][3] = kept
    else:
        words[first][1:] = words[first][:-1].clone()
    after = digest_of(table, 3)
    assert before[0] != after[0]
    if what != "layers":
        assert locate_source(*before, *after, 4) == first


@given(first=st.integers(0, 255), second=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_constant_rows_differ(first: int, second: int):
    table = make_table([64, 64], 2, CPU)
    for slot, value in enumerate((first, second)):
        for source in table.sources:
            source.rows[slot] = value
    assert (digest_of(table, 0) == digest_of(table, 1)) == (first == second)


def test_violation_rows_stay_unused_by_a_seal(triton_backend: Backend, device: torch.device):
    table = make_table([16], 9, device)
    violations = poisoned_violations(2, device)
    triton_backend.seal_slots(
        records=torch.zeros((9, r.RECORD_WORDS), dtype=torch.int64, device=device),
        table=table,
        slots=torch.tensor([9, -1], device=device),
    )
    assert rows_of(violations) == (0, [])
