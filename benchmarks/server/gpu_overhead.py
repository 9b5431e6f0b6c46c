"""What the canary costs a server on a GPU: alternating rounds of arms that are kept warm beside each other in one run.

Arms: ``off`` (the plain server), ``content`` (chain and content, every byte, rotating pass off), ``all`` (every check
and the rotating pass), ``in-tree`` (SGLang's own canary). Overheads are those of pairs of the same round. No table is
printed if a guard reported anything during the measurement, or missed the bit that is flipped in it afterwards. The
raw figures are written after every round.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arms import Arm, ArmError, engine_arguments, make_setting
from device_time import kernel_names, read_trace
from evidence import judge_drill, package_folder, start_cost, versions
from overhead_table import PLAIN, missed_bounds, render_overheads, render_starts
from shapes import MODELS, Model, Work

from kvcanary_plugin.report.jsonl import read_events

SPARE_SLOTS = 256
MIN_CALIBRATED_PASSES = 3  # the rate of the first is a guess, and a lower one is announced a pass ahead
CALIBRATION_ROUNDS = 12
WARM_UP = Work(1, 16, 8)
DRILL_SECONDS = 8.0  # what the self-check of one guarded arm takes at most
DRILL = "flip_running@0"
SCRUBBED = "all"  # the arm whose rotating pass has a period to keep
PROFILE_SECONDS = 180.0
PROFILE_FACTOR = 1.8  # of the time without the profiler: writing and reading the trace


class Overhead:
    """One run: its arms and everything measured so far.

    Attributes:
        rounds: seconds by round, arm and work.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._model: Model = MODELS[options.model]
        self._works = {name: self._model.works[name] for name in options.works or self._model.works}
        self._deadline = time.monotonic() + float(options.seconds)
        self.rounds: dict[str, dict[str, dict[str, float]]] = {}
        self._device: dict[str, dict[str, Any]] = {}
        self._periods: dict[str, dict[str, float]] = {}
        self._starts: dict[str, dict[str, float | None]] = {}
        self._arms: list[Arm] = []
        self._checked: bool | None = None  # until it was

    def run(self) -> int:
        """Start, measure, check, print. Returns the exit code: 0 if every bound was held."""
        try:
            self._start()
            for arm in self._arms:
                self._warm_up(arm)
            self._measure()
            self._watch()
            clean = {arm.name: self._guard_state(arm) for arm in self._guarded()}
            if not self._options.no_profile:
                self._profile()
            failures = [failure for arm in self._guarded() if (failure := self._drill(arm, clean[arm.name]))]
            self._checked = not failures
            self._save()
        finally:
            for arm in self._arms:
                arm.end()
        for arm in self._guarded():
            print(f"{arm.name}: slow calls of the guard: {arm.slow_calls() or 'none'}", flush=True)
        if failures:
            print("detection self-check failed; no figures:\n" + "\n".join(failures), flush=True)
            return 2
        names = [arm.name for arm in self._arms]
        print("\n".join(render_overheads(self.rounds, names, list(self._works), self._device, self._periods)))
        print("\n" + "\n".join(render_starts(self._starts)))
        missed = missed_bounds(self.rounds, names, list(self._works), self._periods)
        print(
            "\n" + ("\n".join(["Not held:", *missed]) if missed else "Every bound that was measured is held."),
            flush=True,
        )
        return 1 if missed else 0

    def _start(self) -> None:
        options, model = self._options, self._model
        path = model.write(self._folder / "model")
        pool_tokens = options.pool_tokens or max(work.tokens for work in self._works.values()) + SPARE_SLOTS
        arguments = engine_arguments(model, path, options.device, pool_tokens, radix_cache=False)
        for name in options.arms:
            setting = make_setting(name, options.scrub_budget)
            self._arms.append(Arm(name, setting, arguments, model.vocabulary, self._folder, options.device))
        ready_by = time.monotonic() + min(options.seconds, options.start_seconds)
        for arm in self._arms:
            arm.wait_ready(ready_by)
            tokens = arm.ask("state")["tokens"]
            if tokens < pool_tokens:
                raise ArmError(
                    f"arm {arm.name} got a pool of {tokens} tokens instead of {pool_tokens}: the arms do not fit "
                    "the device together; name fewer in --arms"
                )
            arm.stop()
            self._starts[arm.name] = {"ready_seconds": arm.start_seconds, **start_cost(arm)}
        print(f"{len(self._arms)} arms ready after {self._elapsed():.0f} s, pool of {pool_tokens} tokens", flush=True)

    def _warm_up(self, arm: Arm) -> None:
        """Every work once; in guarded arms also until the rotating pass has its rate."""
        arm.resume()
        for name, work in self._works.items():
            arm.serve(work, f"warm/{name}")
        if arm.setting.has_guard:
            for _ in range(CALIBRATION_ROUNDS):
                if arm.guard_state()["passes"] >= MIN_CALIBRATED_PASSES:
                    break
                arm.serve(Work(1, 16, 128), "calibrate")
            else:
                raise ArmError(f"arm {arm.name}: the rotating pass has not found its rate\n{arm.tail()}")
        arm.stop()

    def _measure(self) -> None:
        arms = {arm.name: arm for arm in self._arms}
        last = 0.0
        for number in range(self._options.rounds):
            share = 0.0 if self._options.no_profile else len(self._profiled()) / len(arms)
            reserve = DRILL_SECONDS * len(self._guarded()) + last / len(arms) + PROFILE_FACTOR * share * last
            if last and time.monotonic() + 1.1 * last + reserve > self._deadline:
                print(f"the time is up: {number} of {self._options.rounds} rounds", flush=True)
                break
            began = time.monotonic()
            names = [name for name in arms if name != "in-tree" or number < self._options.in_tree_rounds]
            shift = number % len(names)
            self.rounds[str(number)] = {
                name: self._serve_all(arms[name], number) for name in names[shift:] + names[:shift]
            }
            last = time.monotonic() - began
            self._save()
            shown = {
                name: {work: round(t, 3) for work, t in works.items()}
                for name, works in self.rounds[str(number)].items()
            }
            print(f"round {number}: {json.dumps(shown)}", flush=True)

    def _serve_all(self, arm: Arm, number: int) -> dict[str, float]:
        arm.resume()
        arm.serve(WARM_UP, "awake")
        times = {name: arm.serve(work, f"{number}/{name}") for name, work in self._works.items()}
        arm.stop()
        return times

    def _watch(self) -> None:
        """How long the rotating pass takes under each work: from what it gets done in the middle of a round."""
        for arm in self._arms:
            if arm.name != SCRUBBED:
                continue
            arm.resume()
            for name, work in self._works.items():
                usual = self.rounds["0"][arm.name][name]
                done = arm.ask("watch", first=0.2 * usual, last=0.8 * usual, **work.to_fields(f"watch/{name}"))
                self._periods.setdefault(arm.name, {})[name] = done["slots"] * done["seconds"] / max(done["folded"], 1)
            arm.stop()
        self._save()

    def _profile(self) -> None:
        """Device time of each work, in the arms asked for."""
        names = kernel_names(package_folder())
        activity = "CPU" if self._options.device == "cpu" else "GPU"
        for arm in self._profiled():
            arm.resume()
            for name, work in self._works.items():
                folder = self._folder / "traces" / arm.name / name
                folder.mkdir(parents=True)
                fields = work.to_fields(f"profile/{name}")
                try:
                    arm.ask("profile", PROFILE_SECONDS, folder=str(folder), activity=activity, **fields)
                except ArmError as error:  # the figures are still good
                    print(f"no profile: {error}", flush=True)
                    arm.stop()
                    return
                for trace in (read_trace(file, names) for file in folder.iterdir()):  # one, as there is one rank
                    if not trace.count:  # on a CPU there is nothing to see
                        continue
                    self._device.setdefault(arm.name, {})[name] = {
                        "total": trace.total,
                        "share": trace.share,
                        "kernels": trace.ours,
                        "events": trace.count,
                    }
            arm.stop()
            self._save()
            print(f"profiled {arm.name}: {json.dumps(self._device.get(arm.name, {}))}", flush=True)

    def _guard_state(self, arm: Arm) -> dict[str, Any]:
        arm.resume()
        state = arm.guard_state()
        arm.stop()
        return state

    def _drill(self, arm: Arm, measured: dict[str, Any]) -> str | None:
        """Flip one bit and have the guard look. Returns what went wrong."""
        if any(measured["violations"].values()):
            return f"{arm.name}: reported during the measurement: {measured['violations']}\n{arm.tail()}"
        spec = self._folder / f"{arm.name}.spec"
        spec.write_text(DRILL)
        arm.resume()
        arm.ask("drill", spec=str(spec), events=str(arm.events))
        arm.guard_state()
        arm.stop()
        failure = judge_drill(read_events(arm.events))
        return failure and f"{arm.name}: {failure}"

    def _profiled(self) -> list[Arm]:
        return [arm for arm in self._arms if arm.name in self._options.profile]

    def _guarded(self) -> list[Arm]:
        return [arm for arm in self._arms if arm.setting.has_guard]

    def _elapsed(self) -> float:
        return float(self._options.seconds) - (self._deadline - time.monotonic())

    def _save(self) -> None:
        fields = {
            "command": sys.argv[1:],
            "self_check_passed": self._checked,
            "rounds": self.rounds,
            "device": self._device,
            "period_seconds": self._periods,
            "starts": self._starts,
            "versions": versions(),
        }
        self._options.out.write_text(json.dumps(fields, indent=1))


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="8b", help="Shape. Default: 8b.")
    parser.add_argument("--arms", default="off,content,all,in-tree", help="Comma-separated. Default: %(default)s.")
    parser.add_argument("--works", help="Comma-separated works of the model. Default: all of them.")
    parser.add_argument("--rounds", type=int, default=10, help="Alternating rounds. Default: %(default)s.")
    parser.add_argument("--in-tree-rounds", type=int, default=3, help="Rounds with that arm. Default: %(default)s.")
    parser.add_argument("--scrub-budget", default="0.0025", help="Of the arm all. Default: %(default)s.")
    parser.add_argument("--profile", default="off,content,all", help="Arms to profile. Default: %(default)s.")
    parser.add_argument("--no-profile", action="store_true", help="Profile none.")
    parser.add_argument("--pool-tokens", type=int, help="Default: what the largest work needs.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=570.0, help="End by then. Default: %(default)s.")
    parser.add_argument(
        "--start-seconds", type=float, default=300.0, help="Give up on the start. Default: %(default)s."
    )
    parser.add_argument("--out", type=Path, default=Path("overhead.json"), help="Raw figures. Default: %(default)s.")
    options = parser.parse_args(arguments)
    options.arms = options.arms.split(",")
    options.profile = options.profile.split(",")
    options.works = options.works.split(",") if options.works else None
    if PLAIN not in options.arms:
        parser.error(f"--arms {','.join(options.arms)}: the others are compared with the plain server, {PLAIN}")
    for name in options.arms:
        try:
            make_setting(name, options.scrub_budget)
        except ValueError as error:
            parser.error(f"--arms: {error}")
    known = MODELS[options.model].works
    if unknown := [name for name in options.works or () if name not in known]:
        parser.error(f"--works: {unknown[0]!r} is no work of {options.model}; there are {', '.join(known)}")
    return options


def main() -> int:
    """Run it."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # arms live in sessions of their own
    print(json.dumps(versions()), flush=True)
    with tempfile.TemporaryDirectory(prefix="kvcanary-overhead-") as folder:
        try:
            return Overhead(options, Path(folder)).run()
        except ArmError as error:
            print(f"no figures: {error}", flush=True)
            return 2


if __name__ == "__main__":
    raise SystemExit(main())
