"""What of a guard can be different from one forward to the next: checks, consequences, budget; and audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config import Config
from .audit import Audit
from .idle import IdlePass
from .judge import Judge, Policy
from .launches import CapturedDecode, Launches
from .ledger import Ledger
from .order import Order
from .space import Space


class Settings:
    """The settings of one guard.

    Attributes:
        possible: the checks that were asked for at the start and that this pool allows.
        missing: checks that were asked for and that this pool does not allow, though there is something to find.
        scrub_budget: share of the time of a forward that the rotating passes may add.
        audit: the pass over everything that was asked for last, if any.
    """

    def __init__(
        self,
        config: Config,
        spaces: Sequence[Space],
        ledger: Ledger | None,
        order: Order | None,
        judge: Judge,
        launches: Launches,
        captured: CapturedDecode | None,
        idle: IdlePass,
        *,
        on_host: bool,
    ) -> None:
        """``on_host``: the pool lies in host memory, where everything is done in the order in which it is asked for."""
        self._spaces = spaces
        self._ledger = ledger
        self._scrubbers = [space.scrubber for space in spaces if space.scrubber is not None]
        self._judge = judge
        self._launches = launches
        self._captured = captured
        self._idle = idle
        absent = {
            "content": spaces[0].scrubber is None,
            "presence": all(space.presence is None for space in spaces),
            "ownership": ledger is None,
            "order": order is None,
        }
        self.possible = tuple(check for check in config.checks if not absent.get(check, False))
        needless = ("order",) if on_host else ()
        self.missing = tuple(check for check in config.checks if check not in (*self.possible, *needless))
        self.scrub_budget = config.scrub_budget
        self.audit: Audit | None = None

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks in force."""
        return tuple(check for check in self.possible if check not in self._judge.muted)

    def set_checks(self, checks: Sequence[str]) -> None:
        """Switch off all of :attr:`possible` but these. What they keep of the pool stays up to date."""
        self._judge.muted = frozenset(self.possible) - frozenset(checks)
        for space in self._spaces:
            space.verifies = "chain" in checks
            space.folds = "content" in checks and space.scrubber is not None
            space.poisons = "presence" in checks and space.presence is not None
        self._launches.rows_tell = "chain" in checks
        if self._ledger is not None:
            self._ledger.is_muted = "ownership" not in checks
        if self._captured is not None:
            self._captured.forget()
        if "content" not in checks:
            self.stop_audit("the check content was switched off")

    def set_mode(self, mode: str, policy: Policy | None) -> None:
        """What a violation does from now on; ``policy`` counts in ``quarantine`` only."""
        self._judge.stops = mode == "raise"
        self._judge.policy = policy if mode == "quarantine" else None

    def set_scrub_budget(self, budget: float) -> None:
        """Another share of the time of a forward for the rotating passes together; see :meth:`Scrubber.set_budget`."""
        self.scrub_budget = budget
        for scrubber in self._scrubbers:
            scrubber.set_budget(budget / len(self._scrubbers))

    def start_audit(self, violations: Mapping[str, int]) -> None:
        """Go over the whole pool now, as fast as serving allows. ``violations``: by check, as counted so far."""
        number = 1 if self.audit is None else self.audit.number + 1
        self.audit = Audit(number, self._scrubbers, violations)
        self._idle.is_woken = True

    def stop_audit(self, why: str) -> None:
        """Whoever waits for an audit under way need not wait any more."""
        if self.audit is not None:
            self.audit.stop(why)
