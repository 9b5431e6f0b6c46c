"""Hours of clean traffic, in short: real CPU servers in several modes, every check on, and not one report allowed.

Usage: ``python benchmarks/server/soak.py [--minutes 30]``. The time is shared out among the modes. In each, clients
send prompts of mixed lengths that share prefixes, some are aborted, a small pool makes SGLang retract, and in between
the cache is flushed and the weights are updated with a flush. Exits 1 if anything was reported or a guard let go.

In the mode "adapters" each request is for one of two LoRA adapters or for none. SGLang's LoRA layers pin host memory
without asking whether there is a device, and where there is none its server ends at the start ("Found no NVIDIA
driver"); so that mode is launched by ``unpinned``, which takes the pinning out. SGLang's backend ``torch_native`` then
runs on a CPU as it is; the others are Triton kernels.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters import make_adapter

from kvcanary_plugin.demo.model import make_model
from kvcanary_plugin.demo.server import Server
from kvcanary_plugin.demo.traffic import Traffic
from kvcanary_plugin.report.jsonl import read_events

SMALL = ("--max-total-tokens=1200", "--chunked-prefill-size=64", "--schedule-conservativeness=0.05")
PAGED = ("--max-total-tokens=2048", "--chunked-prefill-size=128")
MODES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "page 1, overlap, small pool": (SMALL, {}),
    "page 1, no overlap, mixed chunks": ((*SMALL, "--disable-overlap-schedule", "--enable-mixed-chunk"), {}),
    "page 16": (("--page-size=16", *PAGED), {"TRITON_INTERPRET": "1"}),
    "page 64, no overlap": (("--page-size=64", "--disable-overlap-schedule", *PAGED), {"TRITON_INTERPRET": "1"}),
    "page 1, large pool": (("--max-total-tokens=20000",), {}),
    "adapters": (("--lora-backend=torch_native", "--max-loras-per-batch=3", *PAGED), {}),
}
ADAPTERS = ("one", "two")
QUIET = ("attached", "learned", "weights", "mixed_weights", "heartbeat")
BETWEEN_SECONDS = 45.0


class Client(Server):
    """A server whose requests take turns among LoRA adapters and none, where there are any."""

    def __init__(self, model: Path, flags: Sequence[str], log: Path, adapters: Sequence[str], **more: Any) -> None:
        self._turns = itertools.cycle((None, *adapters))
        super().__init__(model, flags, log, **more)

    def generate(self, tokens: Sequence[int], new_tokens: int, **more: Any) -> dict[str, Any]:
        adapter = next(self._turns)
        return super().generate(tokens, new_tokens, **({"lora_path": adapter} if adapter else {}), **more)


def soak(name: str, model: Path, seconds: float, folder: Path) -> dict[str, Any]:
    """One mode; returns its counts and the events that should not be there."""
    flags, environment = MODES[name]
    log = folder / f"{name}.jsonl"
    flags = ("--kvcanary=log", f"--kvcanary-log={log}", "--kvcanary-scrub-budget=0.02", *flags)
    launcher = "sglang.launch_server"
    adapters: tuple[str, ...] = ()
    if name == "adapters":
        made = [make_adapter(folder / adapter, model, seed) for seed, adapter in enumerate(ADAPTERS)]
        flags += ("--lora-paths", *(f"{path.name}={path}" for path in made))
        adapters, launcher = ADAPTERS, "unpinned"
        environment = {**environment, "PYTHONPATH": str(Path(__file__).parent)}
    with Client(model, flags, folder / f"{name}.log", adapters, environment=environment, launcher=launcher) as server:
        deadline, round_number, counts = time.monotonic() + seconds, 0, dict.fromkeys(("sent", "hit", "aborted"), 0)
        while time.monotonic() < deadline:
            with Traffic(server, clients=8, seed=round_number, abort_share=0.05) as traffic:
                time.sleep(min(BETWEEN_SECONDS, max(1.0, deadline - time.monotonic())))
            for key in counts:
                counts[key] += traffic.counts[key]
            if traffic.counts["failed"]:
                raise SystemExit(f"{name}: {traffic.counts['failed']} requests failed\n{server.tail()}")
            round_number += 1
            time.sleep(3)  # SGLang ends itself if weights are updated while an aborted request still runs
            path, body = (
                ("/flush_cache", {}) if round_number % 2 else ("/update_weights_from_disk", {"model_path": str(model)})
            )
            try:
                server.post(path, body)
            except OSError as error:
                raise SystemExit(f"{name}: {path}: {error}\n{server.tail()}") from error
            time.sleep(31 if deadline - time.monotonic() < BETWEEN_SECONDS else 1)  # the last heartbeat has it all
        if server.process.poll() is not None:
            raise SystemExit(f"{name}: the server ended\n{server.tail()}")
    events = read_events(log)
    beats = [event for event in events if event["event"] == "heartbeat"]
    last = beats[-1] if beats else {}
    done = {key: last.get(key, 0) for key in ("forwards", "verified", "stored", "folded")}
    return {**counts, **done, "bad": [event for event in events if event["event"] not in QUIET]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of traffic in all, shared among the modes")
    parser.add_argument("--mode", choices=MODES, action="append", help="only this one; may be given again")
    arguments = parser.parse_args()
    modes = arguments.mode or list(MODES)
    seconds = arguments.minutes * 60 / len(modes)
    bad: list[dict[str, Any]] = []
    total = 0
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model")
        for mode in modes:
            result = soak(mode, model, seconds, Path(name))
            bad += result.pop("bad")
            total += result["verified"] + result["folded"]
            print(f"{mode}: {', '.join(f'{value:,} {key}' for key, value in result.items())}", flush=True)
    print(f"{total:,} slot verifications, {len(bad)} reports")
    for event in bad[:20]:
        print(event)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
