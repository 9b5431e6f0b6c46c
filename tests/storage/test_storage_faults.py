"""Each named fault of the storage tier is found when a page is read; without it the same pages are right."""

import pytest
from stores import Damages, blank, key, open_store, page, same

from kvcanary_plugin.faults.storage import STORAGE_FAULTS, Target

COUNT = 3
KEYS = [key(number) for number in range(COUNT)]
IDENTITY = {"key", "generation", "free", "writing"}


def run(folder, program):
    """Store pages, read others, store the pages again, and read them. Returns pages, verdicts and damages."""
    damages = Damages()
    target = Target(
        open_store(folder, damages=damages),
        KEYS,
        folder / "pages.index",
        lambda: open_store(folder, damages=damages),
    )
    target.store.set(KEYS, [page(number) for number in range(COUNT)])
    steps = program(target) if program else iter((None,))
    next(steps)
    target.store.evict(KEYS)
    target.store.set([key(9)], [page(9)])  # takes a slot that the pages had
    assert all(target.store.set(KEYS, [page(number, version=1) for number in range(COUNT)]))
    next(steps, None)
    others, targets = [blank() for _ in KEYS], [blank() for _ in KEYS]
    target.store.get([*KEYS[1:], KEYS[0]], others)
    verdicts = target.store.get(KEYS, targets)
    target.store.close()
    return targets, verdicts, damages


@pytest.mark.parametrize("name", STORAGE_FAULTS)
def test_a_fault_is_found_and_nothing_wrong_is_served(tmp_path, name):
    program, kinds = STORAGE_FAULTS[name]
    targets, verdicts, damages = run(tmp_path, program)
    for number, (got, verdict) in enumerate(zip(targets, verdicts, strict=True)):
        assert not verdict.ok or same(got, page(number, version=1)), f"page {number} is wrong and called good"
    assert set(damages.reasons) <= kinds
    assert bool(damages) == bool(kinds), damages.reasons
    if kinds:
        assert not all(verdict.ok for verdict in verdicts)
    else:
        assert all(verdict.ok for verdict in verdicts)


def test_without_a_fault_all_pages_are_right(tmp_path):
    targets, verdicts, damages = run(tmp_path, None)
    assert all(verdict.ok for verdict in verdicts)
    assert all(same(got, page(number, version=1)) for number, got in enumerate(targets))
    assert not damages


def test_each_fault_says_what_it_does():
    for name, (program, kinds) in STORAGE_FAULTS.items():
        assert program.__doc__, name
        assert kinds <= {"digest", "hole", "short"} | IDENTITY, name
