"""Trees of draft tokens: against the reference, and the reference against a walk over each tree in plain Python."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import poisoned_violations, random_words, rows_of

from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.kernels.mixing import POSITION_SHIFT, as_int64, mix

FIRST_SLOT = 4
SHAPES = [(1, 1), (1, 2), (3, 5), (5, 8), (2, 12), (1, 33), (2, 64), (1, 128)]


def make_trees(bs: int, nodes: int, seed: int = 0):
    """Random trees in which a parent comes before its children: depths, first children, next siblings."""
    generator = torch.Generator().manual_seed(seed)
    depths = torch.zeros((bs, nodes), dtype=torch.int64)
    child, sibling = torch.full((2, bs, nodes), -1, dtype=torch.int64)
    parents = torch.zeros((bs, nodes), dtype=torch.int64)
    for i in range(bs):
        last: dict[int, int] = {}
        for node in range(1, nodes):
            parent = int(torch.randint(max(0, node - 4), node, (1,), generator=generator))
            if parent in last:
                sibling[i, last[parent]] = node
            else:
                child[i, parent] = node
            last[parent], parents[i, node] = node, parent
            depths[i, node] = depths[i, parent] + 1
    return depths, child, sibling, parents


class Case:
    """A batch of trees; ``stamp`` and ``commit`` run one backend on tensors of its own."""

    def __init__(self, bs: int, nodes: int, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        total, self.rows_count = bs * nodes, bs + 3
        slot_count = FIRST_SLOT + total + 5
        self.slots = torch.randperm(total + 5, generator=generator)[:total] + FIRST_SLOT
        self.depths, self.child, self.sibling, self.parents = make_trees(bs, nodes, seed)
        self.rows = torch.randperm(bs + 2, generator=generator)[:bs] + 1
        self.known_lens = torch.randint(1, 2**20, (bs,), generator=generator)
        self.lengths = self.known_lens + torch.arange(bs) % 2 * 3  # every second one is further than the host knows
        self.tokens = torch.randint(-5, 2**31, (total,), generator=generator)
        self.positions = (self.depths + self.lengths[:, None]).view(-1)
        self.accept_lens = torch.randint(1, nodes + 1, (bs,), generator=generator).to(torch.int32)
        self.accepted = torch.randint(0, 2**31 - 1, (total,), generator=generator).to(torch.int32)
        self.fixed = random_words(slot_count, r.RECORD_WORDS, device=torch.device("cpu"), seed=1)
        self.writers = random_words(slot_count, device=torch.device("cpu"), seed=2)
        self.tails = random_words(self.rows_count, device=torch.device("cpu"), seed=3)
        self.chains = random_words(bs, device=torch.device("cpu"), seed=4)
        self.device, self.bs, self.nodes = device, bs, nodes

    def _shared(self, state: dict[str, torch.Tensor]):
        send = {name: getattr(self, name).to(self.device) for name in ("slots", "tokens", "rows")}
        return {**state, **send, "first_slot": FIRST_SLOT}

    def stamp(self, backend: Backend):
        state = {
            "records": self.fixed.clone().to(self.device),
            "writers": self.writers.clone().to(self.device),
            "tails": self.tails.clone().to(self.device),
            "base": torch.zeros((2, self.bs), dtype=torch.int64, device=self.device),
            "violations": poisoned_violations(512, self.device),
        }
        backend.stamp_tree(
            **self._shared(state),
            positions=self.positions.to(self.device),
            known_lens=self.known_lens.to(self.device),
            known_chains=self.chains.to(self.device),
            lengths=self.lengths.to(self.device),
            first_child=self.child.to(self.device),
            next_sibling=self.sibling.to(self.device),
            step=2**33,
        )
        return state

    def commit(self, backend: Backend, state: dict[str, torch.Tensor], *, check: bool = True) -> None:
        backend.commit_path(
            **self._shared(state),
            accept_lens=self.accept_lens.to(self.device),
            accepted=self.accepted.to(self.device),
            check=check,
        )


def same(found, expected) -> None:
    for name in ("records", "writers", "tails", "base"):
        assert torch.equal(found[name].cpu(), expected[name].cpu()), name
    assert rows_of(found["violations"]) == rows_of(expected["violations"])


@pytest.mark.parametrize(("bs", "nodes"), SHAPES)
def test_equals_the_reference(triton_backend: Backend, device: torch.device, bs: int, nodes: int):
    case = Case(bs, nodes, device, seed=bs + nodes)
    case.slots[0], case.rows[-1] = 10**9, -7  # neither may be followed
    found, expected = case.stamp(triton_backend), case.stamp(REFERENCE)
    assert int(expected["violations"].count) == 1
    same(found, expected)
    case.commit(triton_backend, found)
    case.commit(REFERENCE, expected)
    same(found, expected)


def test_links_that_form_no_tree_lead_nowhere(triton_backend: Backend, device: torch.device):
    case = Case(4, 12, device)
    generator = torch.Generator().manual_seed(3)
    case.child, case.sibling = torch.randint(-20, 40, (2, 4, 12), generator=generator)
    same(case.stamp(triton_backend), case.stamp(REFERENCE))


@pytest.mark.parametrize(("bs", "nodes"), SHAPES)
def test_a_chain_follows_the_path_to_its_node(bs: int, nodes: int):
    case = Case(bs, nodes, torch.device("cpu"))
    state = case.stamp(REFERENCE)
    for i in range(bs):
        seed = int(case.chains[i] if case.lengths[i] == case.known_lens[i] else case.tails[case.rows[i]])
        assert state["base"][:, i].tolist() == [seed, int(case.lengths[i])]
        sums: dict[int, int] = {}
        for node in range(nodes):
            place = i * nodes + node
            word = int(case.tokens[place]) & r.TOKEN_MASK | int(case.positions[place]) << POSITION_SHIFT
            above = sums[int(case.parents[i, node])] if node else seed
            sums[node] = as_int64(above + int(mix(torch.tensor(word))) & (1 << 64) - 1)
            record = state["records"][case.slots[place]]
            assert int(record[r.CHAIN]) == sums[node]
            assert int(record[r.IDENTITY]) == word  # not live


def accept(case: Case, state: dict[str, torch.Tensor], depth: int) -> None:
    """Accept a path of up to ``depth`` nodes below the root and move its records to the front, as SGLang does."""
    for i in range(case.bs):
        path = [0]
        while len(path) <= depth and (node := int(case.child[i, path[-1]])) > 0:
            while int(case.sibling[i, node]) > 0:
                node = int(case.sibling[i, node])
            path.append(node)
        base = i * case.nodes
        case.accept_lens[i] = len(path)
        for place, node in enumerate(path[1:]):
            case.accepted[base + place] = int(case.tokens[base + node])
        of = case.slots[[base + node for node in path]]
        state["records"][case.slots[base : base + len(path)]] = state["records"][of].clone()


def test_the_accepted_path_becomes_live_and_all_else_is_not():
    case = Case(5, 8, torch.device("cpu"))
    case.tokens %= 2**31 - 1
    state = case.stamp(REFERENCE)
    accept(case, state, 3)
    assert case.accept_lens.max() > 2
    case.commit(REFERENCE, state)
    assert int(state["violations"].count) == 0
    live = state["records"][case.slots, r.IDENTITY].view(5, 8) & r.LIVE_BIT != 0
    assert torch.equal(live, torch.arange(8) < case.accept_lens[:, None])
    last = case.slots.view(5, 8)[torch.arange(5), case.accept_lens.long() - 1]
    assert torch.equal(state["tails"][case.rows], state["records"][last, r.CHAIN])


@pytest.mark.parametrize("check", [True, False])
def test_a_wrong_record_in_an_accepted_slot_is_told_and_the_tail_stays_true(check: bool):
    cases = [Case(5, 8, torch.device("cpu")) for _ in range(2)]
    states = [case.stamp(REFERENCE) for case in cases]
    for case, state in zip(cases, states, strict=True):
        case.tokens %= 2**31 - 1
        accept(case, state, 3)
    victim = int(cases[0].accept_lens.argmax())
    slot, other = cases[0].slots[victim * 8 + 1], cases[0].slots[victim * 8 + 7]
    states[0]["records"][slot] = states[0]["records"][other]
    for case, state in zip(cases, states, strict=True):
        case.commit(REFERENCE, state, check=check)
    count, rows = rows_of(states[0]["violations"])
    assert count == int(check)
    if check:
        assert rows[0][r.ROW_KIND] == r.Kind.DRAFT_PATH
        assert rows[0][r.ROW_REQUEST] == victim
        assert rows[0][r.ROW_SLOT] == slot
        assert rows[0][r.ROW_POSITION] == int(cases[0].lengths[victim]) + 1
    assert torch.equal(states[0]["tails"], states[1]["tails"])
