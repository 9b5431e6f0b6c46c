"""The pool of MXFP8 and its own kernel of scales, in Triton's interpreter: what it stores and moves is followed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from .folding import Folding
from .interleaved import interpreted, mxfp8
from .single import LAYERS, Built


@pytest.fixture
def built() -> Built:
    return mxfp8()


def run(function: partial[None]) -> None:
    module = pytest.importorskip("sglang.kernels.ops.kvcache.mxfp8_interleave_sf")
    interpreted(function, module, "_store_sf_interleaved_kernel")


def store(built: Built, slots: list[int], layer: int = 0) -> None:
    """Random K and V, with random scales through the pool's own setter of them."""
    generator = torch.Generator().manual_seed(layer)
    at, count = torch.tensor(slots), len(slots)
    rows = torch.randint(0, 256, (2, count, 2, 128), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 255, (2, count, 2, 4), generator=generator, dtype=torch.uint8)
    for buffer, row in zip((built.pool.k_buffer[layer], built.pool.v_buffer[layer]), rows, strict=True):
        buffer.view(torch.uint8)[at] = row
    run(partial(built.pool._write_scales, layer, at, *scales.view(torch.float8_e8m0fnu)))


@pytest.mark.parametrize("slots", [[1], [31, 32], [127, 128, 255], [200, 5, 96, 64, 161]])
def test_what_its_setter_stores_is_in_the_slots_it_was_told(built: Built, slots: list[int]):
    folding = Folding(built)
    before = folding.fold()
    store(built, slots, layer=1)
    table, _ = folding.tables[0]

    assert {slot for _, slot, _ in folding.changed_slots(before, folding.fold())} == set(slots)
    for slot in slots:
        place = torch.tensor([slot])
        held = {
            name
            for source, name in zip(table.sources, table.names, strict=True)
            if source.rows[source.place(place)].any()
        }
        assert held == {(1, half) for half in ("K", "K scale", "V", "V scale")}


def test_what_it_stores_is_where_its_reader_looks(built: Built):
    slots = torch.tensor([3, 40, 100, 130, 254])
    store(built, slots.tolist())
    table, _ = Folding(built).tables[0]
    for half, buffer in (("K scale", built.pool.k_scale_buffer[0]), ("V scale", built.pool.v_scale_buffer[0])):
        pieces = [
            source.rows[source.place(slots)]
            for source, name in zip(table.sources, table.names, strict=True)
            if name == (0, half)
        ]
        expected = built.pool._read_sf_interleaved(buffer, slots).view(torch.uint8)

        assert torch.equal(torch.stack(pieces, 1), expected)
        assert expected.unique().numel() > 4


def test_a_slot_that_it_moves_keeps_its_digest(built: Built):
    pool, stored = built.pool, torch.tensor([5, 37, 69, 130])
    for layer in range(LAYERS):
        store(built, stored.tolist(), layer)
    target = torch.tensor([101, 200, 255, 64])
    folding = Folding(built)
    (before,) = folding.fold()
    run(partial(pool.move_kv_cache, target, stored))
    (after,) = folding.fold()
    changed = np.flatnonzero((after != before).any(0))

    assert changed.tolist() == sorted(target.tolist())
    assert np.array_equal(after[:, target], before[:, stored])
    assert len(np.unique(after[0, target])) == len(target)


def test_a_move_that_leaves_the_scales_behind_changes_the_digest(built: Built):
    pool = built.pool
    store(built, [5])
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[70] = buffer[5]
    ((digests, _),) = Folding(built).fold()

    assert digests[70] != digests[5]
