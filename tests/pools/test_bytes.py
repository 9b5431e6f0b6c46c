"""Every byte that belongs to a slot belongs to exactly one source of that slot, and no other byte to any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from .cases import CASES, Built, Case
from .folding import Folding, Place

Byte = tuple[int, int]  # storage and offset


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def find_owners(folding: Folding, case: Case, built: Built) -> dict[Byte, frozenset[Place]]:
    """Whose each byte is, according to what the pool itself stores there; the storages are zero afterwards."""
    owners: dict[Byte, frozenset[Place]] = {}
    arrays = [storage.numpy() for storage in folding.storages]
    for array in arrays:
        array[:] = 0
    for write in case.writes(built):
        write.run()
        places = frozenset((write.space, write.slot, write.layer, half) for half in write.halves)
        for index, array in enumerate(arrays):
            stored = np.flatnonzero(array)
            array[stored] = 0
            for at in stored.tolist():
                known = owners.get((index, at))
                owners[index, at] = places if known is None else known | places
    return owners


def group(owners: dict[Byte, frozenset[Place]], alone: bool) -> Iterator[list[Byte]]:
    """Bytes that are flipped together: one, or one of every slot."""
    if alone:
        yield from ([byte] for byte in owners)
        return
    of_slot: dict[tuple[str, int], list[Byte]] = defaultdict(list)
    for byte, places in owners.items():
        of_slot[next(iter(places))[:2]].append(byte)
    for turn in range(max(map(len, of_slot.values()))):
        yield [bytes_[turn] for bytes_ in of_slot.values() if turn < len(bytes_)]


def test_a_flip_is_reported_where_it_is(case: Case):
    built = case.build()
    folding = Folding(built, states=case.states)
    owners = find_owners(folding, case, built)
    before = folding.fold()
    random = np.random.default_rng(0)
    arrays = [storage.numpy() for storage in folding.storages]
    assert owners, "the pool stored nothing"
    assert all(len({place[:3] for place in places}) == 1 for places in owners.values()), "two slots share a byte"
    for bytes_ in group(owners, case.alone):
        for index, at in bytes_:
            arrays[index][at] ^= 1 << int(random.integers(8))
        places = list(folding.changes(before, folding.fold()))
        assert len(places) == len(bytes_), f"{len(bytes_)} flips are reported as {places}"
        flipped = frozenset().union(*(owners[byte] for byte in bytes_))
        for place in places:
            assert place in flipped, f"{place} is reported where nothing was flipped"
        for index, at in bytes_:
            arrays[index][at] = 0


def test_bytes_that_are_no_slots_are_not_reported(case: Case):
    built = case.build()
    folding = Folding(built, states=case.states)
    owners = find_owners(folding, case, built)
    before = folding.fold()
    for index, storage in enumerate(folding.storages):
        storage.fill_(0xFF)
        storage[[at for owner, at in owners if owner == index]] = 0
    changed = any(folding.changed_slots(before, folding.fold()))
    read = sum(source.rows.numel() for table, _ in folding.tables for source in table.sources)

    # DeepSeek V4 fills seven bytes of scales up to eight: the last one is its slot's, though the setter leaves it out.
    assert changed == case.pads
    assert read == len(owners) + (count_pads(folding) if case.pads else 0)


def count_pads(folding: Folding) -> int:
    tables = [table for table, _ in folding.tables]
    named = [(source, half) for table in tables for source, (_, half) in zip(table.sources, table.names, strict=True)]
    return sum(source.slot_count for source, half in named if half == "KV scale")


def test_clean_writes_change_what_they_store_and_nothing_else(case: Case):
    built = case.build()
    folding = Folding(built, states=case.states)
    for storage in folding.storages:
        storage.random_(256)
    for write in list(case.writes(built))[::7]:
        before = folding.fold()
        write.run()
        changed = {(folding.tables[index][1], slot) for index, _, slot in folding.changed_slots(before, folding.fold())}

        assert changed == {(write.space, write.slot)}


def test_every_byte_is_in_at_most_one_source(case: Case):
    folding = Folding(case.build(), states=case.states)
    for storage in folding.storages:
        claims = torch.zeros(len(storage), dtype=torch.int32)
        for table, _ in folding.tables:
            for source in table.sources:
                if source.rows.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr():
                    claims.as_strided(source.rows.shape, source.rows.stride(), source.rows.storage_offset()).add_(1)

        assert claims.max() <= 1
