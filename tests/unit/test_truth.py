from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_plugin.errors import GuardError
from kvcanary_plugin.runtime.truth import TruthTable, true_chains

ROWS = 8


@dataclass(eq=False)
class Request:
    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    extra_key: str | None = None
    retraction_count: int = 0


def expected_chain(table: TruthTable, request: Request, length: int) -> int:
    anchor = table.anchor_of(request)
    return int(true_chains(request, anchor, length)[-1]) if length else anchor


def check(table: TruthTable, requests: list[Request], rows: list[int], lengths: list[int]) -> list[int]:
    truth = table.advance(requests, rows, lengths)
    assert truth.rows.tolist() == rows
    assert truth.lengths.tolist() == lengths
    assert truth.anchors.tolist() == [table.anchor_of(request) for request in requests]
    assert truth.chains.tolist() == [expected_chain(table, *pair) for pair in zip(requests, lengths, strict=True)]
    return truth.started


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_schedule_gives_the_direct_sum(data: st.DataObject):
    """Requests come, decode together, leave, are retracted, and come back to the same or another row."""
    table = TruthTable(ROWS, (("model", "m"),))
    running: dict[int, tuple[Request, int]] = {}
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(
            st.sampled_from(["decode", "decode", "decode", "start", "leave", "retract", "some", "several"])
        )
        free = [row for row in range(1, ROWS) if row not in running]
        if action == "start" and free:
            prompt = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
            request = Request(f"r{number}", prompt, extra_key=data.draw(st.sampled_from([None, "a"])))
            have = data.draw(st.integers(0, len(prompt) - 1))
            row = data.draw(st.sampled_from(free))
            assert check(table, [request], [row], [have]) == [0]
            running[row] = (request, len(prompt))
        elif running and action == "leave":
            del running[data.draw(st.sampled_from(sorted(running)))]
        elif running and action == "retract":
            row = data.draw(st.sampled_from(sorted(running)))
            request, _ = running.pop(row)
            request.retraction_count += 1
            back = data.draw(st.sampled_from([*free, row]))
            total = len(request.origin_input_ids) + len(request.output_ids)
            have = data.draw(st.integers(0, total - 1))
            assert check(table, [request], [back], [have]) == [0]
            running[back] = (request, total)
        elif running and action == "several":  # as where drafts are accepted
            rows = sorted(running)
            for row in rows:
                request, _ = running[row]
                request.output_ids += data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))
                running[row] = request, max(running[row][1], len(request.origin_input_ids) + len(request.output_ids))
            assert not check(table, [running[r][0] for r in rows], rows, [running[r][1] for r in rows])
        elif running:
            rows = sorted(running)
            if action == "some":
                rows = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
            for row in rows:
                running[row][0].output_ids.append(data.draw(st.integers(0, 2**31 - 1)))
            assert not check(table, [running[r][0] for r in rows], rows, [running[r][1] for r in rows])
            running |= {row: (running[row][0], running[row][1] + 1) for row in rows}


def test_a_batch_that_decodes_together_is_not_looked_up_again():
    table = TruthTable(4, ())
    requests = [Request("a", [5, 6]), Request("b", [7])]
    check(table, requests, [1, 2], [2, 1])
    table._owners.clear()  # would fail if rows were looked up
    for step in range(3):
        for request in requests:
            request.output_ids.append(step)
        check(table, requests, [1, 2], [3 + step, 2 + step])


def test_a_token_the_scheduler_does_not_know_names_the_request():
    table = TruthTable(4, ())
    requests = [Request("a", [5, 6], [1]), Request("b", [7])]
    table.advance(requests, [1, 2], [2, 1])
    with pytest.raises(GuardError, match="request 'b' is to read position 1 but the scheduler knows 1 tokens"):
        table.advance(requests, [1, 2], [3, 2])


def test_several_tokens_the_scheduler_does_not_know_name_the_request():
    table = TruthTable(4, ())
    requests = [Request("a", [5, 6], [1, 2, 3]), Request("b", [7], [4])]
    table.advance(requests, [1, 2], [2, 1])
    with pytest.raises(GuardError, match="request 'b' is to read 3 tokens but the scheduler knows 2"):
        table.advance(requests, [1, 2], [5, 3])


def test_token_ids_beyond_32_bits_do_not_reach_the_position():
    table = TruthTable(4, ())
    request = Request("a", [1], [2**33 + 5])
    table.advance([request], [1], [1])
    check(table, [request], [1], [2])
    assert np.dtype(np.uint64) == table.advance([request], [1], [1]).chains.dtype
