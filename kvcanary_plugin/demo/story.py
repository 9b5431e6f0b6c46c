"""``kvcanary demo``: first what damaged KV does to an answer while nobody looks, then what the canary makes of it."""

from __future__ import annotations

import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..report.collector import summarise
from ..report.decoding import decode_fields
from ..report.drill import is_consequence, is_hit
from ..report.events import Injected, read_violation
from ..report.jsonl import read_events
from ..report.page import write_page
from ..report.text import describe, render_block
from . import saboteur
from .model import VOCABULARY, make_model
from .server import Server
from .traffic import Traffic

CLEAN_FORWARDS = 500
FORWARDS_A_FAULT = 300
SPEC = ";".join(
    f"{fault}@{CLEAN_FORWARDS + index * FORWARDS_A_FAULT}{options}"
    for index, (fault, options) in enumerate(
        (
            ("flip_running", ":layer=2,half=V"),
            ("flip_cached", ":layer=0,half=K"),
            ("swap_entries", ""),
            ("alias_row", ""),
            ("overwrite_slot", ""),
        )
    )
)
FAULT_COUNT = SPEC.count(";") + 1
POOL_TOKENS = 8192
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault.

    Attributes:
        injected: the ``injected`` event.
        found: the violations that name its slots by the right check.
    """

    injected: dict[str, Any]
    found: list[dict[str, Any]]

    @property
    def is_found(self) -> bool:
        """Every damaged slot was reported by the check that must report it; for a store skipped, every request; of a
        stretch of a row, any entry.
        """
        if self.injected.get("entries"):
            return bool(self.found)
        if not self.injected["slots"] and "requests" in self.injected:
            return {violation["request"] for violation in self.found} == set(self.injected["requests"])
        if not self.injected["slots"]:
            return bool(self.found)
        return {violation["slot"] for violation in self.found} == set(self.injected["slots"])

    @property
    def forwards(self) -> int | None:
        """Forwards from the fault to its first report."""
        return (
            min((violation["step"] for violation in self.found), default=0) - self.injected["step"]
            if self.found
            else None
        )

    @property
    def is_right(self) -> bool:
        """Found in time, at the right position, and in the right layer and half where one was damaged."""
        if not self.is_found or self.forwards is None or self.forwards > self.injected["bound_forwards"]:
            return False
        places = dict(zip(self.injected["slots"], self.injected["positions"], strict=False))
        return all(
            violation["position"] == places.get(violation["slot"], violation["position"])
            and violation["layer"] == self.injected.get("layer")
            and violation["half"] == self.injected.get("half")
            for violation in self.found
        )


def match_outcomes(events: list[dict[str, Any]]) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """Pair injected faults with the violations they caused; also returns the violations nobody caused.

    A violation is the latest fault's that it fits, as two may hit one slot. What another check says of a fault is left
    out, see :func:`~kvcanary_plugin.report.drill.is_consequence`.
    """
    unexplained = [(event, read_violation(event).violation) for event in events if event["event"] == "violation"]
    outcomes = []
    for event in reversed([event for event in events if event["event"] == "injected"]):
        injected = decode_fields(Injected, event)
        outcomes.append(Outcome(event, [told for told, violation in unexplained if is_hit(injected, violation)]))
        unexplained = [
            (told, violation)
            for told, violation in unexplained
            if not is_hit(injected, violation) and not is_consequence(injected, violation)
        ]
    return outcomes[::-1], [told for told, _ in unexplained]


def run_demo(console: Console) -> int:
    """Run both parts. Returns the exit code: 0 if every fault was found in the right place and nothing else was."""
    # Servers run in sessions of their own: whoever ends the demo must not leave one behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="kvcanary-demo-") as folder:
        work = Path(folder)
        console.print("Making a tiny Llama of random weights ...", highlight=False)
        model = make_model(work / "model")
        show_silent_damage(console, model, work)
        code = hunt_faults(console, model, work)
        offer_report(console, work / "events.jsonl")
        return code


def show_silent_damage(console: Console, model: Path, work: Path) -> None:
    """One prompt, asked three times of a server without the canary, whose memory flips one bit before the third."""
    console.rule("[bold]1. Without the canary")
    prompt = [random.Random(4).randrange(3, VOCABULARY) for _ in range(160)]
    # The first fills the prefix cache, the other two hit it.
    environment = {saboteur.VARIABLE: "2"}
    flags = [f"--max-total-tokens={POOL_TOKENS}"]
    with Server(model, flags, work / "off.log", environment=environment, launcher=saboteur.__name__) as server:
        answers = [server.generate(prompt, 12) for _ in range(3)]
    for number, answer in enumerate(answers, start=1):
        cached = answer["meta_info"]["cached_tokens"]
        if number == 3:
            console.print("  (now one bit of one cached V flips)", highlight=False)
        console.print(f"  HTTP 200  {cached:>3} tokens cached  answer {answer['output_ids']}", highlight=False)
    outputs = [answer["output_ids"] for answer in answers]
    if outputs[0] == outputs[1] != outputs[2]:
        console.print("  Same prompt, another answer, no error anywhere.\n", highlight=False)
    else:
        console.print("  (This time the flipped bit did not change the answer.)\n", highlight=False)


def hunt_faults(console: Console, model: Path, work: Path) -> int:
    """Serve traffic with the canary on, inject the faults one after another, print every report and the table."""
    console.rule("[bold]2. With --kvcanary log")
    log = work / "events.jsonl"
    flags = [
        f"--max-total-tokens={POOL_TOKENS}",
        "--kvcanary=log",
        f"--kvcanary-log={log}",
        f"--kvcanary-inject={SPEC}",
    ]
    printed = 0
    with Server(model, flags, work / "on.log", environment={"KVCANARY_ALLOW_INJECT": "1"}) as server:
        with Traffic(server) as traffic, _progress(console) as progress:
            bar = progress.add_task("faults found", total=FAULT_COUNT, requests=0)
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                events = read_events(log)
                outcomes, _ = match_outcomes(events)
                for event in [event for event in events if event["event"] in ("injected", "violation")][printed:]:
                    printed += 1
                    progress.console.print(_render_event(event), markup=False, highlight=False)
                found = sum(outcome.is_found for outcome in outcomes)
                progress.update(bar, completed=found, requests=traffic.counts["answered"])
                if found == FAULT_COUNT or server.process.poll() is not None:
                    break
                time.sleep(0.2)
        counts = traffic.counts
    outcomes, unexplained = match_outcomes(read_events(log))
    console.print(_table(outcomes))
    console.print(
        f"{counts['answered']} requests answered ({counts['hit']} with cached tokens, {counts['aborted']} aborted); "
        f"{len(unexplained)} violations that no fault explains.",
        highlight=False,
    )
    good = len(outcomes) == FAULT_COUNT and all(outcome.is_right for outcome in outcomes) and not unexplained
    console.print(
        "[green]Every fault was found in the right place; nothing else was reported." if good else "[red]FAILED"
    )
    if not good:
        console.print((work / "on.log").read_text()[-4000:], markup=False, highlight=False)
    return 0 if good else 1


def offer_report(console: Console, log: Path) -> None:
    """Keep the log, write the same as a page, and say where both are and how to see it as text."""
    kept = Path(tempfile.mkdtemp(prefix="kvcanary-demo-report-"))
    log, page = Path(shutil.copy(log, kept)), kept / "report.html"
    write_page(summarise([log]), page, top=0)
    console.print(f"\nThe same as a page: {page}", highlight=False, markup=False, soft_wrap=True)
    command = shlex.join(["kvcanary", "report", str(log)])
    console.print(f"The same as text:   {command}", highlight=False, markup=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[requests]} requests answered"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _render_event(event: dict[str, Any]) -> str:
    if event["event"] == "violation":
        found = read_violation(event)
        return render_block(describe(found.violation, (found.cause or "", found.evidence)))
    shown = ("fault", "step", "layer", "half", "bit", "slots", "positions", "bound_forwards")
    return "injected " + ", ".join(f"{name}={event[name]}" for name in shown if name in event)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="What was injected and what was found")
    for heading in ("fault", "found by", "after forwards", "promised within", "where", "right"):
        table.add_column(heading)
    for outcome in outcomes:
        first = outcome.found[0] if outcome.found else None
        where = "-"
        if first is not None:
            place = f"layer {first['layer']} {first['half']}, " if first["layer"] is not None else ""
            where = f"{place}slot {first['slot']}, position {first['position']}"
        table.add_row(
            outcome.injected["fault"],
            outcome.injected["check"] if outcome.is_found else "NOT FOUND",
            "-" if outcome.forwards is None else str(outcome.forwards),
            str(outcome.injected["bound_forwards"]),
            where,
            "yes" if outcome.is_right else "NO",
        )
    return table
