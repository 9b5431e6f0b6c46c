"""What the canary costs a CPU server: median decode step with ``log`` and all of content, beside ``off``.

Two servers stay warm, one of each arm; only the one that is measured has work, the other sleeps. Arms alternate, and
their order too. The benchmark refuses to print figures if the guarded server did not find a fault that was injected
into it, or reported anything else.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import statistics
import struct
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvcanary_plugin.demo.model import MEDIUM, TINY, VOCABULARY, Shape, make_model
from kvcanary_plugin.demo.server import Server
from kvcanary_plugin.report.jsonl import read_events

CLIENTS, PROMPT_TOKENS, NEW_TOKENS = 8, 256, 128
POOL_TOKENS = 3200  # eight running requests and little more, so that the pool is live
MAX_PERIOD_FORWARDS = 200
# shape, bounds on the median step with every check and with chain and content alone, scrub budget that covers the pool
# within MAX_PERIOD_FORWARDS, and rounds of requests in one measurement: some seconds of it, or the clients' processes
# decide the figure
SHAPES: dict[str, tuple[Shape, tuple[float, float], float, int]] = {
    "12 layers, hidden 768": (MEDIUM, (0.03, 0.02), 0.0095, 1),
    "4 layers, hidden 128": (TINY, (0.12, 0.08), 0.0018, 5),
}
FIRST_CHECKS = "chain,content"


class Arm:
    """One warm server and the decode steps measured in it."""

    def __init__(self, model: Path, folder: Path, mode: str, budget: float, checks: str | None = None) -> None:
        self.steps_path = folder / f"{mode}.steps"
        self.events_path = folder / f"{mode}.jsonl"
        flags = [f"--max-total-tokens={POOL_TOKENS}", "--sleep-on-idle", f"--kvcanary={mode}"]
        environment = {
            "KVCANARY_BENCH_STEPS": str(self.steps_path),
            "KVCANARY_BENCH_BATCH": str(CLIENTS),
            "PYTHONPATH": str(Path(__file__).parent),
            "OMP_NUM_THREADS": str(os.cpu_count()),  # what SGLang uses when nobody sets it
        }
        if mode != "off":
            flags += [
                f"--kvcanary-log={self.events_path}",
                f"--kvcanary-scrub-budget={budget}",
                "--kvcanary-inject=swap_entries@40",
            ]
            flags += [f"--kvcanary-checks={checks}"] if checks else []
            environment["KVCANARY_ALLOW_INJECT"] = "1"
        self.server = Server(model, flags, folder / f"{mode}.log", environment=environment, launcher="step_probe")
        self.medians: list[float] = []

    def measure(self, rng: random.Random, rounds: int) -> None:
        """Some rounds of requests; keeps the median step in milliseconds."""
        self.steps_path.write_bytes(b"")
        for _ in range(rounds):
            prompts = [[rng.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(CLIENTS)]
            with ThreadPoolExecutor(CLIENTS) as clients:
                list(clients.map(lambda prompt: self.server.generate(prompt, NEW_TOKENS), prompts))
        steps = [value for (value,) in struct.iter_unpack("<q", self.steps_path.read_bytes())]
        if len(steps) < rounds * NEW_TOKENS // 2:
            raise SystemExit(f"only {len(steps)} full decode steps were seen; the clients did not run side by side")
        self.medians.append(statistics.median(steps) / 1e6)


def compare(name: str, pairs: int, folder: Path, checks: str | None) -> bool:
    """Measure one model and print its row. Returns whether the bound holds."""
    shape, bounds, budget, rounds = SHAPES[name]
    bound = bounds[1] if checks == FIRST_CHECKS else bounds[0]
    work = folder / name.replace(" ", "-")
    work.mkdir()
    model = make_model(work / "model", shape)
    off, log = Arm(model, work, "off", 0.0), None
    try:
        off.server.wait_ready()
        log = Arm(model, work, "log", budget, checks)
        log.server.wait_ready()
        rng = random.Random(0)
        for arm in (off, log, log):  # warm up; the second round calibrates the rotating pass
            arm.measure(rng, rounds)
            arm.medians.clear()
        period = read_period(log)
        for pair in range(pairs):
            for arm in (off, log) if pair % 2 == 0 else (log, off):
                arm.measure(rng, rounds)
        check_detection(log)
    finally:
        for arm in (off, log):
            if arm is not None:
                arm.server.stop()
    ratios = [100 * (b / a - 1) for a, b in zip(off.medians, log.medians, strict=True)]
    mean, spread = statistics.mean(ratios), statistics.stdev(ratios) if len(ratios) > 1 else math.nan
    print(
        f"| {name} | {statistics.median(off.medians):.2f} | {statistics.median(log.medians):.2f} | "
        f"{statistics.median(ratios):+.2f} % | {mean:+.2f} ± {2.26 * spread / math.sqrt(len(ratios)):.2f} % | "
        f"{min(ratios):+.2f} .. {max(ratios):+.2f} % | {period} | {100 * bound:.0f} % |",
        flush=True,
    )
    return statistics.median(ratios) <= 100 * bound


def read_period(arm: Arm) -> int:
    """Forwards in which the rotating pass covers the pool."""
    periods = re.findall(r"content pass folds .* every (\d+) forwards", arm.server.log.read_text())
    if not periods or int(periods[-1]) > MAX_PERIOD_FORWARDS:
        raise SystemExit(f"the rotating pass takes {periods} forwards, not at most {MAX_PERIOD_FORWARDS}; no figures")
    return int(periods[-1])


def check_detection(arm: Arm) -> None:
    """The injected fault was found, and nothing else."""
    events = read_events(arm.events_path)
    injected = [event for event in events if event["event"] == "injected"]
    found = {event["slot"] for event in events if event["event"] == "violation"}
    if not injected or found != set(injected[0]["slots"]):
        raise SystemExit(
            f"detection self-check failed: injected {injected}, reported slots {sorted(found)}; no figures"
        )


def main() -> int:
    """Run the comparison and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10, help="Alternating pairs of rounds per model. Default: 10.")
    parser.add_argument("--model", choices=list(SHAPES), action="append", help="Measure this model only.")
    parser.add_argument("--checks", help=f"Checks to run, such as {FIRST_CHECKS}, which has bounds of its own.")
    options = parser.parse_args()
    print(
        f"{CLIENTS} clients, {PROMPT_TOKENS} in, {NEW_TOKENS} out, pool of {POOL_TOKENS} tokens, "
        f"{options.pairs} pairs, checks: {options.checks or 'all'}"
    )
    print("| model | off, ms | log, ms | median of ratios | mean ± 95 % | range | forwards a pass | bound |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvcanary-bench-") as folder:
        names = options.model or SHAPES
        held = [compare(name, options.pairs, Path(folder), options.checks) for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
