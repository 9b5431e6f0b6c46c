"""What a guard finds of faults that are injected into a server under load, and what SGLang's own canary finds of them.

Three servers of the 0.5B shape share the device: two with kvcanary and every check (one for faults in bytes, one for
faults in rows, books and stores), and one with SGLang's own canary, which gets the same flips: the same layers, halves,
bits and seeds of the place. Exits 1 if kvcanary missed one, placed one wrongly, or reported anything else.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arms import ALL_CHECKS, Arm, ArmError, Setting, engine_arguments
from engine_hooks import FLIPS_VARIABLE
from evidence import versions
from recall_table import HEAD, Recall, count_lines, count_recall, pair_outcomes
from shapes import MODELS, Work

from kvcanary_plugin.faults.injector import FAULTS
from kvcanary_plugin.report.jsonl import read_events

FLIP = "flip_running"
BYTE_FAULTS = ("flip_cached", "overwrite_slot")
# Those that a plain MHA pool allows. Not drop_wait: what it damages besides, nobody can say.
BOOK_FAULTS = (
    *("swap_entries", "alias_row", "foreign_entry", "stale_entry", "stale_row", "take_freed"),
    *("free_running", "free_cached", "free_twice", "alloc_taken", "release_early", "abort_chunk"),
    *("store_padding", "store_last", "skip_store", "skip_token"),
    *("other_adapter", "other_salt", "other_weights", "other_dtype", "other_scales"),
)
SPARE_SHARE = 0.2  # more faults than are counted, for slots that are hit twice
POOL = "rows"
LOADS = {"small": Work(24, 200, 120), "tiny": Work(6, 60, 40)}
POOL_TOKENS = {"small": 65536, "tiny": 8192}
BYTE_GAP, BOOK_GAP = 6, 5  # forwards between two faults
EPOCH_ROUNDS = 2
WARM_UP_ROUNDS, LAST_ROUNDS, IDLE_SECONDS = 3, 3, 2.0
SPEC_FORWARDS = 8  # from the order to the first fault
IN_TREE_LINE = re.compile(r"kv_canary violation: launch_tag=(\S+) fail_reason=(\S+) slot_idx=(\d+)")
SKIPPED_LINE = re.compile(r"^BENCH skipped (\d+) \w+$", re.MULTILINE)
FLIP_LINE = re.compile(r"^BENCH flip (\{.*\})$")


@dataclass(frozen=True, slots=True)
class Plan:
    """Faults for one server: the spec, and how many of each kind count."""

    spec: str
    counts: dict[str, int]

    @property
    def planned(self) -> int:
        """Faults in the spec."""
        return self.spec.count(";") + 1


def plan_bytes(flips: int, others: int, layers: int, row_bits: int, seed: str) -> Plan:
    """Flips at random layers, halves and bits, then other faults in bytes, with some to spare of each."""
    rng = random.Random(seed)
    parts = [
        f"{FLIP}@{{}}:layer={rng.randrange(layers)},half={rng.choice('KV')},bit={rng.randrange(row_bits)},seed={seed}-{n}"
        for n in range(_with_spares(flips))
    ]
    parts += [f"{name}@{{}}:seed={seed}-{name}-{n}" for n in range(_with_spares(others)) for name in BYTE_FAULTS]
    counts = {FLIP: flips, **dict.fromkeys(BYTE_FAULTS, others)}
    return Plan(_number(parts, BYTE_GAP), {name: count for name, count in counts.items() if count})


def plan_books(kinds: list[str], count: int, seed: str) -> Plan:
    """``count`` of each kind and some to spare, in turn, so that one kind seldom hits the same requests twice."""
    parts = [f"{name}@{{}}:seed={seed}-{name}-{n}" for n in range(_with_spares(count)) for name in kinds]
    return Plan(_number(parts, BOOK_GAP), dict.fromkeys(kinds, count))


def only_flips(plan: Plan) -> str:
    """The flips of ``plan``, in the forwards in which it has them."""
    return ";".join(part for part in plan.spec.split(";") if part.startswith(FLIP))


def _with_spares(count: int) -> int:
    return count + math.ceil(count * SPARE_SHARE)


def _number(parts: list[str], gap: int) -> str:
    return ";".join(part.format(SPEC_FORWARDS + index * gap) for index, part in enumerate(parts))


def read_flips(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Flips and reports in the log of a server with SGLang's own canary, with the numbers of their lines."""
    flips, reports = [], []
    for number, line in enumerate(text.splitlines()):
        if flip := FLIP_LINE.match(line):
            flips.append({"line": number, **json.loads(flip[1])})
        elif report := IN_TREE_LINE.search(line):
            reports.append({"line": number, "tag": report[1], "reason": report[2], "slot": int(report[3])})
    return flips, reports


