"""What is compiled ahead is what forwards then launch. Nothing runs here: the launches are only written down."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
import torch

from kvcanary_plugin.config import CHECKS
from kvcanary_plugin.kernels import launch as launching
from kvcanary_plugin.kernels.backend import load_triton
from kvcanary_plugin.runtime.ahead import DELTAS, FOLDS, Ahead
from kvcanary_plugin.runtime.batch import BatchBuffers
from kvcanary_plugin.runtime.launches import Launches
from tests.engine import Engine

MODULES = ("claim", "drain", "fold", "ledger", "poison", "stage", "verify", "write")
CPU = torch.device("cpu")


class Written:
    """Stands in for ``launch``: which kernel was asked for with which constants, and by which thread."""

    def __init__(self) -> None:
        self.variants: set[tuple[Any, ...]] = set()
        self.threads: set[int] = set()

    def __call__(self, kernel: Any, programs: int, arguments: Any, constants: tuple[Any, ...], **_: Any) -> None:
        dtypes = tuple(argument.dtype for argument in arguments if isinstance(argument, torch.Tensor))
        self.variants.add((kernel.__name__, constants, dtypes))
        self.threads.add(threading.get_ident())

    @property
    def kernels(self) -> set[str]:
        return {name for name, *_ in self.variants}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    written = Written()
    for name in MODULES:
        monkeypatch.setattr(importlib.import_module(f"kvcanary_plugin.kernels.{name}_triton"), "launch", written)
    return written


@pytest.fixture(params=[1, 16], ids=["page1", "page16"])
def guard(request: pytest.FixtureRequest) -> Any:
    """A guard that launches kernels, as one on a device does."""
    guard = Engine(page_size=request.param, checks=CHECKS).guard
    for part in (*guard.spaces, guard.ledger):
        part._backend = load_triton()
    guard.ledger._on_host = False
    return guard


def compile_ahead(guard: Any) -> None:
    ahead = Ahead(Launches(load_triton(), guard.spaces, guard.ledger), guard.spaces, guard.ledger, CPU)
    ahead.start()
    ahead.wait()


def test_whatever_a_forward_launches_was_compiled(guard: Any, written: Written):
    compile_ahead(guard)
    ahead, written.variants = written.variants, set()
    assert threading.get_ident() not in written.threads
    (space,) = guard.spaces
    for size, tokens in ((1, 17), (1, 300), (3, 50), (3, 9000), (20, 5000), (40, 600), (60, 16_000)):
        batch = BatchBuffers(CPU).batch_of(size, tokens)
        space.verify(batch, 1 << 20)
        guard.ledger.check(batch=batch, step=5, owners=batch.fields.owners, total=1 << 20, violations=space.violations)
        space.poison(batch)
        for count in (1, 77, 512, 513, 4095, 4096, 100_000):
            space.record(batch, 5, 1, count)
        space.drain(batch)
        space.check_slots(batch.slots, 0)
    for step in (1, 7, 8, 16, 64, 200, 256, 512, 1024):  # decode steps, as they are recorded
        batch = BatchBuffers(CPU).batch_of(step, step)
        fields = batch.fields
        space.verify(batch, 4096)
        guard.ledger.check(batch=batch, step=fields.step, owners=fields.owners, total=4096, violations=space.violations)
        space.record(batch, fields.step, fields.scrub_starts[0], 300)
    for count in (1, 33, 64, 65, 128, 129, 256, 5000):
        guard.ledger.note_alloc(torch.arange(count))
        guard.ledger.note_insert(torch.arange(count))
        guard.ledger.note_free(torch.arange(count))
    guard.ledger._on_host = True  # there are no streams
    guard.ledger.apply(5, space.violations)
    assert {
        "_fold",
        "_write_chain",
        "_verify_prefixes",
        "_claim_writes",
        "_check_reads",
        "_apply_delta",
        "_poison",
    } <= (written.kernels)
    assert written.variants - ahead == set()


def test_the_thread_asks_the_device_for_no_memory(guard: Any, written: Written, monkeypatch: pytest.MonkeyPatch):
    """While graphs are recorded, that would spoil them."""
    made: list[str] = []
    main = threading.get_ident()
    for name in ("zeros", "empty", "tensor", "arange", "full"):
        real = getattr(torch, name)

        def watched(*args: Any, real: Any = real, name: str = name, **options: Any) -> torch.Tensor:
            if threading.get_ident() != main:
                made.append(name)
            return real(*args, **options)

        monkeypatch.setattr(torch, name, watched)
    compile_ahead(guard)
    assert written.variants
    assert made == []


def test_only_the_launches_of_that_thread_are_held_back():
    seen = []
    with launching.compiling_only():
        thread = threading.Thread(target=lambda: seen.append(launching.is_compiling_only()))
        thread.start()
        thread.join()
        seen.append(launching.is_compiling_only())
    seen.append(launching.is_compiling_only())
    assert seen == [False, True, False]


def test_sizes_are_ordered():
    assert list(FOLDS) == sorted(FOLDS)
    assert list(DELTAS) == sorted(DELTAS)
