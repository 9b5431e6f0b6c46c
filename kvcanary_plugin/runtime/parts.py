"""What the guard of one pool is made of, and in which order it has to be made."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Config
from ..kernels.backend import pick_backend
from ..pool_patcher.spaces import GuardedPool
from ..report.reporter import Reporter
from .ahead import Ahead
from .diagnosis import RowHistory
from .judge import Judge
from .launches import CapturedDecode, Launches
from .ledger import Ledger
from .opening import Opening
from .order import Order
from .passes import Passes
from .settings import Settings
from .space import Space
from .state import StateWatch
from .step import MAX_IN_FLIGHT
from .traffic import Traffic
from .truth import TruthTable
from .weights import WeightUpdates


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one guard; :class:`Guard` says what those are that it shows.

    Attributes:
        order: of forwards and what they build on; None where it is not checked.
        captured: device graphs of decode steps; None where there are none.
    """

    spaces: tuple[Space, ...]
    states: tuple[StateWatch, ...]
    ledger: Ledger | None
    truth: TruthTable
    judge: Judge
    weights: WeightUpdates
    traffic: Traffic
    passes: Passes
    order: Order | None
    launches: Launches
    captured: CapturedDecode | None
    opening: Opening
    settings: Settings
    ahead: Ahead


def make_parts(pool: GuardedPool, config: Config, reporter: Reporter, rank: int, *, has_owners: bool) -> Parts:
    """Make the parts of a guard of ``pool``; the arguments are those of :class:`Guard`."""
    device = pool.req_to_token.device
    backend = pick_backend(device)
    truth, history = TruthTable(pool.req_to_token.shape[0], pool.fingerprint), RowHistory()
    main = Space(pool.main, 0, pool, config, backend, MAX_IN_FLIGHT)
    numbered = enumerate(pool.companions, 1)
    companions = [Space(slots, index, pool, config, backend, MAX_IN_FLIGHT, main) for index, slots in numbered]
    spaces = (main, *companions)
    states = tuple(StateWatch(state, config, backend, MAX_IN_FLIGHT) for state in pool.states)
    ledger: Ledger | None = None
    if "ownership" in config.checks and has_owners and not pool.shares_slots:
        ledger = Ledger(allocator=pool.allocator, req_to_token=pool.req_to_token, records=main.records, backend=backend)
    judge = Judge(pool, spaces, states, ledger, truth, history, config, reporter, backend.scatter_req_token_ids, rank)
    weights = WeightUpdates(truth, main.records, reporter, judge.diagnosis, is_strict=config.has_strict_weights)
    passes = Passes(backend, spaces, device, reporter.counts)
    order = Order(backend, device) if "order" in config.checks and Order.is_needed(device) else None
    launches = Launches(backend, spaces, ledger, order, rows_tell="chain" in config.checks)
    captured = CapturedDecode(launches, device, len(companions)) if CapturedDecode.serves(device) else None
    settings = Settings(config, spaces, ledger, order, judge, launches, captured, passes, on_host=device.type == "cpu")
    ahead = Ahead(launches, spaces, ledger, device)
    if Ahead.serves(backend, device):
        ahead.start()
    return Parts(
        spaces=spaces,
        states=states,
        ledger=ledger,
        truth=truth,
        judge=judge,
        weights=weights,
        traffic=Traffic(pool, spaces, ledger, truth, backend),
        passes=passes,
        order=order,
        launches=launches,
        captured=captured,
        opening=Opening(truth, history, ledger, weights, captured, device, len(companions)),
        settings=settings,
        ahead=ahead,
    )
