"""The Triton kernels touch as many elements of memory as there are tokens, times a constant: counted, not timed.

Records of new tokens, whose sums look back, have a test of their own in test_write.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kernel_cases import Batch, make_batch, make_table, poisoned_violations, random_words
from triton.runtime.interpreter import InterpreterBuilder

from kvcanary_plugin.kernels import ledger as g
from kvcanary_plugin.kernels.backend import Backend, load_triton

LENGTHS = (1 << 10, 1 << 11, 1 << 12)
TOUCHING = ("create_masked_load", "create_masked_store", "create_atomic_cas", "create_atomic_rmw")


@contextmanager
def counting_elements() -> Iterator[list[int]]:
    """Elements that interpreted kernels load, store and change within it, in a list of one number."""
    touched = [0]

    def count(method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(builder: InterpreterBuilder, pointers: Any, *arguments: Any) -> Any:
            # The first argument of an atomic addition is what to do.
            touched[0] += (pointers if hasattr(pointers, "data") else arguments[0]).data.size
            return method(builder, pointers, *arguments)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in TOUCHING:
            patch.setattr(InterpreterBuilder, name, count(getattr(InterpreterBuilder, name)))
        yield touched


def verify(backend: Backend, batch: Batch, _: torch.Tensor) -> None:
    assert int(batch.verify(backend, block=64).count) == 0


def claim_and_read(backend: Backend, batch: Batch, slots: torch.Tensor) -> None:
    """Claim every slot for its request, then look at every one as its reader does."""
    device, violations = slots.device, poisoned_violations(8, slots.device)
    words, seats = (torch.full_like(batch.writers, word) for word in (g.UNCLAIMED, 0))
    owners = torch.tensor([g.make_owner(5 + row, row) for row in batch.rows.tolist()], device=device)
    shared = {"words": words, "rows": batch.rows, "owners": owners, "offsets": batch.offsets, "first_slot": 1}
    shared |= {"writers": batch.writers, "violations": violations}
    prefixes = torch.zeros_like(batch.rows)
    backend.claim_writes(slots=slots, seats=seats, prefix_lens=prefixes, step=7, **shared)
    read = {"req_to_token": batch.req_to_token, "total": batch.total, "window": 0, "may_share": False}
    backend.check_reads(**read, **shared)
    assert int(violations.count) == 0


@pytest.mark.parametrize("work", [verify, claim_and_read])
@pytest.mark.parametrize("requests", [1, 8])
def test_what_is_touched_grows_with_the_tokens(
    triton_backend: Backend, device: torch.device, work: Callable[..., None], requests: int
):
    if device.type != "cpu":
        pytest.skip("only interpreted kernels can be watched")
    counts = []
    for length in LENGTHS:
        batch = make_batch([length // requests] * requests, device)
        slots = torch.cat([batch.req_to_token[row, : length // requests].long() for row in batch.rows.tolist()])
        with counting_elements() as touched:
            work(triton_backend, batch, slots)
        counts.append(touched[0])
    few, many, most = counts
    assert few >= LENGTHS[0], "the kernels were watched"
    assert most < 64 * LENGTHS[-1]
    assert (most - many) / (many - few) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("count", [1 << 12, 1 << 13, 1 << 14])
def test_a_slot_is_folded_by_one_program(device: torch.device, monkeypatch: pytest.MonkeyPatch, count: int):
    """Of many slots; each goes once over the sources."""
    programs: list[int] = []
    monkeypatch.setattr(
        "kvcanary_plugin.kernels.fold_triton.launch", lambda _, number, *a, **b: programs.append(number)
    )
    table, records = make_table([16, 16], count + 1, device), random_words(count + 1, 4, device=device, seed=0)
    load_triton().seal_slots(records=records, table=table, slots=torch.arange(1, count + 1, device=device))
    assert programs == [count]
