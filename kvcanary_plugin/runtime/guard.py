"""The guard of one model runner: what happens before and after each of its forwards, and when the verdict is read.

Everything of the scheduler's is read in :meth:`announce` and :meth:`before`; once the forward is launched its rows may
already be changing, so :meth:`after` uses private copies only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import Config
from ..errors import GuardError
from ..faults.injector import Injector
from ..pool_patcher.records import ShadowRecords
from ..pool_patcher.spaces import GuardedPool
from ..report.reporter import Reporter
from .figures import Figures
from .parts import make_parts
from .scrubber import Scrubber
from .speculation import Trees
from .step import Step
from .truth import Request
from .verdicts import Verdicts


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
        passes: over the bytes of the pool, beside what forwards read.
        ahead: compiles its kernels ahead of their first use, where there are kernels.
        settings: what of it can be changed while it runs.
    """

    def __init__(
        self, pool: GuardedPool, config: Config, reporter: Reporter, *, rank: int = 0, has_owners: bool = True
    ) -> None:
        """``has_owners``: a slot belongs to one request at a time, so that it can be said whose it is."""
        device = pool.req_to_token.device
        parts = make_parts(pool, config, reporter, rank, has_owners=has_owners)
        self.pool = pool
        self.config = config
        self.rank = rank
        self.forwards = self.verified = self.stored = 0
        self.spaces, self.states, self.ledger, self.truth = parts.spaces, parts.states, parts.ledger, parts.truth
        self.traffic, self.passes, self.settings, self.ahead = parts.traffic, parts.passes, parts.settings, parts.ahead
        rings = [space.ring for space in self.spaces] + [watch.ring for watch in self.states]
        self.verdicts = Verdicts(rings, device, self._judge_step)
        self._reporter = reporter
        self._on_host = device.type == "cpu"
        self._judge, self._weights, self._opening = parts.judge, parts.weights, parts.opening
        self._order, self._launches, self._captured = parts.order, parts.launches, parts.captured
        self._announced: Step | None = None
        self._running: Step | None = None
        self._stream: Any = None
        self.injector = Injector.parse(config.inject) if config.inject else None
        if self.injector is not None:
            self.injector.keep_rank(rank)
            self.injector.check_against(pool.table, self.settings.possible)

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
        parts = self.ledger, self._order, host, self.traffic.drafts, self.traffic.handover, self.traffic.arrivals
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
        self.verdicts.conclude()

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
        step = self.verdicts.take_step(self.forwards)
        host = self._opening.open(step, requests, rows, prefix_lens, write_lens, nodes)
        if self.spaces[0].verifies:
            self.verified += step.verify_total
        self.stored += step.write_total
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
        self.passes.assign(step, host)
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
        self.verdicts.note_launched(self.forwards, result)

    def settle(self, result: object) -> None:
        """Read the verdict of the step that gave ``result``, and of any before it.

        Raises:
            CorruptionError: something is damaged and the mode is ``raise``.
        """
        self.verdicts.settle(result)

    def _judge_step(self, step: Step) -> None:
        self.traffic.read(step)
        self._judge.judge(step)
        self.passes.note_judged(step.number)

    def idle(self) -> None:
        """The server has nothing to do: fold on at full pace. Waits for the device.

        Raises:
            CorruptionError: something is damaged and the mode is ``raise``.
        """
        if self.verdicts.is_under_way or self._announced is not None or self._running is not None:
            return  # a forward is under way after all
        self.passes.run_idle(self._stream, self.forwards, self._prepare_idle, self._judge.judge)

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

    def open_handover(self, ranks: int, *, receives: bool) -> None:
        """See :meth:`Traffic.open_handover`."""

        def inject(step: Step) -> None:
            if self.injector is not None:
                self.injector.at_arrival(self, step, self._reporter)

        self.traffic.open_handover(
            ranks, receives=receives, inject=inject, judge=self._judge.judge, next_step=lambda: self.forwards + 1
        )

    def replace_weights(self, version: str) -> None:
        """See :meth:`WeightUpdates.replace`."""
        self._weights.replace(version, is_flushed=self.spaces[0].is_flushed)

    def describe(self) -> dict[str, Any]:
        """How far it has come, as plain values."""
        audit = self.passes.audit
        return {**self.figures.to_dict(), "audit": None if audit is None else audit.describe()}

    @property
    def figures(self) -> Figures:
        """What was done so far, and how far back the passes reach."""
        return Figures.of(self.spaces, self.forwards, self.verified, self.stored)

    def _prepare_idle(self) -> None:
        self.traffic.apply(self.forwards)
        self.traffic.land(self.forwards)
