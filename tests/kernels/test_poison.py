from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import make_table, poisoned_violations, random_words, rows_of

from kvcanary_plugin.faults.library import bytes_of
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import NUMPY, REFERENCE, Backend
from kvcanary_plugin.kernels.poison_reference import FIRST, LAST, edges_of, find_survivors, poison_words

CPU = torch.device("cpu")
SLOTS = 96
TABLES = {
    "rows": {"widths": [64, 64, 8, 2048]},
    "ugly widths": {"widths": [584, 24, 13, 7, 1, 9], "apart": 3},
    "pages": {"widths": [132, 64], "page_size": 16, "apart": 8},
    "odd pages": {"widths": [21, 40], "page_size": 4, "apart": 1},
    "groups": {"widths": [16, 24, 4], "page_size": 32, "groups": 4, "apart": 8},
    "odd groups": {"widths": [21, 9], "page_size": 12, "groups": 4, "apart": 1},
}
CHOSEN_SLOTS = [1, 95, 17, 18, 40]


def make(name: str, device: torch.device):
    options = dict(TABLES[name])
    return make_table(options.pop("widths"), SLOTS, device, seed=5, **options)


def poison(backend: Backend, name: str, device: torch.device, slots: list[int], chosen: list[int] | None = None):
    table = make(name, device)
    wanted = torch.tensor(chosen or [1] * len(table.sources), device=device)
    backend.poison_slots(table=table, slots=torch.tensor(slots, dtype=torch.int64, device=device), chosen=wanted)
    return table


def assert_equal_bytes(found, expected):
    for mine, reference in zip(found.sources, expected.sources, strict=True):
        assert torch.equal(mine.rows, reference.rows)


@pytest.mark.parametrize("name", TABLES)
def test_triton_equals_the_reference(triton_backend: Backend, device: torch.device, name: str):
    slots = [*CHOSEN_SLOTS, -1, SLOTS, 2**40, -(2**63)]
    assert_equal_bytes(poison(triton_backend, name, device, slots), poison(REFERENCE, name, device, slots))
    assert_equal_bytes(poison(triton_backend, name, device, []), make(name, device))


@pytest.mark.parametrize("name", TABLES)
def test_numpy_equals_the_reference(name: str):
    slots = [*CHOSEN_SLOTS, -1, SLOTS, 2**40]
    assert_equal_bytes(poison(NUMPY, name, CPU, slots), poison(REFERENCE, name, CPU, slots))


@pytest.mark.parametrize("backend", [NUMPY, REFERENCE], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", TABLES)
def test_only_the_edges_of_the_chosen_rows_change(backend: Backend, name: str):
    untouched = make(name, CPU)
    choice = [index % 2 for index in range(len(untouched.sources))]
    table = poison(backend, name, CPU, CHOSEN_SLOTS, choice)
    for index, (source, clean) in enumerate(zip(table.sources, untouched.sources, strict=True)):
        differs = (source.rows != clean.rows).reshape(source.slot_count, -1)
        edges = edges_of(source.read_bytes) if choice[index] else ()
        allowed = {edge * 8 + byte for edge in edges for byte in range(8)}
        slots, places = torch.nonzero(differs, as_tuple=True)
        assert set(slots.tolist()) == (set(CHOSEN_SLOTS) if edges else set())
        assert set(places.tolist()) <= allowed


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**40 - 1), st.integers(0, 4095))
def test_every_word_is_finite_in_every_dtype(slot: int, source: int):
    word = poison_words(torch.tensor([slot]), torch.tensor([source]))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.isfinite(word.view(dtype).to(torch.float64)).all()


def test_words_are_distinct():
    words = poison_words(torch.arange(2000), torch.arange(64)).flatten()
    assert words.unique().numel() == words.numel()


def seal(backend: Backend, device: torch.device, name: str, stored: dict[int, list[int]], expects=None):
    """Poison, store all but the edges in ``stored`` (slot: sources left as they are), then seal and scrub."""
    table = make(name, device)
    ones = torch.ones(len(table.sources), dtype=torch.int64, device=device)
    slots = torch.tensor(CHOSEN_SLOTS, device=device)
    fresh = make(name, device)
    REFERENCE.poison_slots(table=table, slots=slots, chosen=ones)
    for slot in CHOSEN_SLOTS:
        for index, source in enumerate(table.sources):
            if index not in stored.get(slot, []):
                bytes_of(source.rows, slot).copy_(bytes_of(fresh.sources[index].rows, slot))
    records = random_words(SLOTS, r.RECORD_WORDS, device=device, seed=1)
    records[:, r.IDENTITY] &= ~r.LIVE_BIT
    writers = random_words(SLOTS, device=device, seed=2)
    violations = poisoned_violations(64, device)
    backend.seal_and_scrub(
        records=records,
        writers=writers,
        table=table,
        slots=torch.tensor([*CHOSEN_SLOTS, -1, -1], device=device),
        start=1,
        count=SLOTS - 1,
        step=7,
        violations=violations,
        expects=ones if expects is None else torch.tensor(expects, device=device),
    )
    return records, rows_of(violations)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("missing", [{}, {17: [0]}, {17: [0, 1], 95: [1], 40: [0]}, {1: [0, 1], 18: [1]}])
def test_triton_finds_what_the_reference_finds(triton_backend: Backend, device: torch.device, name: str, missing):
    found, expected = seal(triton_backend, device, name, missing), seal(REFERENCE, device, name, missing)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize("backend", [NUMPY, REFERENCE], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", TABLES)
def test_a_row_that_was_not_stored_is_named(backend: Backend, name: str):
    records, (count, rows) = seal(backend, CPU, name, {17: [1]})
    assert count == 1
    (row,) = rows
    assert row[r.ROW_KIND] == r.Kind.NOT_STORED
    assert (row[r.ROW_SLOT], row[r.ROW_SOURCE], row[r.ROW_REQUEST]) == (17, 1, -1)
    edges = edges_of(TABLES[name]["widths"][1])
    assert row[r.ROW_EDGES] == (FIRST | LAST if len(edges) == 2 else FIRST)
    assert row[r.ROW_IDENTITY] == int(records[17, r.IDENTITY])


@pytest.mark.parametrize("backend", [NUMPY, REFERENCE], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", TABLES)
def test_rows_that_were_stored_are_silent(backend: Backend, name: str):
    assert seal(backend, CPU, name, {})[1] == (0, [])


@pytest.mark.parametrize("backend", [NUMPY, REFERENCE], ids=["numpy", "torch"])
def test_a_source_that_is_not_expected_is_silent(backend: Backend):
    assert seal(backend, CPU, "rows", {17: [1]}, expects=[1, 0, 1, 1])[1] == (0, [])


def test_a_row_stored_in_part_names_the_edge_that_was_not():
    table = make("rows", CPU)
    REFERENCE.poison_slots(table=table, slots=torch.tensor([5]), chosen=torch.ones(4, dtype=torch.int64))
    table.sources[0].rows[5, 0, :32] = 1
    table.sources[1].rows[5, 0, 32:] = 1
    survivors = find_survivors(table, torch.tensor([5]))
    assert survivors[:, 0].tolist() == [LAST, FIRST, FIRST, FIRST | LAST]


def test_rows_below_eight_bytes_have_no_edge():
    assert edges_of(7) == ()
    assert edges_of(8) == (0,)
    assert edges_of(15) == (0,)
    assert edges_of(584) == (0, 72)
