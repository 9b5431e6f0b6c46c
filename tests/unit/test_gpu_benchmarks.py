"""The parts of the GPU benchmarks that compute: statistics, command lines, traces, and what counts as found."""

from __future__ import annotations

import gzip
import json
import math
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "server"))

import arms
import device_time
import engine_worker
import evidence
import gpu_overhead
import overhead_table
import recall
import recall_table
import shapes
import spread

PACKAGE = Path(__file__).parents[2] / "kvcanary_plugin"


def test_interval_is_that_of_student():
    found = spread.spread_of([1.0] * 4, [1.01, 1.02, 1.03, 1.04])

    assert found.mean == pytest.approx(0.025)
    assert found.half_width == pytest.approx(3.182 * 0.0129099 / 2, rel=1e-4)
    assert found.upper == pytest.approx(found.mean + found.half_width)
    assert (found.least, found.most) == (pytest.approx(0.01), pytest.approx(0.04))


def test_one_pair_has_no_interval():
    assert math.isnan(spread.spread_of([1.0], [1.1]).upper)


@pytest.mark.parametrize(("plain", "other"), [([], []), ([1.0], [1.0, 2.0])])
def test_what_are_no_pairs_is_refused(plain, other):
    with pytest.raises(ValueError, match="not pairs"):
        spread.spread_of(plain, other)


def test_t_falls_with_degrees_of_freedom():
    values = [spread.t95(degrees) for degrees in range(1, 120)]

    assert values == sorted(values, reverse=True)
    assert values[8] == 2.262
    assert values[-1] > 1.96


def test_only_rounds_with_both_arms_are_pairs():
    times = {"0": {"off": {"w": 1.0}, "in-tree": {"w": 2.0}}, "1": {"off": {"w": 3.0}}}

    assert overhead_table.pick_pairs(times, "in-tree", "w") == ([1.0], [2.0])


@pytest.mark.parametrize(("overhead", "held"), [(0.002, "yes"), (0.008, "no")])
def test_table_compares_the_upper_end_with_the_bound(overhead, held):
    times = {str(n): {"off": {"prefill": 1.0}, "content": {"prefill": 1 + overhead + n * 1e-4}} for n in range(3)}
    rows = overhead_table.render_overheads(times, ["off", "content"], ["prefill"], {}, {})

    assert len(rows) == 2
    assert f"| 0.5 % | {held} |" in rows[1]
    missed = overhead_table.missed_bounds(times, ["off", "content"], ["prefill"], {})
    assert bool(missed) == (held == "no")


def test_a_pass_that_is_too_slow_is_missed():
    times = {str(n): {"off": {"prefill": 1.0}, "all": {"prefill": 1.0 + n * 1e-5}} for n in range(3)}

    (missed,) = overhead_table.missed_bounds(times, ["off", "all"], ["prefill"], {"all": {"prefill": 43.0}})
    assert "43.0 s" in missed


def test_bound_of_start_and_memory():
    rows = overhead_table.render_starts(
        {
            "off": {"ready_seconds": 40.0, "guard_seconds": None, "bytes_per_slot": None},
            "all": {"ready_seconds": 41.0, "guard_seconds": 1.5, "bytes_per_slot": 65.0},
        }
    )

    assert rows[1] == "| off | 40.0 |  |  |  |  |"
    assert rows[2].endswith("| 1.50 | 65.0 | 3 s, 64 B | no |")


def test_kernels_are_named_by_the_package():
    names = device_time.kernel_names(PACKAGE)

    assert {"_fold", "_verify_prefixes"} <= names
    assert "render_line" not in names


def test_device_time_is_that_of_kernels_and_copies(tmp_path):
    events = [
        {"ph": "X", "cat": "kernel", "name": "_fold", "dur": 5.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 90.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 5.0},
        {"ph": "X", "cat": "cpu_op", "name": "_fold", "dur": 1000.0},
        {"ph": "s", "cat": "kernel", "name": "_fold"},
    ]
    file = tmp_path / "x.trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = device_time.read_trace(file, frozenset({"_fold"}))

    assert (found.total, found.ours, found.count) == (100.0, {"_fold": 5.0}, 3)
    assert found.share == pytest.approx(0.05)


