"""The ledger on numpy and Triton equals the torch reference, bit for bit: words, seats, and what is reported."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conftest import INTERPRETED
from kernel_cases import make_offsets, poisoned_violations, random_words, rows_of

from kvcanary_plugin.kernels import ledger as g
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import NUMPY, REFERENCE, Backend, load_triton

# The interpreter turns one-element arrays into Python numbers in a way that numpy is about to forbid.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")

ROWS, CONTEXT = 9, 150
SIZES = [1, 2, 31, 32, 33, 255, 257, 700]
ALL = tuple(g.State)
GARBAGE = [-1, 0, 3, 10**6, 2**31 + 7, 2**62, -(2**63)]


@dataclass
class Target:
    """A backend and where it runs."""

    backend: Backend
    device: torch.device


CPU = torch.device("cpu")
REFERENCES = Target(REFERENCE, CPU)


@pytest.fixture(params=["numpy", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "numpy":
        return Target(NUMPY, CPU)
    if (request.param == "interpreter") is not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 runs the kernels without a GPU")
    return Target(load_triton(), torch.device("cuda") if request.param == "cuda" else CPU)


@dataclass
class Ledger:
    """A ledger in any state, sound or not, and rows that name some of its slots."""

    words: torch.Tensor
    seats: torch.Tensor
    records: torch.Tensor
    writers: torch.Tensor
    req_to_token: torch.Tensor
    first_slot: int

    def copy_to(self, device: torch.device) -> Ledger:
        tensors = (self.words, self.seats, self.records, self.writers, self.req_to_token)
        return Ledger(*(tensor.to(device, copy=True) for tensor in tensors), self.first_slot)


def make_ledger(slot_count: int, *, seed: int, page_size: int = 1, states: tuple[g.State, ...] = ALL) -> Ledger:
    generator = torch.Generator().manual_seed(seed)

    def pick(least: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, most, shape, generator=generator)

    serials, rows = pick(1, 6, slot_count), pick(1, ROWS + 3, slot_count)
    owners = serials << g.SERIAL_SHIFT | rows << g.ROW_SHIFT
    owners[pick(0, 5, slot_count) == 0] = 0
    flags = pick(0, 1 << g.STAMP_BITS, slot_count) << g.STAMP_SHIFT
    for flag in (g.IN_FLIGHT, g.CONTESTED, g.TRIMMED, g.AIMED):
        flags |= torch.where(pick(0, 8, slot_count) == 0, flag, 0)
    words = owners | flags | torch.tensor([int(state) for state in states])[pick(0, len(states), slot_count)]
    words[pick(0, 4, slot_count) == 0] = g.UNCLAIMED
    words[0] = 0
    seats = torch.zeros(ROWS, dtype=torch.int64)
    seats[1:] = pick(1, 6, ROWS - 1) << g.SERIAL_SHIFT | torch.arange(1, ROWS) << g.ROW_SHIFT
    positions = pick(0, CONTEXT + 9, slot_count)
    records = random_words(slot_count, r.RECORD_WORDS, device=torch.device("cpu"), seed=seed)
    records[:, r.IDENTITY] = positions << 32 | pick(0, 2**31, slot_count)
    req_to_token = pick(0, slot_count, ROWS, CONTEXT).int()
    for slot in range(1, slot_count, 2):  # every other slot is where its owner's row says
        row = g.row_of(int(words[slot]))
        if 0 < row < ROWS and positions[slot] < CONTEXT:
            req_to_token[row, positions[slot]] = slot
            seats[row] = words[slot] & g.OWNER_MASK
    writers = random_words(slot_count, device=torch.device("cpu"), seed=seed + 1)
    return Ledger(words, seats, records, writers, req_to_token, page_size)


def apply(target: Target, ledger: Ledger, op: g.Op, slots: torch.Tensor, *, page_size: int = 1, **more):
    ledger, found = ledger.copy_to(target.device), poisoned_violations(4096, target.device)
    target.backend.apply_delta(
        op=op,
        slots=slots.to(target.device),
        words=ledger.words,
        seats=ledger.seats,
        records=ledger.records,
        writers=ledger.writers,
        req_to_token=ledger.req_to_token,
        page_size=page_size,
        first_slot=ledger.first_slot,
        violations=found,
        **{"actor": 0, **more},
    )
    return ledger.words.cpu(), ledger.seats.cpu(), rows_of(found)


def claim(target: Target, ledger: Ledger, slots: torch.Tensor, lengths: list[int], **more):
    ledger, found = ledger.copy_to(target.device), poisoned_violations(4096, target.device)
    index = torch.arange(1, len(lengths) + 1)
    rows = more.pop("rows", index)
    target.backend.claim_writes(
        words=ledger.words,
        seats=ledger.seats,
        writers=ledger.writers,
        slots=slots.to(target.device),
        owners=(index << g.SERIAL_SHIFT | index << g.ROW_SHIFT).to(target.device),
        rows=rows.to(target.device),
        prefix_lens=(index * 5).to(target.device),
        offsets=make_offsets(lengths, target.device),
        first_slot=ledger.first_slot,
        violations=found,
        **{"step": 1000, **more},
    )
    return ledger.words.cpu(), ledger.seats.cpu(), rows_of(found)


def read(target: Target, ledger: Ledger, lengths: list[int], **more):
    ledger, found = ledger.copy_to(target.device), poisoned_violations(4096, target.device)
    index = torch.arange(1, len(lengths) + 1)
    rows = more.pop("rows", index)
    target.backend.check_reads(
        words=ledger.words,
        writers=ledger.writers,
        req_to_token=ledger.req_to_token,
        owners=(index << g.SERIAL_SHIFT | index << g.ROW_SHIFT).to(target.device),
        rows=rows.to(target.device),
        offsets=make_offsets(lengths, target.device),
        total=sum(lengths),
        first_slot=ledger.first_slot,
        violations=found,
        **{"window": 0, "may_share": False, **more},
    )
    return (rows_of(found),)


def assert_same(one: tuple, other: tuple) -> None:
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.mark.parametrize("op", list(g.Op), ids=lambda op: op.name)
@pytest.mark.parametrize("size", SIZES)
def test_deltas_on_a_ledger_in_any_state(target: Target, op: g.Op, size: int):
    ledger = make_ledger(size + 40, seed=size, page_size=4)
    generator = torch.Generator().manual_seed(size)
    slots = torch.randint(0, size + 40, (size,), generator=generator)  # with repetitions
    for index, slot in enumerate(GARBAGE[: size // 8]):
        slots[index * 3] = slot
    actor = 3 << g.SERIAL_SHIFT | 2 << g.ROW_SHIFT
    for by in (0, g.TREE, actor):
        expected = apply(REFERENCES, ledger, op, slots, actor=by, page_size=4)
        assert_same(apply(target, ledger, op, slots, actor=by, page_size=4), expected)
    if size > 100 and op in (g.Op.ALLOC, g.Op.FREE, g.Op.INSERT):
        assert expected[2][0] > 0


@pytest.mark.parametrize("size", SIZES)
def test_a_sound_life(target: Target, size: int):
    """Given out, stored to, inserted, evicted: nothing to report, and every backend agrees at each station."""
    ledger = make_ledger(size + 2, seed=size, states=(g.State.FREE,))
    ledger.words.zero_()
    slots = torch.randperm(size + 1)[:size] + 1
    owner = 1 << g.SERIAL_SHIFT | 1 << g.ROW_SHIFT
    for one in (REFERENCES, target):
        state = ledger.copy_to(CPU)
        state.words, _, found = apply(one, state, g.Op.ALLOC, slots)
        assert found == (0, [])
        assert (state.words[slots] == g.UNCLAIMED).all()
        state.words, state.seats, found = claim(one, state, slots, [size])
        assert found == (0, [])
        assert ((state.words[slots] & g.OWNER_MASK) == owner).all()
        assert int(state.seats[1]) == owner
        state.words, _, found = apply(one, state, g.Op.INSERT, slots, actor=owner)
        assert found == (0, [])
        assert ((state.words[slots] & g.STATE_MASK) == g.State.CACHED).all()
        state.words, _, found = apply(one, state, g.Op.FREE, slots, actor=g.TREE)
        assert found == (0, [])
        assert (state.words[slots] == owner).all()
        assert not state.words[0]


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [3, 0, 70, 1], [257], [0, 0, 33], [1] * 8], ids=str)
def test_writes_to_a_ledger_in_any_state(target: Target, lengths: list[int]):
    total = sum(lengths)
    for seed in range(4):
        ledger = make_ledger(max(total // 2, 4) + 9, seed=seed)
        slots = torch.randint(0, len(ledger.words), (total,), generator=torch.Generator().manual_seed(seed))
        if target.device.type != "cpu":  # which of two tokens comes first is the same only where they run in order
            slots = torch.randperm(len(ledger.words) + total)[:total]
        if total > 8:
            slots[2], slots[5] = -1, len(ledger.words)
        assert_same(claim(target, ledger, slots, lengths), claim(REFERENCES, ledger, slots, lengths))


def test_writes_by_rows_that_do_not_exist(target: Target):
    ledger = make_ledger(40, seed=1, states=(g.State.OWNED,))
    ledger.words[1:] = g.UNCLAIMED
    rows = torch.tensor([-1, 2**40, 0, 3])
    expected = claim(REFERENCES, ledger, torch.arange(1, 9), [2, 2, 2, 2], rows=rows)
    assert_same(claim(target, ledger, torch.arange(1, 9), [2, 2, 2, 2], rows=rows), expected)
    assert int((expected[1] != ledger.seats).sum()) == 1


@pytest.mark.parametrize("lengths", [[1], [5, 0, 120, 31], [150, 150], [0, 33]], ids=str)
@pytest.mark.parametrize(("window", "may_share"), [(0, False), (0, True), (7, False)])
def test_reads_of_a_ledger_in_any_state(target: Target, lengths: list[int], window: int, may_share: bool):
    for seed in range(3):
        ledger = make_ledger(300, seed=seed)
        ledger.req_to_token[1:, ::17] = torch.tensor([[-1, 0, 3, 10**6, 2**31 - 1, -(2**31), 299, 300]]).T.int()
        more = {"window": window, "may_share": may_share}
        expected = read(REFERENCES, ledger, lengths, **more)
        assert_same(read(target, ledger, lengths, **more), expected)
        if max(lengths) > 30:
            assert expected[0][0] > 0


def test_reads_past_a_row_and_of_rows_that_do_not_exist(target: Target):
    ledger = make_ledger(300, seed=0)
    rows = torch.tensor([-1, 1, 2**40, 0])
    lengths = [5, CONTEXT + 40, 9, 3]
    expected = read(REFERENCES, ledger, lengths, rows=rows)
    assert_same(read(target, ledger, lengths, rows=rows), expected)
    assert {row[r.ROW_REQUEST] for row in expected[0][1]} == {1}


def test_what_a_request_may_read(target: Target):
    owner = 1 << g.SERIAL_SHIFT | 1 << g.ROW_SHIFT
    other = 2 << g.SERIAL_SHIFT | 2 << g.ROW_SHIFT
    ledger = make_ledger(20, seed=0)
    words = [owner | 1, other | 2, other | 2 | g.IN_FLIGHT, g.UNCLAIMED, owner | 3, owner | 1 | 33 << g.STAMP_SHIFT]
    ledger.words[1:7] = torch.tensor(words)
    ledger.req_to_token[1, :6] = torch.arange(1, 7)
    for one in (REFERENCES, target):
        assert read(one, ledger, [6]) == ((0, []),)
    ledger.words[7:11] = torch.tensor([other | 1, owner, other | 3, owner | 1 | g.TRIMMED])
    ledger.req_to_token[1, 6:10] = torch.arange(7, 11)
    for one in (REFERENCES, target):
        ((count, rows),) = read(one, ledger, [10], window=2)
        assert [row[:4] for row in rows] == [
            [r.Kind.FOREIGN_SLOT, 0, 6, 7],
            [r.Kind.FREED_SLOT, 0, 7, 8],
            [r.Kind.QUARANTINED_SLOT, 0, 8, 9],
            [r.Kind.TRIMMED_SLOT, 0, 9, 10],
        ]
        assert count == 4


def test_the_step_may_lie_on_the_device_and_tokens_may_be_padding(device: torch.device):
    triton = Target(load_triton(), device)
    ledger = make_ledger(40, seed=1, states=(g.State.FREE,))
    ledger.words[1:] = g.UNCLAIMED
    slots = torch.arange(1, 9)
    padded = torch.cat([slots, torch.full((8,), -1)])
    expected = claim(REFERENCES, ledger, slots, [1, 7])
    assert_same(claim(triton, ledger, padded, [1, 7], step=torch.tensor([1000], device=device)), expected)


@pytest.mark.parametrize("block", [1, 16, 128])
def test_every_split_gives_the_same(device: torch.device, block: int):
    triton = Target(load_triton(), device)
    ledger = make_ledger(300, seed=5)
    slots = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(5))
    for op in g.Op:
        assert_same(
            apply(triton, ledger, op, slots, page_size=4, block=block),
            apply(REFERENCES, ledger, op, slots, page_size=4),
        )
    lengths = [70, 1, 0, 129]
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(5))[:200]
    assert_same(
        claim(triton, ledger, slots, lengths, block=block),
        claim(REFERENCES, ledger, slots, lengths),
    )
    assert_same(read(triton, ledger, lengths, block=block), read(REFERENCES, ledger, lengths))