class Hunt:
    """One server, the faults planned for it, and its load."""

    def __init__(self, arm: Arm, plan: Plan, spec: Path, load: Work) -> None:
        self.arm = arm
        self.plan = plan
        self._spec = spec
        self._load = load
        self._round = 0

    def order(self) -> None:
        """Have the faults injected from now on."""
        if self.arm.setting.has_guard:
            self._spec.write_text(self.plan.spec)
            self.arm.ask("inject", spec=str(self._spec))
        else:
            self._spec.write_text(only_flips(self.plan))

    def run(self, deadline: float) -> None:
        """Serve load until every fault is injected, and some more, so that every promise falls due."""
        self._serve(WARM_UP_ROUNDS)
        self.order()
        while self.settled() < self.expected and time.monotonic() < deadline:
            self._serve(1)
        self._serve(LAST_ROUNDS)
        time.sleep(IDLE_SECONDS)  # in which the idle pass folds what is left

    def _serve(self, rounds: int) -> None:
        for _ in range(rounds):
            self._serve_round()

    def _serve_round(self) -> None:
        # Reports are told apart by slot and writer, so faults in rows want prefixes that are new now and then. Flips
        # want old ones: of two requests that compute a prefix at once, one gives its slots back.
        epoch = 0 if FLIP in self.plan.counts else self._round // EPOCH_ROUNDS
        self.arm.serve(self._load, f"load/{self._round}", mixed=True, prefixes=f"prefixes/{epoch}")
        self._round += 1

    def settled(self) -> int:
        """Faults injected so far, or left out because no batch suited them."""
        text = self.arm.log.read_text(errors="replace")
        if not self.arm.setting.has_guard:
            return len(read_flips(text)[0])
        skipped = sum(int(count) for count in SKIPPED_LINE.findall(text))
        return skipped + len([event for event in read_events(self.arm.events) if event["event"] == "injected"])

    @property
    def expected(self) -> int:
        """Faults that are to be injected."""
        return self.plan.planned if self.arm.setting.has_guard else only_flips(self.plan).count(";") + 1


def render(hunts: list[Hunt]) -> tuple[list[str], list[Recall], list[dict[str, Any]]]:
    """The rows, the recalls behind them, and the reports that no fault explains."""
    rows, recalls, unexplained = [HEAD], [], []
    for each in (each for each in hunts if each.arm.setting.has_guard):
        _, fresh, strange = pair_outcomes(read_events(each.arm.events))
        unexplained += strange
        for fault, count in each.plan.counts.items():
            of_kind = [outcome for outcome in fresh if outcome.injected["fault"] == fault][:count]
            recalls.append(count_recall(fault, of_kind, POOL))
            rows.append(recalls[-1].render())
    return rows, recalls, unexplained


def render_in_tree(each: Hunt) -> str:
    """What SGLang's own canary found of the flips."""
    flips, reports = read_flips(each.arm.log.read_text(errors="replace"))
    distinct: list[dict[str, Any]] = []
    for flip in flips:
        if not any(flip["slots"] == other["slots"] for other in distinct):
            distinct.append(flip)
    wanted = distinct[: each.plan.counts[FLIP]]
    count, found = count_lines(wanted, reports)
    places = sorted({(flip["layer"], flip["half"]) for flip in found})
    return (
        f"SGLang's own canary, every byte, sweep every 4 forwards: {count} of {len(wanted)} flips found, "
        f"in layers and halves {places}; {len(reports)} reports"
    )


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    kinds = [name for name in BOOK_FAULTS if name in FAULTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(LOADS), default="small", help="Shape. Default: small.")
    parser.add_argument("--flips", type=int, default=200, help="Single bits. Default: %(default)s.")
    parser.add_argument("--faults", type=int, default=50, help="Of each other kind. Default: %(default)s.")
    parser.add_argument("--kinds", default=",".join(kinds), help="Kinds beside those in bytes.")
    parser.add_argument("--without-in-tree", action="store_true", help="Leave out SGLang's own canary.")
    parser.add_argument("--scrub-budget", default="0.0025", help="Default: %(default)s.")
    parser.add_argument("--seed", default="0", help="Of layers, halves, bits and places. Default: %(default)s.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=400.0, help="End by then. Default: %(default)s.")
    parser.add_argument("--out", type=Path, default=Path("recall"), help="Folder for events and logs.")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",")
    for name in options.kinds:
        if name not in FAULTS:
            parser.error(f"--kinds: no fault {name!r}; there are {', '.join(FAULTS)}")
    return options