def test_every_arm_gets_the_same_prompts():
    work = {"batch": 3, "prompt": 20, "new": 8, "seed": "0/decode"}
    prompts, params = engine_worker.make_prompts(work, 512)

    assert engine_worker.make_prompts(work, 512) == (prompts, params)
    assert [len(prompt) for prompt in prompts] == [20, 20, 20]
    assert all(10 <= token < 512 for prompt in prompts for token in prompt)
    assert [one["max_new_tokens"] for one in params] == [8, 8, 8]


def test_mixed_prompts_share_prefixes_of_their_epoch():
    work = {"batch": 40, "prompt": 50, "new": 20, "seed": "load/0", "mixed": True, "prefixes": "a"}
    one = {tuple(prompt[:64]) for prompt in engine_worker.make_prompts(work, 512)[0] if len(prompt) > 96}
    other = {
        tuple(prompt[:64])
        for prompt in engine_worker.make_prompts({**work, "seed": "load/1"}, 512)[0]
        if len(prompt) > 96
    }

    assert 1 < len(one) <= engine_worker.SHARED_PREFIXES
    assert one & other
    strange = engine_worker.make_prompts({**work, "prefixes": "b"}, 512)[0]
    assert not one & {tuple(prompt[:64]) for prompt in strange}


def test_pool_is_bounded_and_shared_memory_is_left_alone(tmp_path):
    arguments = arms.engine_arguments(shapes.MODELS["8b"], tmp_path, "cuda", 4096, radix_cache=False)

    assert (arguments["max_total_tokens"], arguments["disable_radix_cache"]) == (4096, True)
    assert arguments["attention_backend"] == "triton"
    assert "device" not in arguments


def test_arms_differ_as_they_say():
    assert arms.make_setting("off", "0.1") == arms.Setting()
    content, everything = arms.make_setting("content", "0.1"), arms.make_setting("all", "0.1")
    assert content.environment["KVCANARY_CHECKS"] == "chain,content"
    assert content.environment["KVCANARY_SCRUB_BUDGET"] == arms.NO_SCRUB
    assert everything.environment["KVCANARY_SCRUB_BUDGET"] == "0.1"
    assert arms.make_setting("in-tree", "0.1").arguments["kv_canary"] == "log"
    with pytest.raises(ValueError, match="no arm 'on'"):
        arms.make_setting("on", "0.1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--arms", "content,all"], "compared with the plain server"),
        (["--arms", "off,on"], "no arm 'on'"),
        (["--works", "decode65"], "'decode65' is no work of 8b"),
    ],
)
def test_a_command_line_that_cannot_be_measured_is_refused(line, message, capsys):
    with pytest.raises(SystemExit):
        gpu_overhead.parse_options(line)
    assert message in capsys.readouterr().err


INJECTED = {
    "event": "injected",
    "fault": "flip_running",
    "step": 100,
    "check": "content",
    "slots": [7],
    "positions": [3],
    "bound_forwards": 20,
    "layer": 2,
    "half": "V",
    "bit": 5,
}


def violation(**fields):
    """An event as the log has it."""
    base = {"event": "violation", "check": "content", "kind": "content", "pool": "rows", "rank": 0, "step": 110}
    base |= {"phase": "scrub", "slot": 7, "position": 3, "layer": 2, "half": "V"}
    return base | fields


@pytest.mark.parametrize(
    ("reports", "is_clean"),
    [
        ([violation()], True),
        ([], False),
        ([violation(layer=1)], False),
        ([violation(), violation(slot=8)], False),
    ],
)
def test_self_check_wants_the_flip_and_nothing_else(reports, is_clean):
    assert (evidence.judge_drill([INJECTED, *reports]) is None) == is_clean


def test_self_check_wants_a_flip():
    assert "0 faults were injected" in evidence.judge_drill([])


@pytest.mark.parametrize(
    ("fields", "found", "right"),
    [
        ({}, 1, 1),
        ({"position": None}, 1, 1),
        ({"layer": 3}, 1, 0),
        ({"half": "K"}, 1, 0),
        ({"pool": "window"}, 1, 0),
        ({"position": 4}, 1, 0),
        ({"step": 121}, 1, 0),
        ({"slot": 8}, 0, 0),
        ({"check": "chain", "kind": "link"}, 0, 0),
    ],
)
def test_right_is_the_right_place_in_time(fields, found, right):
    outcomes, _, unexplained = recall_table.pair_outcomes([INJECTED, violation(**fields)])
    row = recall_table.count_recall("flip_running", outcomes, "rows")

    assert (row.injected, row.found, row.right) == (1, found, right)
    assert len(unexplained) == 1 - found
    assert row.forwards == ((fields.get("step", 110) - 100,) if found else ())


