"""What of a guard can be different from one forward to the next: checks, consequences, budget."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import Config
from .judge import Judge, Policy
from .launches import CapturedDecode, Launches
from .ledger import Ledger
from .order import Order
from .passes import Passes
from .space import Space


class Settings:
    """The settings of one guard.

    Attributes:
        possible: the checks that were asked for at the start and that this pool allows.
        missing: checks that were asked for and that this pool does not allow, though there is something to find.
        scrub_budget: share of the time of a forward that the rotating passes may add.
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
        passes: Passes,
        *,
        on_host: bool,
    ) -> None:
        """``on_host``: the pool lies in host memory, where everything is done in the order in which it is asked for."""
        self._spaces = spaces
        self._ledger = ledger
        self._judge = judge
        self._launches = launches
        self._captured = captured
        self._passes = passes
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
            self._passes.stop_audit("the check content was switched off")

    def set_mode(self, mode: str, policy: Policy | None) -> None:
        """What a violation does from now on; ``policy`` counts in ``quarantine`` only."""
        self._judge.stops = mode == "raise"
        self._judge.policy = policy if mode == "quarantine" else None

    def set_scrub_budget(self, budget: float) -> None:
        """Another share of the time of a forward for the rotating passes together; see :meth:`Scrubber.set_budget`."""
        self.scrub_budget = budget
        self._passes.set_budget(budget)
