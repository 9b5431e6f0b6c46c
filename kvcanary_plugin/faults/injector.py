"""Runs the faults of ``--kvcanary-inject`` at their forwards and says in the log what each of them did."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..config import BYTE_CHECKS
from ..errors import ConfigError
from ..report.reporter import Reporter
from ..report.text import quote
from . import disaggregation, host, library, speculation, stores
from .identity import IDENTITY_FAULTS
from .library import Fault
from .order import ORDER_FAULTS
from .ownership import OWNERSHIP_FAULTS
from .parts import PART_FAULTS

if TYPE_CHECKING:
    import torch

    from ..pool_patcher.sources import SourceTable
    from ..runtime.guard import Guard
    from ..runtime.step import Step

logger = logging.getLogger("kvcanary")

BEFORE_FORWARD = library.FAULTS | stores.BEFORE_FORWARD | PART_FAULTS | IDENTITY_FAULTS | OWNERSHIP_FAULTS
BEFORE_FORWARD |= speculation.STORE_FAULTS | host.HOST_FAULTS | disaggregation.FLIGHT_FAULTS
AT_LAUNCH = stores.AT_LAUNCH | ORDER_FAULTS | host.LAUNCH_FAULTS
AT_ARRIVAL = disaggregation.ARRIVAL_FAULTS
FAULTS = (*BEFORE_FORWARD, *AT_LAUNCH, *AT_ARRIVAL, *speculation.PATH_FAULTS)
# The check that finds a fault, where that is not chain.
FOUND_BY = {
    **dict.fromkeys(("flip_running", "flip_cached", "overwrite_slot", "drop_part", "drop_state"), "content"),
    **dict.fromkeys(stores.BEFORE_FORWARD, "presence"),
    **dict.fromkeys(IDENTITY_FAULTS, "identity"),
    "other_image": "chain",
    **dict.fromkeys(OWNERSHIP_FAULTS | stores.AT_LAUNCH, "ownership"),
    **dict.fromkeys(ORDER_FAULTS, "order"),
    **speculation.FOUND_BY,
    **host.FOUND_BY,
    **disaggregation.FOUND_BY,
}
OPTIONS = ("layer", "half", "bit", "seed", "rank")
_OF_TREE = ("free_cached", "abort_chunk", "foreign_entry")


@dataclass(slots=True)
class Planned:
    """One fault that is still to come: its name, the earliest forward, and options."""

    name: str
    forward: int
    options: dict[str, str] = field(default_factory=dict)


class Injector:
    """Injects planned faults one after another, each at the first suitable forward not before its own."""

    def __init__(self, planned: list[Planned]) -> None:
        self._planned = planned
        self._waits: list[Callable[[], None]] = []
        self._restores: list[Callable[[], None]] = []
        self._strikes: list[Callable[[], None]] = []

    @classmethod
    def parse(cls, spec: str) -> Injector:
        """Read ``FAULT@FORWARD[:key=value,...][;...]``.

        Raises:
            ConfigError: names the part that cannot be read.
        """
        planned = []
        for part in filter(None, (part.strip() for part in spec.split(";"))):
            head, _, tail = part.partition(":")
            name, _, forward = head.partition("@")
            options = dict(pair.partition("=")[::2] for pair in filter(None, tail.split(",")))
            if name not in FAULTS:
                raise ConfigError(
                    f"kvcanary: --kvcanary-inject {part!r}: no fault {name!r}; there are {', '.join(FAULTS)}"
                )
            if not forward.isdecimal() or not forward.isascii():
                raise ConfigError(
                    f"kvcanary: --kvcanary-inject {part!r}: {forward!r} is not a forward number, as in {name}@300"
                )
            for key in options:
                if key not in OPTIONS:
                    raise ConfigError(
                        f"kvcanary: --kvcanary-inject {part!r}: no option {key!r}; there are {', '.join(OPTIONS)}"
                    )
            for key in ("layer", "bit", "rank"):
                if key in options and not (options[key].isascii() and options[key].isdecimal()):
                    raise ConfigError(f"kvcanary: --kvcanary-inject {part!r}: {key}={options[key]} is not a number")
            planned.append(Planned(name, int(forward), options))
        if not planned:
            raise ConfigError(f"kvcanary: --kvcanary-inject {spec!r} names no fault; there are {', '.join(FAULTS)}")
        return cls(planned)

    def keep_rank(self, rank: int) -> None:
        """Leave out what is for another rank."""
        self._planned = [each for each in self._planned if int(each.options.get("rank", rank)) == rank]

    def check_against(self, table: SourceTable, checks: Sequence[str]) -> None:
        """Make sure that every fault can be injected into a pool with these sources, and be found by these checks.

        Raises:
            ConfigError: names the fault, the value and the limit.
        """
        for planned in self._planned:
            check = FOUND_BY.get(planned.name, "chain")
            if check not in checks or (check in BYTE_CHECKS and not table.sources):
                raise ConfigError(
                    f"kvcanary: --kvcanary-inject {planned.name}: the check that finds it, {check}, is off or cannot "
                    "be in this server; turn it on or leave the fault out"
                )
            layers = sorted({layer for layer, _ in table.names})
            layer = planned.options.get("layer")
            if layer is not None and int(layer) not in layers:
                limit = f"the pool has {layers[0]} to {layers[-1]}"
                raise ConfigError(f"kvcanary: --kvcanary-inject {planned.name}: layer={layer}; {limit}")
            halves = sorted({half for _, half in table.names})
            half = planned.options.get("half")
            if half is not None and half not in halves:
                raise ConfigError(
                    f"kvcanary: --kvcanary-inject {planned.name}: half={half}; the pool has {', '.join(halves)}"
                )
            bits = min((source.read_bytes * 8 for source in table.sources), default=0)
            bit = planned.options.get("bit")
            if bit is not None and int(bit) >= bits:
                raise ConfigError(
                    f"kvcanary: --kvcanary-inject {planned.name}: bit={bit}; a row has bits 0 to {bits - 1}"
                )

    def at_launch(self, guard: Guard, step: Step, reporter: Reporter) -> None:
        """The scheduler launches a batch: inject the next fault if it is one that has to be in place by then."""
        self._end_waits()
        self._inject(AT_LAUNCH, self._waits, guard, step, reporter)

    def before_forward(self, guard: Guard, step: Step, reporter: Reporter) -> None:
        """Inject the next fault if its time has come and the batch suits it."""
        self._end_waits()
        self._inject(BEFORE_FORWARD, self._restores, guard, step, reporter)

    def at_arrival(self, guard: Guard, step: Step, reporter: Reporter) -> None:
        """The KV of a request has come from another server: inject the next fault if it is one of the way."""
        self._inject(AT_ARRIVAL, self._restores, guard, step, reporter)

    def at_commit(self, guard: Guard, step: Step, accept_lens: torch.Tensor, reporter: Reporter) -> None:
        """The rows of the accepted draft tokens were moved: inject the next fault if it is one of that."""
        self._inject(speculation.for_paths(accept_lens), self._restores, guard, step, reporter)

    def _end_waits(self) -> None:
        while self._waits:
            self._waits.pop()()

    def _inject(
        self,
        faults: dict[str, Fault],
        restores: list[Callable[[], None]],
        guard: Guard,
        step: Step,
        reporter: Reporter,
    ) -> None:
        if not self._planned or step.number < self._planned[0].forward or self._planned[0].name not in faults:
            return
        planned = self._planned[0]
        if lack := find_lack(planned.name, guard):
            logger.warning("kvcanary: fault %s@%d is left out: %s", planned.name, planned.forward, lack)
            del self._planned[0]
            return
        rng = random.Random(planned.options.get("seed", f"{planned.name}@{planned.forward}"))
        done = faults[planned.name](guard, step, rng, planned.options)
        if done is None:
            return
        del self._planned[0]
        if done.restore is not None:
            restores.append(done.restore)
        if done.strike is not None:
            self._strikes.append(done.strike)
        bound = 0 if done.check != "content" or guard.scrubber is None else guard.scrubber.period_forwards
        fields = {
            "fault": planned.name,
            "step": step.number,
            "check": done.check,
            "slots": list(done.slots),
            "positions": list(done.positions),
            "bound_forwards": bound,
            **done.fields,
        }
        shown = (f"{key}={quote(value) if key in ('request', 'other') else value}" for key, value in fields.items())
        logger.warning("kvcanary: injected %s", ", ".join(shown))
        reporter.event("injected", fields)

    def behind_forward(self) -> None:
        """Do what must look as if the forward itself had done it."""
        while self._strikes:
            self._strikes.pop()()

    def after_forward(self, guard: Guard) -> None:
        """Undo what was to last for one forward only."""
        del guard
        while self._restores:
            self._restores.pop()()


def find_lack(name: str, guard: Guard) -> str | None:
    """Why a fault cannot be injected into, or found in, what ``guard`` guards; None if it can."""
    if name == "drop_state" and not guard.states:
        return "the model has no state that every forward rewrites"
    if name == "free_in_window" and all(space.slots.window is None for space in guard.spaces[1:]):
        return "the pool has no space of a sliding window"
    if name in host.FOUND_BY and guard.traffic.transfers is None:
        return "no KV goes to host memory and back in this server"
    if name in disaggregation.FOUND_BY and (guard.traffic.handover is None or not guard.traffic.handover.receives):
        return "no KV comes from another server"
    if name in stores.AT_LAUNCH and not guard.pool.table.sources:
        return "what it stores elsewhere could not be put right with --kvcanary-content none"
    if name in _OF_TREE and guard.ledger is not None and guard.ledger.may_share:
        return "which slots this prefix cache holds is not known"
    return None
