"""Clean minutes of many modes of a server at once on one GPU, and then in each the faults that it must find.

Servers run side by side, every check on: mixed load with shared prefixes, aborts, cache flushes and weight updates.
Nothing may be reported. Then faults are injected under the same load, and every one has to be found in its place.

``nohup python benchmarks/server/gpu_soak.py --minutes 8 --out soak &`` goes on behind its terminal, and
``--status soak`` prints how far it has come. Exits 1 if anything was reported in the clean part, a server or its guard
let go, or a fault was not found; 2 if a mode did not start, the others having run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import soak_board as board
from arms import ALL_CHECKS, Arm, ArmError, Setting, engine_arguments
from evidence import versions
from recall import SKIPPED_LINE
from soak_board import Board, Row, render_file, render_rows
from soak_drill import find_reports, judge, make_spec
from soak_modes import GROUPS, LOADS, MODES, Mode, expand_modes, has_memory_saver, render_list
from soak_shapes import SOAK_MODELS

from kvcanary_plugin.report.jsonl import read_events

ROUNDS_BETWEEN = 8  # two of what is done while nothing is served
ABORT_SHARE = 0.08
PREFIX_ROUNDS = 2  # that share prefixes
LAST_ROUNDS, IDLE_SECONDS = 2, 2.0
START_SECONDS = 400.0  # eight imports at once on 16 cores, and in some modes a compiler
ROUND_SECONDS = 300.0  # at most; the first one may compile
SAVE_SECONDS = 60.0
CPU_GRAPH_BATCHES = 32  # decode batches of up to so many are captured


class Soak:
    """One mode: its server, its load, and its row on the board."""

    def __init__(self, name: str, options: argparse.Namespace, row: Row, deadline: float) -> None:
        self._name, self._mode, self._row = name, MODES[name], row
        self._options, self._deadline = options, deadline
        self._load = LOADS[options.device]
        self._model = SOAK_MODELS["tiny" if options.device == "cpu" else self._mode.model]
        self._round = self._pause = 0
        self._is_ending = False
        self._arm: Arm | None = None

    def run(self) -> None:
        """Start, serve, damage; whatever happens is in the row."""
        row = self._row
        if self._is_ending or time.monotonic() > self._deadline:
            row.state, row.why = board.NOT_RUN, "no time was left; give more --seconds or fewer --modes"
            return
        try:
            row.state, row.why = board.STARTING, ""
            self._arm = arm = self._start()
            arm.wait_ready(time.monotonic() + self._options.start_seconds)
            arm.guard_state()
            row.state = board.CLEAN
            self._serve_clean(arm)
            row.state = board.DRILLING
            self._drill(arm)
            row.state = board.DONE
        except Exception as error:
            row.state = board.NOT_STARTED if row.state == board.STARTING else board.ENDED
            row.why = str(error) if isinstance(error, ArmError) else f"{type(error).__name__}: {error}"
        finally:
            if self._arm is not None:
                self._arm.end()

    def end_soon(self) -> None:
        """End its server at once, from another thread; the row says how far it came."""
        self._is_ending = True
        if self._arm is not None:
            self._arm.kill()

    def _start(self) -> Arm:
        options, mode = self._options, self._mode
        variables = {
            "KVCANARY": "log",
            "KVCANARY_ALLOW_INJECT": "1",
            "KVCANARY_BENCH_COMMANDS": "1",
            "KVCANARY_CHECKS": ALL_CHECKS,
            "KVCANARY_SCRUB_BUDGET": options.scrub_budget,
            **({"KVCANARY_INJECT": options.inject} if options.inject else {}),
            **make_environment(mode, options.device),
        }
        arguments = make_arguments(self._name, options.device, options.out)
        setting = Setting(variables, arguments, has_guard=True)
        return Arm(self._name, setting, {}, self._model.vocabulary, options.out, options.device)

    def _serve_clean(self, arm: Arm) -> None:
        began = time.monotonic()
        until = min(began + self._options.minutes * 60, self._deadline)
        while self._row.clean_seconds == 0 or time.monotonic() < until:
            self._serve_round(arm)
            if self._round % ROUNDS_BETWEEN == 0:
                self._do_between(arm)
            self._row.clean_seconds = time.monotonic() - began
            self._note(arm)
        time.sleep(IDLE_SECONDS)  # in which the idle pass goes on
        self._note(arm)

    def _serve_round(self, arm: Arm) -> None:
        number = self._round % self._mode.returns if self._mode.returns else self._round
        work = {**self._load.to_fields(f"{self._name}/{number}"), "mixed": True, "aborts": ABORT_SHARE}
        done = arm.ask("churn", ROUND_SECONDS, **work, prefixes=f"prefixes/{number // PREFIX_ROUNDS}")
        self._round += 1
        for key in ("requests", "aborted"):
            self._row.counts[key] += done[key]

    def _do_between(self, arm: Arm) -> None:
        self._pause += 1
        if self._mode.gives_back:
            arm.ask("give_back")
        if self._pause % 2:
            arm.ask("flush")
            self._row.counts["flushes"] += 1
        else:
            arm.ask("update", name=self._mode.norm, elements=int(self._model.config["hidden_size"]))
            self._row.counts["updates"] += 1

    def _note(self, arm: Arm) -> None:
        state = arm.guard_state()
        self._row.counts |= {key: state[key] for key in ("forwards", "verified", "stored", "folded")}
        self._row.reports = find_reports(read_events(arm.events))

    def _drill(self, arm: Arm) -> None:
        arm.ask("flush")  # a host pool that is not full, and no slot that was reported before
        before = len(read_events(arm.events))
        spec = arm.events.with_suffix(".spec")
        spec.write_text(make_spec(self._mode.faults, self._name))
        arm.ask("inject", spec=str(spec))
        until = time.monotonic() + self._options.drill_seconds
        while self._settled(arm, before) < len(self._mode.faults) and time.monotonic() < until:
            self._serve_round(arm)
        for _ in range(max(LAST_ROUNDS, self._mode.returns)):  # so that every promise falls due, and pages come back
            self._serve_round(arm)
        arm.ask("audit")
        for _ in range(LAST_ROUNDS):
            self._serve_round(arm)
        time.sleep(IDLE_SECONDS)
        arm.guard_state()
        verdict = judge(read_events(arm.events)[before:], self._mode.faults)
        self._row.drill, self._row.is_passed = verdict.render(), not verdict.problems
        self._row.why = "\n".join(verdict.problems)

    def _settled(self, arm: Arm, before: int) -> int:
        """Faults that were injected, or left out because no batch suited them."""
        skipped = sum(int(count) for count in SKIPPED_LINE.findall(arm.log.read_text(errors="replace")))
        return skipped + sum(event["event"] == "injected" for event in read_events(arm.events)[before:])


def make_arguments(name: str, device: str, folder: Path) -> dict[str, Any]:
    """What SGLang is started with, and the configurations of its models below ``folder``."""
    mode: Mode = MODES[name]
    is_cpu = device == "cpu"
    model = SOAK_MODELS["tiny" if is_cpu else mode.model]
    path = model.write(folder / "models" / f"{name}-target")
    more = dict(mode.arguments)
    if mode.draft is not None:
        more["speculative_draft_model_path"] = str(SOAK_MODELS[mode.draft].write(folder / "models" / f"{name}-draft"))
    if mode.gives_back and not is_cpu:
        more["enable_memory_saver"] = has_memory_saver()
    if not is_cpu:
        more.setdefault("cuda_graph_max_bs_decode", CPU_GRAPH_BATCHES)
    return engine_arguments(model, path, device, mode.pool_tokens[is_cpu], radix_cache=True, **more)


def make_environment(mode: Mode, device: str) -> dict[str, str]:
    """Variables for the server, behind what is on its path already."""
    variables = {**mode.environment, **((mode.on_cpu or {}) if device == "cpu" else {})}
    if "PYTHONPATH" in variables:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), variables["PYTHONPATH"])))
    return variables


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--modes", default="plain", help=f"Of --list, or {', '.join(GROUPS)}. Default: %(default)s.")
    parser.add_argument("--list", action="store_true", help="Print the modes and end.")
    parser.add_argument("--status", type=Path, metavar="FOLDER", help="Print how far a run has come, and end.")
    parser.add_argument("--minutes", type=float, default=10.0, help="Clean ones of each mode. Default: %(default)s.")
    parser.add_argument("--at-once", type=int, default=8, help="Servers beside each other. Default: %(default)s.")
    parser.add_argument("--seconds", type=float, default=1500.0, help="Begin no drill after. Default: %(default)s.")
    parser.add_argument("--start-seconds", type=float, default=START_SECONDS, help="Default: %(default)s.")
    parser.add_argument("--drill-seconds", type=float, default=90.0, help="At most, to inject. Default: %(default)s.")
    parser.add_argument("--scrub-budget", default="0.02", help="Default: %(default)s.")
    parser.add_argument("--inject", metavar="SPEC", help="Faults for the clean part, to see that it tells of them.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="Folder for figures, events and logs.")
    options = parser.parse_args(arguments)
    try:
        options.modes = expand_modes(options.modes, options.device)
    except ValueError as error:
        parser.error(f"--modes: {error}")
    options.out = options.out.absolute()
    return options


def run(options: argparse.Namespace) -> int:
    """Run every mode. Returns the exit code."""
    options.out.mkdir(parents=True, exist_ok=True)
    for left in (*options.out.glob("*.jsonl"), *options.out.glob("*.log")):
        left.unlink()  # of an earlier run: both are appended to
    rows = Board(options.modes, options.out, {**versions(), "minutes": options.minutes})
    deadline = time.monotonic() + options.seconds
    soaks = [Soak(name, options, rows.rows[name], deadline) for name in options.modes]

    def kill(*_: Any) -> None:
        # Servers live in sessions of their own; whoever waits for one goes on, and the rows say why.
        for each in soaks:
            each.end_soon()

    signal.signal(signal.SIGTERM, kill)
    signal.signal(signal.SIGINT, kill)
    with ThreadPoolExecutor(options.at_once) as threads:
        pending = {threads.submit(each.run) for each in soaks}
        while pending:
            rows.save()
            print(", ".join(f"{name}: {row.state}" for name, row in rows.rows.items()), flush=True)
            _, pending = wait(pending, SAVE_SECONDS)
    rows.save()
    print("\n".join(render_rows(rows.rows)), flush=True)
    return rows.exit_code()


def main() -> int:
    """Run it, or say how far it has come."""
    options = parse_options()
    if options.list:
        print("\n".join(render_list()))
        return 0
    if options.status is not None:
        print(render_file(options.status))
        return 0
    print(json.dumps(versions()), flush=True)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
