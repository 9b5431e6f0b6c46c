from __future__ import annotations

import pytest
import torch
from kernel_cases import poisoned_violations

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.runtime.batch import BatchBuffers, HostFields
from kvcanary_plugin.runtime.order import Order

FAR = 2**40
CASES = [
    ([5, 6], [5, 6]),
    ([5, 6], [6, 6]),
    ([5, 6], [5, 7]),
    ([5, 6], [6, 7]),
    ([FAR + 5, FAR + 9], [FAR + 5, FAR + 6]),  # the scheduler may be ahead
    ([FAR, -1, 0, 3, 4, 5, 6, 7], [FAR + 1, 0, 0, 2, 5, 5, 7, 7]),
    ([0], [1]),
]


def check(backend: Backend, device: torch.device, tickets: list[int], due: list[int], capacity: int = 24):
    violations = poisoned_violations(capacity, device)
    backend.check_order(
        tickets=torch.tensor(tickets, device=device), due=torch.tensor(due, device=device), violations=violations
    )
    return violations


@pytest.mark.parametrize(("tickets", "due"), CASES)
@pytest.mark.parametrize("capacity", [24, 1])
def test_equals_the_reference(
    triton_backend: Backend, device: torch.device, tickets: list[int], due: list[int], capacity: int
):
    found = check(triton_backend, device, tickets, due, capacity)
    expected = check(REFERENCE, device, tickets, due, capacity)
    count = int(expected.count)
    assert torch.equal(found.count, expected.count)
    kept = min(count, capacity)
    if count <= capacity:
        by_kind = found.rows[:kept][found.rows[:kept, r.ROW_KIND].argsort()]
        assert torch.equal(by_kind, expected.rows[:kept])


@pytest.mark.parametrize(("tickets", "due"), CASES)
def test_exactly_the_tickets_that_are_behind_are_named(tickets: list[int], due: list[int]):
    violations = check(REFERENCE, torch.device("cpu"), tickets, due)
    late = [index for index, (has, needs) in enumerate(zip(tickets, due, strict=True)) if has < needs]
    rows = violations.rows[: int(violations.count)]
    assert rows[:, r.ROW_KIND].tolist() == [r.Kind.UNORDERED_FORWARD + index for index in late]
    assert rows[:, r.ROW_CHAIN].tolist() == [due[index] for index in late]
    assert rows[:, r.ROW_DIGEST].tolist() == [tickets[index] for index in late]


class Forwards:
    """What a guard and its streams do with the tickets."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.order = Order(backend, device)
        self.device = device
        self.violations = poisoned_violations(8, device)
        self.batch = BatchBuffers(device).batch_of(1, 1)
        words = torch.zeros(self.batch.fields.block.shape[0], dtype=torch.int64)
        self.host = HostFields(words.pin_memory() if device.type == "cuda" else words)

    def launch(self, step: int) -> None:
        self.host.header[r.Header.STEP] = step
        self.order.demand(self.host, step)
        self.order.note_batch(step)

    def run(self, step: int, *, waits: bool = True) -> None:
        """``waits``: the host may write its fields again, which a step of a server never does to those under way."""
        self.batch.fields.block.copy_(self.host.block, non_blocking=not waits)
        self.order.check(self.batch, self.violations)
        self.order.note_forward(self.batch)
        self.order.note_concluded(step)

    @property
    def found(self) -> list[str]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        rows = self.violations.rows[: int(self.violations.count)]
        return sorted(r.Kind(kind).name for kind in rows[:, r.ROW_KIND].tolist())


def test_forwards_one_behind_the_other_are_silent_and_one_that_is_not_is_named(
    triton_backend: Backend, device: torch.device
):
    forwards = Forwards(triton_backend, device)
    for step in (1, 2, 3):
        forwards.launch(step)
        forwards.run(step)
    assert forwards.found == []
    forwards.launch(4)
    forwards.order.note_concluded(9)  # the host has enqueued forwards that the device has not come to
    forwards.launch(10)
    forwards.order.tickets[1] = 8
    forwards.run(10)
    assert forwards.found == ["UNORDERED_BATCH", "UNORDERED_FORWARD"]


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False])
def test_on_two_streams_only_the_missing_wait_is_found(triton_backend: Backend, waits: bool):
    """The scheduler's stream is late: harmless with the wait, and found without it."""
    device = torch.device("cuda")
    forwards = Forwards(triton_backend, device)
    scheduler, forward = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for step in range(1, 5):
        with torch.cuda.stream(scheduler):
            torch.cuda._sleep(20_000_000)
            forwards.launch(step)
        if waits:
            forward.wait_stream(scheduler)
        with torch.cuda.stream(forward):
            forwards.run(step)
        if not waits:
            break  # the next one would find the first one's ticket missing, too
    assert forwards.found == ([] if waits else ["UNORDERED_BATCH"])


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False])
def test_a_forward_on_a_stream_of_its_own_is_found(triton_backend: Backend, waits: bool):
    device = torch.device("cuda")
    forwards = Forwards(triton_backend, device)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    # The first one's are still being read when the second is launched. Made now, since that waits for the device.
    host, batch = HostFields(torch.zeros_like(forwards.host.block).pin_memory()), BatchBuffers(device).batch_of(1, 1)
    torch.cuda.synchronize()
    forwards.launch(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)
        forwards.run(1, waits=False)
    forwards.host, forwards.batch = host, batch
    forwards.launch(2)
    torch.cuda.current_stream().synchronize()
    if waits:
        second.wait_stream(first)
    with torch.cuda.stream(second):
        forwards.run(2)
    assert forwards.found == ([] if waits else ["UNORDERED_FORWARD"])
