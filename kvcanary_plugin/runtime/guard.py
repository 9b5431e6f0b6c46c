"""The guard of one model runner: what happens before and after each of its forwards, and when the verdict is read.

Everything of the scheduler's is read in :meth:`announce` and :meth:`before`; once the forward is launched its rows may
already be changing, so :meth:`after` uses private copies only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import Config
from ..errors import GuardError, UncoveredError
from ..faults.injector import Injector
from ..kernels.backend import pick_backend
from ..pool_patcher.records import ShadowRecords
from ..pool_patcher.spaces import GuardedPool
from ..report.reporter import Reporter
from .ahead import Ahead
from .batch import BatchBuffers
from .diagnosis import RowHistory
from .figures import Figures, Sweep
from .idle import IdlePass
from .images import NO_MARKS, locate_marks
from .judge import Judge, Policy
from .launches import MAX_CAPTURED_REQUESTS, CapturedDecode, Launches
from .ledger import Ledger
from .order import Order
from .scrubber import Scrubber
from .settings import Settings
from .space import Space
from .speculation import Drafts, Trees
from .state import StateWatch
from .step import MAX_IN_FLIGHT, Step
from .traffic import Traffic
from .truth import Request, TruthTable
from .weights import WeightUpdates


class Guard:
    """Guards the pool of one model runner.

    Attributes:
        pool: what is guarded.
        spaces: its numberings of slots under guard, the main one first.
        states: its per-request states under guard.
        ledger: who owns which slot, None where that is not checked.
        truth: the true prefix hashes.
        forwards: forwards guarded so far; the number of the latest step.
        verified, stored: see :class:`Figures`.
        rank: of this process, for reports.
        traffic: what happens to slots between forwards.
        ahead: compiles its kernels ahead of their first use, where there are kernels.
        settings: what of it can be changed while it runs.
    """

    def __init__(
        self, pool: GuardedPool, config: Config, reporter: Reporter, *, rank: int = 0, has_owners: bool = True
    ) -> None:
        """``has_owners``: a slot belongs to one request at a time, so that it can be said whose it is."""
        device = pool.req_to_token.device
        self.pool = pool
        self.config = config
        self.forwards = 0
        self.rank = rank
        self.truth = TruthTable(pool.req_to_token.shape[0], pool.fingerprint)
        self._reporter = reporter
        self._on_host = device.type == "cpu"
        self._history = RowHistory()
        backend = pick_backend(device)
        main = Space(pool.main, 0, pool, config, backend, MAX_IN_FLIGHT)
        companions = enumerate(pool.companions, 1)
        self.spaces = (
            main,
            *(Space(slots, index, pool, config, backend, MAX_IN_FLIGHT, main) for index, slots in companions),
        )
        self._scrubbers = [space.scrubber for space in self.spaces if space.scrubber is not None]
        self.states = tuple(StateWatch(state, config, backend, MAX_IN_FLIGHT) for state in pool.states)
        self.ledger: Ledger | None = None
        if "ownership" in config.checks and has_owners and not pool.shares_slots:
            self.ledger = Ledger(
                allocator=pool.allocator, req_to_token=pool.req_to_token, records=self.records, backend=backend
            )
        self._judge = Judge(
            pool,
            self.spaces,
            self.states,
            self.ledger,
            self.truth,
            self._history,
            config,
            reporter,
            backend.scatter_req_token_ids,
            rank,
        )
        rings = [space.ring for space in self.spaces] + [watch.ring for watch in self.states]
        self._steps = [Step([ring[place] for ring in rings], device) for place in range(MAX_IN_FLIGHT)]
        self._launched: deque[tuple[Any, Step]] = deque()
        self._announced: Step | None = None
        self._running: Step | None = None
        self._stream: Any = None
        self._weights = WeightUpdates(
            self.truth, self.records, reporter, self._judge.diagnosis, is_strict=config.has_strict_weights
        )
        self._backend = backend
        self.traffic = Traffic(pool, self.spaces, self.ledger, self.truth, backend)
        self.verified = self.stored = 0
        self._idle = IdlePass(backend, self.spaces, device)
        self._batch = BatchBuffers(device, len(pool.companions))
        self._order: Order | None = None
        if "order" in config.checks and Order.is_needed(device):
            self._order = Order(backend, device)
        self._launches = Launches(backend, self.spaces, self.ledger, self._order, rows_tell="chain" in config.checks)
        self._captured = (
            CapturedDecode(self._launches, device, len(pool.companions)) if CapturedDecode.serves(device) else None
        )
        self.settings = Settings(
            config,
            self.spaces,
            self.ledger,
            self._order,
            self._judge,
            self._launches,
            self._captured,
            self._idle,
            on_host=self._on_host,
        )
        self.ahead = Ahead(self._launches, self.spaces, self.ledger, device)
        if Ahead.serves(backend, device):
            self.ahead.start()
        self.injector = Injector.parse(config.inject) if config.inject else None
        if self.injector is not None:
            self.injector.keep_rank(rank)
            self.injector.check_against(pool.table, self.settings.possible)

    @property
    def policy(self) -> Policy | None:
        """What is done about violations beyond reporting them; None for nothing."""
        return self._judge.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self._judge.policy = policy

    @property
    def stream(self) -> Any:
        """Where forwards are enqueued; None before the first one, and on a CPU."""
        return self._stream

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks in force."""
        return self.settings.checks

    @property
    def resident_bytes(self) -> int:
        """Device bytes kept beside the pool."""
        host = None if self.traffic.transfers is None else self.traffic.transfers.host
        parts = self.ledger, self._order, host, self.traffic.drafts, self.traffic.handover
        watched: list[Any] = [*self.spaces, *self.states, *filter(None, parts)]
        return sum(each.resident_bytes for each in watched)

    @property
    def records(self) -> ShadowRecords:
        """Shadow records of the main space."""
        return self.spaces[0].records

    @property
    def scrubber(self) -> Scrubber | None:
        """Rotating pass of the main space, None where content is not checked."""
        return self.spaces[0].scrubber

    def conclude(self) -> None:
        """Read the verdict of every forward under way. Waits for the device.

        Raises:
            CorruptionError: something is damaged and the mode is ``raise``.
        """
        while self._launched:
            self._read(self._launched.popleft()[1])

    def follow_drafts(self) -> None:
        """Forwards may verify trees of draft tokens from now on.

        Raises:
            UncoveredError: the pool has parts in which the accepted path is chosen by ways of its own.
        """
        if len(self.spaces) > 1 or self.states:
            raise UncoveredError(
                f'speculative decoding with pool "{self.pool.name}" is not covered yet (it has more than one space, '
                "or a state of each request)"
            )
        rows = self.pool.req_to_token
        self.traffic.drafts = Drafts(self._backend, self.spaces[0], rows.shape[0], rows.device)

    def reset(self) -> None:
        """Start over with a pool that holds nothing, after a time in which nobody looked."""
        self._announced = self._running = None
        self.traffic.clear()

    def announce(
        self,
        requests: Sequence[Request],
        rows: Sequence[int],
        prefix_lens: Sequence[int],
        write_lens: Sequence[int],
        nodes: int = 0,
    ) -> None:
        """Say what the next forward will read and store. Called where the scheduler launches a batch.

        Args:
            requests: the batch, in its order.
            rows: request row of each.
            prefix_lens: positions each reads from before its new tokens; with trees, as many as the host knows of.
            write_lens: new tokens of each.
            nodes: size of the tree of draft tokens that the forward verifies for each, 0 if it verifies none.
        """
        self.forwards += 1
        step = self._steps[self.forwards % MAX_IN_FLIGHT]
        self._read(step)
        step.number = self.forwards
        # A copy, because SGLang extends its list in place.
        step.requests, step.rows, step.prefix_lens = list(requests), rows, prefix_lens
        step.verify_total, step.write_total, step.started = sum(prefix_lens), sum(write_lens), ()
        step.marks, step.found = NO_MARKS, []
        if self.spaces[0].verifies:
            self.verified += step.verify_total
        self.stored += step.write_total
        # Every request stores at least one token.
        step.nodes = nodes
        is_even = not nodes and 0 < step.write_total == len(requests)
        step.is_decode = is_even and len(requests) <= MAX_CAPTURED_REQUESTS and self._captured is not None
        if step.is_decode and self._captured is not None:
            batch = self._captured.batch_of(len(requests))
        else:
            batch = self._batch.batch_of(len(requests), step.write_total)
        self._weights.note_mixed(step)
        truth = self.truth.advance(requests, rows, prefix_lens, is_even=not nodes)
        step.started = truth.started
        if not nodes and not self.truth.is_generating:  # an image may end with the one token of a chunk
            step.marks = locate_marks(requests, prefix_lens, write_lens)
        for index in step.started:
            self._history.note(rows[index], step.number, requests[index].rid)
        owners = None
        if self.ledger is not None:
            owners = self.ledger.seat(step.number, step.requests, truth.rows, step.started)
        host = step.open(batch)
        host.fill(step.number, truth, write_lens, owners, is_even=is_even)
        if self.injector is not None:
            self.injector.at_launch(self, step, self._reporter)
        if self._order is not None:
            self._order.demand(host, step.number)
            self._order.note_batch(step.number)
        self._announced = step

    def before(
        self,
        input_ids: torch.Tensor | None,
        out_cache_loc: torch.Tensor,
        req_pool_indices: torch.Tensor,
        trees: Trees | None = None,
    ) -> None:
        """Verify what the forward will read. Enqueued on the forward's stream, before it.

        Args:
            input_ids: int (write_total,), copied: a model may clamp them in place.
            out_cache_loc: int (write_total,), the slots to be stored, copied.
            req_pool_indices: int (bs,), the rows the forward will use.
            trees: of draft tokens, where the forward verifies some.
        """
        step, self._announced = self._announced, None
        if step is None:
            return  # a dummy forward: nothing was scheduled
        self._idle.is_woken = True
        if not self._on_host and not step.is_decode:  # asking costs as much as a launch; all forwards use one stream
            self._stream = torch.get_device_module(out_cache_loc.device).current_stream()
        if self.injector is not None:
            self.injector.before_forward(self, step, self._reporter)
        self.traffic.apply(step.number)
        self.traffic.begin(step)
        bs, written = len(step.requests), step.write_total
        if input_ids is None or input_ids.shape[0] != written or out_cache_loc.shape[0] != written:
            raise GuardError(
                f"step {step.number} was announced with {written} new tokens but its forward carries others"
            )
        batch, host, drafts = step.batch, step.host, self.traffic.drafts
        assert batch is not None
        assert host is not None
        self._running = step
        for space in self.spaces:
            if space.scrubber is not None:
                # Decode steps are recorded, a graph for each number of slots.
                piece = space.scrubber.next_range(may_vary=not step.is_decode) if space.folds else (0, 0)
                step.scrubs[space.index] = piece
                host.set_scrub(space.index, step.scrubs[space.index][0])
        if self.settings.audit is not None:
            self.settings.audit.note_enqueued(step.number)
        inputs = input_ids.contiguous(), out_cache_loc.contiguous(), req_pool_indices[:bs].contiguous()
        if not self._on_host:
            host.set_inputs(*inputs)
        if step.is_decode and self._captured is not None:
            self._captured.prepare(batch, host, inputs, step.verify_total)
        else:
            self._launches.prepare(batch, host.block, inputs, step.verify_total, step.number)
        places, marked = step.marks
        if places:
            device = batch.tokens.device
            batch.tokens[torch.tensor(places, device=device)] = torch.tensor(marked, device=device)
        if self._on_host and self.spaces[0].violations.count_on_host():
            self._judge.read_early(step)
        if drafts is not None:
            drafts.step = None
            if step.nodes:
                drafts.stamp(step, batch, trees)
        for state in self.states:
            state.compare(step)
        for index in step.started:
            for space in self.spaces:
                if space.folds:
                    self.traffic.check_prefix(space, step, index)
        step.is_timed = bs > 0 and any(scrubber.wants_timing for scrubber in self._scrubbers)
        step.note_begin()

    def after(self) -> None:
        """Record what the forward stored and scrub the next piece. Enqueued on the forward's stream, behind it."""
        step, self._running = self._running, None
        if step is None or step.batch is None:
            return
        step.note_end()
        if self.injector is not None:
            self.injector.behind_forward()
        self.traffic.land(step.number)
        for space in self.spaces:
            if space.poisons and space.presence is not None and space.presence.is_learning:
                space.presence.observe(step.batch.slots_of(space.index))
        counts = [count for _, count in step.scrubs]
        if step.nodes and self.traffic.drafts is not None:  # the rest is done in commit
            self._launches.seal(step.batch, step.number, [start for start, _ in step.scrubs], counts)
            self.traffic.drafts.step = step
            return
        if step.is_decode and self._captured is not None:
            self._captured.conclude(step.batch, counts)
        else:
            self._launches.conclude(step.batch, step.number, [start for start, _ in step.scrubs], counts)
        if self._order is not None:
            self._order.note_concluded(step.number)
        for state in self.states:
            state.remember(step)
            state.drain(step.batch)
        self._close(step)

    def commit(self, accept_lens: torch.Tensor, accepted: torch.Tensor) -> None:
        """The drafts of the latest forward were judged and the rows of the accepted path moved; see
        :meth:`Drafts.commit`. Enqueued on the forward's stream, behind that.
        """
        drafts = self.traffic.drafts
        step = None if drafts is None else drafts.step
        if drafts is None or step is None or step.batch is None:
            return
        drafts.step = None
        if self.injector is not None:
            self.injector.at_commit(self, step, accept_lens, self._reporter)
        drafts.commit(step.batch, accept_lens, accepted)
        self._launches.close(step.batch)
        if self._order is not None:
            self._order.note_concluded(step.number)
        self._close(step)

    def _close(self, step: Step) -> None:
        if self.injector is not None:
            self.injector.after_forward(self)
        step.close_verdict()

    def note_launched(self, result: object) -> None:
        """Tie the latest step to the object whose arrival at :meth:`settle` means that SGLang processes its result."""
        step = self._steps[self.forwards % MAX_IN_FLIGHT]
        if step.is_open:
            self._launched.append((result, step))

    def settle(self, result: object) -> None:
        """Read the verdict of the step that gave ``result``, and of any before it.

        Raises:
            CorruptionError: something is damaged and the mode is ``raise``.
        """
        if not any(known is result for known, _ in self._launched):
            return
        while self._launched:
            known, step = self._launched.popleft()
            self._read(step)
            if known is result:
                return

    def _read(self, step: Step) -> None:
        if not step.is_open:
            return
        self.traffic.read(step)
        self._judge.judge(step)
        if self.settings.audit is not None:
            self.settings.audit.note_judged(step.number, self._reporter.counts)

    def idle(self) -> None:
        """The server has nothing to do: fold on at full pace. Waits for the device.

        Raises:
            CorruptionError: something is damaged and the mode is ``raise``.
        """
        if self._launched or self._announced is not None or self._running is not None:
            return  # a forward is under way after all
        self._idle.run(self._stream, self.forwards, self._prepare_idle, self._judge.judge)
        if self.settings.audit is not None:
            self.settings.audit.note_enqueued(self.forwards)
            self.settings.audit.note_judged(self.forwards, self._reporter.counts)

    def open_host(self, host_pool: Any, has_storage: Callable[[], bool], layer_count: int) -> None:
        """See :meth:`Traffic.open_host`."""
        self._judge.transfers = self.traffic.open_host(
            host_pool,
            has_storage,
            layer_count,
            rank=self.rank,
            checks_order="order" in self.config.checks,
            next_step=lambda: self.forwards + 1,
        )

    def replace_weights(self, version: str) -> None:
        """See :meth:`WeightUpdates.replace`."""
        self._weights.replace(version, is_flushed=self.spaces[0].is_flushed)

    def describe(self) -> dict[str, Any]:
        """How far it has come, as plain values."""
        audit = self.settings.audit
        return {**self.figures.to_dict(), "audit": None if audit is None else audit.describe()}

    @property
    def figures(self) -> Figures:
        """What was done so far, and how far back the passes reach."""
        sweeps = (
            Sweep.of(space.scrubber, self.name_of(space), space.slots.table.bytes_per_slot)
            for space in self.spaces
            if space.scrubber is not None
        )
        return Figures(self.forwards, self.verified, self.stored, tuple(sweeps))

    def name_of(self, space: Space) -> str:
        """What reports call ``space``."""
        return f"{self.pool.name}/{space.slots.name}" if space.index else self.pool.name

    def _prepare_idle(self) -> None:
        self.traffic.apply(self.forwards)
        self.traffic.land(self.forwards)