def test_a_report_belongs_to_the_latest_fault_that_explains_it():
    later = {**INJECTED, "step": 200, "layer": 0, "half": "K"}
    events = [INJECTED, violation(), later, violation(step=205, layer=0, half="K")]
    outcomes, fresh, unexplained = recall_table.pair_outcomes(events)

    assert [len(outcome.found) for outcome in outcomes] == [1, 1]
    assert unexplained == []
    assert recall_table.count_recall("flip_running", outcomes, "rows").right == 2
    assert fresh == outcomes[:1]  # the same slot again: a guard may say so once


def test_plan_has_spares_and_keeps_its_seeds():
    plan = recall.plan_bytes(20, 5, layers=4, row_bits=1024, seed="1")

    assert plan == recall.plan_bytes(20, 5, layers=4, row_bits=1024, seed="1")
    assert plan != recall.plan_bytes(20, 5, layers=4, row_bits=1024, seed="2")
    assert plan.planned == 24 + 2 * 6
    assert recall.only_flips(plan).count(";") + 1 == 24
    recall_faults = recall.plan_books(["swap_entries", "free_twice"], 2, "1")
    assert [part.split("@")[0] for part in recall_faults.spec.split(";")] == ["swap_entries", "free_twice"] * 3


def test_plan_is_what_the_injector_reads():
    from kvcanary_plugin.faults.injector import Injector

    rng = random.Random(0)
    for _ in range(3):
        Injector.parse(recall.plan_bytes(10, 2, layers=4, row_bits=1024, seed=str(rng.random())).spec)
    Injector.parse(recall.plan_books(recall.parse_options([]).kinds, 2, "0").spec)


def test_log_of_the_other_canary_is_read_in_order():
    text = "\n".join(
        [
            "kv_canary violation: launch_tag=HEAD_K_FULL fail_reason=real_kv slot_idx=9 position=4 stored_token=1",
            'BENCH flip {"slots": [7], "layer": 0, "half": "K"}',
            "[2026] kv_canary violation: launch_tag=HEAD_K_FULL fail_reason=real_kv slot_idx=7 position=4",
            'BENCH flip {"slots": [9], "layer": 1, "half": "V"}',
            'BENCH flip {"slots": [7], "layer": 3, "half": "V"}',
        ]
    )
    flips, reports = recall.read_flips(text)

    assert [flip["slots"] for flip in flips] == [[7], [9], [7]]
    assert [report["slot"] for report in reports] == [9, 7]
    count, found = recall_table.count_lines(flips, reports)
    assert (count, found[0]["layer"]) == (1, 0)  # a report ahead of the flip of its slot is not of it


def test_what_another_check_of_rows_says_of_the_same_slot_counts_and_is_told_apart():
    foreign = {"event": "injected", "fault": "foreign_entry", "step": 100, "check": "ownership", "slots": [7]}
    foreign |= {"positions": [3], "bound_forwards": 0, "request": "a", "other": "b"}
    chain = violation(check="chain", kind="position", step=100, request="a", layer=None, half=None)
    outcomes, fresh, unexplained = recall_table.pair_outcomes([foreign, chain])
    row = recall_table.count_recall("foreign_entry", fresh, "rows")

    assert fresh == outcomes
    assert (row.found, row.elsewise, row.right, unexplained) == (1, 1, 1, [])


def test_a_store_skipped_twice_for_a_request_counts_once():
    skip = {
        "event": "injected",
        "fault": "skip_token",
        "step": 100,
        "check": "presence",
        "slots": [7],
        "positions": [3],
    }
    skip |= {"bound_forwards": 0, "layer": 2, "half": "V", "request": "a"}
    others = [{**skip, "slots": [8]}, {**skip, "slots": [9], "layer": 1}]
    _, fresh, _ = recall_table.pair_outcomes([skip, *others])

    assert [outcome.injected["slots"] for outcome in fresh] == [[7], [9]]