def run(options: argparse.Namespace, folder: Path) -> int:
    """Start, hunt, print. Returns the exit code."""
    model, deadline = MODELS[options.model], time.monotonic() + options.seconds
    path, load = model.write(folder / "model"), LOADS[options.model]
    layers = int(model.config["num_hidden_layers"])
    row_bits = int(model.config["num_key_value_heads"]) * int(model.config["head_dim"]) * 16
    flips_file = folder / "in-tree.flips"
    variables = {
        "KVCANARY": "log",
        "KVCANARY_ALLOW_INJECT": "1",
        "KVCANARY_BENCH_COMMANDS": "1",
        "KVCANARY_CHECKS": ALL_CHECKS,
        "KVCANARY_SCRUB_BUDGET": options.scrub_budget,
    }
    guarded = Setting(variables, has_guard=True)
    in_tree = Setting(
        {FLIPS_VARIABLE: str(flips_file)},
        {"kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 4},
    )
    plans = {"bytes": plan_bytes(options.flips, options.faults, layers, row_bits, options.seed)}
    plans["books"] = plan_books(options.kinds, options.faults, options.seed)
    settings = {"bytes": guarded, "books": guarded}
    if not options.without_in_tree:
        plans["in-tree"], settings["in-tree"] = plans["bytes"], in_tree
    arguments = engine_arguments(model, path, options.device, POOL_TOKENS[options.model], radix_cache=True)
    hunts = []
    try:
        for name, plan in plans.items():
            arm = Arm(name, settings[name], arguments, model.vocabulary, folder, options.device)
            spec = flips_file if name == "in-tree" else folder / f"{name}.spec"
            hunts.append(Hunt(arm, plan, spec, load))
        for each in hunts:
            each.arm.wait_ready(deadline)
        print(f"{len(hunts)} servers ready", flush=True)
        with ThreadPoolExecutor(len(hunts)) as hunters:
            list(hunters.map(lambda each: each.run(deadline), hunts))
        for each in hunts:
            if each.arm.setting.has_guard:
                each.arm.guard_state()
    finally:
        for each in hunts:
            each.arm.end()
    rows, recalls, unexplained = render(hunts)
    print("\n".join(rows))
    print(f"\n{len(unexplained)} reports that no fault explains.")
    if not options.without_in_tree:
        print(render_in_tree(hunts[-1]))
    planned = {name: count for each in hunts for name, count in each.plan.counts.items()}
    short = [recall for recall in recalls if recall.right < planned[recall.fault]]
    for recall in short:
        print(f"\n{recall.fault}: {planned[recall.fault] - recall.right} not injected, not found, or not right:")
        print("\n".join(json.dumps(missed)[:600] for missed in recall.missed[:5]))
    for event in unexplained[:10]:
        print(json.dumps(event)[:600])
    return 1 if short or unexplained else 0


def main() -> int:
    """Run it."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers live in sessions of their own
    print(json.dumps(versions()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recall-", dir=options.out) as folder:
        try:
            return run(options, Path(folder))
        except ArmError as error:
            print(f"no figures: {error}", flush=True)
            return 2
        finally:
            for file in Path(folder).glob("*.json*"):
                file.rename(options.out / file.name)
            for file in Path(folder).glob("*.log"):
                file.rename(options.out / file.name)


if __name__ == "__main__":
    raise SystemExit(main())
