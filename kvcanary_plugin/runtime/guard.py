"""The guard of one model runner: what happens before and after each of its forwards, and when the verdict is read.

Everything of the scheduler's is read in :meth:`announce` and :meth:`before`; once the forward is launched its rows may
already be changing, so :meth:`after` uses private copies only.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..config import Config
from ..errors import CorruptionError, GuardError
from ..faults.injector import Injector
from ..kernels import record as r
from ..kernels.backend import pick_backend
from ..pool_patcher.records import ShadowRecords
from ..pool_patcher.spaces import GuardedPool
from ..report.reporter import Reporter
from ..report.text import render_line
from .batch import BatchBuffers
from .diagnosis import Diagnosis, RowHistory, StateDiagnosis, refine_chain_rows, sort_rows
from .idle import IdlePass
from .images import NO_MARKS, locate_marks
from .launches import MAX_CAPTURED_REQUESTS, CapturedDecode, Launches
from .scrubber import Scrubber
from .space import Space
from .state import StateWatch
from .step import MAX_IN_FLIGHT, Step
from .truth import Request, TruthTable
from .violation import Violation

logger = logging.getLogger("kvcanary")


class Policy(Protocol):
    """What is done about violations beyond reporting them."""

    def judge(self, step: Step, violations: Sequence[Violation]) -> None:
        """Act on the violations of ``step``, before its output is used."""


class Guard:
    """Guards the pool of one model runner.

    Attributes:
        pool: what is guarded.
        spaces: its numberings of slots under guard, the main one first.
        states: its per-request states under guard.
        forwards: forwards guarded so far; the number of the latest step.
        policy: what is done about violations beyond reporting them; None for nothing.
    """

    def __init__(self, pool: GuardedPool, config: Config, reporter: Reporter, *, rank: int = 0) -> None:
        device = pool.req_to_token.device
        self.pool = pool
        self.config = config
        self.forwards = 0
        self.policy: Policy | None = None
        self._reporter = reporter
        self._backend = pick_backend(device)
        self._on_host = device.type == "cpu"
        self._truth = TruthTable(pool.req_to_token.shape[0], pool.fingerprint)
        self._history = RowHistory()
        self.spaces = tuple(
            Space(slots, index, pool, config, self._backend, MAX_IN_FLIGHT)
            for index, slots in enumerate((pool.main, *pool.companions))
        )
        self.states = tuple(StateWatch(state, config, self._backend, MAX_IN_FLIGHT) for state in pool.states)
        checks_identity = "identity" in config.checks
        self._diagnoses: list[Diagnosis] = [
            Diagnosis(
                space.slots,
                pool.name if space.index == 0 else f"{pool.name}/{space.slots.name}",
                self._truth,
                self._history,
                rank,
                checks_identity=checks_identity,
            )
            for space in self.spaces
        ]
        self._diagnoses += [
            StateDiagnosis(watch.state, f"{pool.name}/{watch.state.name}", self._truth, self._history, rank)
            for watch in self.states
        ]
        rings = [space.ring for space in self.spaces] + [watch.ring for watch in self.states]
        self._steps = [Step([ring[place] for ring in rings], device) for place in range(MAX_IN_FLIGHT)]
        self._launched: deque[tuple[Any, Step]] = deque()
        self._announced: Step | None = None
        companions = len(pool.companions)
        self._batch = BatchBuffers(device, companions)
        self._running: Step | None = None
        self._weights_changed = False
        self._stream: Any = None
        self._idle = IdlePass(self._backend, self.spaces, device)
        self._launches = Launches(self._backend, self.spaces)
        self._captured = CapturedDecode(self._launches, device, companions) if CapturedDecode.serves(device) else None
        self.injector = Injector.parse(config.inject) if config.inject else None
        if self.injector is not None:
            self.injector.check_against(pool.table, config.checks)

    @property
    def resident_bytes(self) -> int:
        """Device bytes kept beside the pool."""
        spaces = sum(space.resident_bytes for space in self.spaces)
        return spaces + sum(watch.resident_bytes for watch in self.states)

    @property
    def records(self) -> ShadowRecords:
        """Shadow records of the main space."""
        return self.spaces[0].records

    @property
    def scrubber(self) -> Scrubber | None:
        """Rotating pass of the main space, None where content is not checked."""
        return self.spaces[0].scrubber

    def announce(
        self, requests: Sequence[Request], rows: Sequence[int], prefix_lens: Sequence[int], write_lens: Sequence[int]
    ) -> None:
        """Say what the next forward will read and store. Called where the scheduler launches a batch.

        Args:
            requests: the batch, in its order.
            rows: request row of each.
            prefix_lens: positions each reads from before its new tokens.
            write_lens: new tokens of each.
        """
        self.forwards += 1
        step = self._steps[self.forwards % MAX_IN_FLIGHT]
        if step.is_open:
            self._judge(step)
        step.number = self.forwards
        # A copy, because SGLang extends its list in place.
        step.requests, step.rows, step.prefix_lens = list(requests), rows, prefix_lens
        step.verify_total, step.write_total, step.started = sum(prefix_lens), sum(write_lens), ()
        step.marks, step.found = NO_MARKS, []
        # Every request stores at least one token.
        step.is_decode = 0 < step.write_total == len(requests) <= MAX_CAPTURED_REQUESTS and self._captured is not None
        if step.is_decode and self._captured is not None:
            batch = self._captured.batch_of(len(requests))
        else:
            batch = self._batch.batch_of(len(requests), step.write_total)
        if not step.is_decode:
            step.marks = locate_marks(requests, prefix_lens, write_lens)
        if self._weights_changed:
            self._note_mixed(step)
        truth = self._truth.advance(requests, rows, prefix_lens)
        step.started = truth.started
        for index in step.started:
            self._history.note(rows[index], step.number, requests[index].rid)
        step.open(batch).fill(step.number, truth, write_lens, is_decode=step.is_decode)
        self._announced = step

    def before(
        self, input_ids: torch.Tensor | None, out_cache_loc: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> None:
        """Verify what the forward will read. Enqueued on the forward's stream, before it.

        Args:
            input_ids: int (write_total,), copied: a model may clamp them in place.
            out_cache_loc: int (write_total,), the slots to be stored, copied.
            req_pool_indices: int (bs,), the rows the forward will use.
        """
        step, self._announced = self._announced, None
        if step is None:
            return  # a dummy forward: nothing was scheduled
        self._idle.wake()
        if not self._on_host:
            self._stream = torch.get_device_module(out_cache_loc.device).current_stream()
        self._apply_releases()
        if self.injector is not None:
            self.injector.before_forward(self, step, self._reporter)
        bs, written = len(step.requests), step.write_total
        if input_ids is None or input_ids.shape[0] != written or out_cache_loc.shape[0] != written:
            raise GuardError(
                f"step {step.number} was announced with {written} new tokens but its forward carries others"
            )
        batch, host = step.batch, step.host
        assert batch is not None
        assert host is not None
        self._running = step
        for space in self.spaces:
            if space.scrubber is not None:
                step.scrubs[space.index] = space.scrubber.next_range()
                host.set_scrub(space.index, step.scrubs[space.index][0])
        inputs = input_ids.contiguous(), out_cache_loc.contiguous(), req_pool_indices[:bs].contiguous()
        if not self._on_host:
            host.set_inputs(*inputs)
        if step.is_decode and self._captured is not None:
            self._captured.prepare(batch, host, inputs, step.verify_total)
        else:
            self._launches.prepare(batch, host, inputs, step.verify_total)
        places, marked = step.marks
        if places:
            device = batch.tokens.device
            batch.tokens[torch.tensor(places, device=device)] = torch.tensor(marked, device=device)
        if self._on_host and step.verify_total and int(self.spaces[0].violations.count):
            self._read_early(step)
        for state in self.states:
            state.compare(step)
        for index in step.started:
            for space in self.spaces:
                space.check_prefix(step.rows[index], step.prefix_lens[index], index)
        step.is_timed = bs > 0 and self.scrubber is not None and self.scrubber.wants_timing
        step.note_begin()

    def after(self) -> None:
        """Record what the forward stored and scrub the next piece. Enqueued on the forward's stream, behind it."""
        step, self._running = self._running, None
        if step is None or step.batch is None:
            return
        step.note_end()
        if self.injector is not None:
            self.injector.behind_forward()
        for space in self.spaces:
            if space.presence is not None and space.presence.is_learning:
                space.presence.observe(step.batch.slots_of(space.index))
        counts = [count for _, count in step.scrubs]
        if step.is_decode and self._captured is not None:
            self._captured.conclude(step.batch, counts)
        else:
            self._launches.conclude(step.batch, step.number, [start for start, _ in step.scrubs], counts)
        for state in self.states:
            state.remember(step)
            state.drain(step.batch)
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
            if step.is_open:
                self._judge(step)
            if known is result:
                return

    def idle(self) -> None:
        """The server has nothing to do: fold on at full pace. Waits for the device.

        Raises:
            CorruptionError: something is damaged and the mode is ``raise``.
        """
        if self._launched or self._announced is not None or self._running is not None:
            return  # a forward is under way after all
        self._idle.run(self._stream, self.forwards, self._apply_releases, self._judge)

    def release(self, slots: torch.Tensor | None, allocator: object = None) -> None:
        """Slots were given back to an allocator, by default that of the main space; None means all of them."""
        for space in self.spaces:
            if space.slots.allocator is allocator or (allocator is None and space.index == 0):
                space.release(slots)

    def release_all(self) -> None:
        """The pool was flushed."""
        for space in self.spaces:
            space.release(None)

    def replace_weights(self, version: str) -> None:
        """The weights were updated in place: KV made from now on is of another identity. May wait for the device.

        Says how much KV of older versions is still reachable: none, if the cache was flushed with the update.
        """
        self._truth.identities.replace_weights(version)
        self._weights_changed = True
        flushed = self.spaces[0].is_flushed
        live = (self.records.hot[:, r.IDENTITY] & r.LIVE_BIT) != 0
        reachable = 0 if flushed else int(live.sum())
        logger.info("kvcanary: weights are now version %s; %d slots hold KV of older ones", version, reachable)
        self._reporter.event("weights", {"version": version, "flushed": flushed, "older_slots": reachable})

    def _note_mixed(self, step: Step) -> None:
        """After an update: requests that go on running mix versions, which is asked for, so it is said once."""
        self._weights_changed = False
        mixed = [
            (request, row)
            for request, row in zip(step.requests, step.rows, strict=True)
            if self._truth.is_running(request)
        ]
        if not mixed:
            return
        version = self._truth.identities.weights
        logger.warning("kvcanary: %d running requests go on with KV of weights before version %s", len(mixed), version)
        rids = [request.rid for request, _ in mixed]
        self._reporter.event("mixed_weights", {"step": step.number, "version": version, "requests": rids})
        if self.config.strict_weights and "identity" in self.config.checks:
            step.found += [self._diagnoses[0].mixed(step, request, row, version) for request, row in mixed]

    def _apply_releases(self) -> None:
        for space in self.spaces:
            space.apply_releases()

    def _read_early(self, step: Step) -> None:
        """On a CPU the rows of a request are at hand and still what the forward will read: look closer right away."""
        found = self.spaces[0].violations
        count = int(found.count)
        rows = found.rows[: min(count, found.capacity)].tolist()
        step.early_rows = self._refine(step, rows)
        step.early_hidden = count - len(rows)
        found.reset()

    def _refine(self, step: Step, rows: list[list[int]]) -> list[list[int]]:
        scatter = self._backend.scatter_req_token_ids
        return refine_chain_rows(
            step,
            rows,
            self.records,
            self.pool.req_to_token,
            scatter,
            self._truth.anchor_of,
            self.pool.main.window,
        )

    def _judge(self, step: Step) -> None:
        count, rows_of_spaces = step.read_verdict()
        if step.is_timed:
            for space in self.spaces:
                if space.scrubber is not None:
                    space.scrubber.observe_forward(step.seconds)
        self._learn()
        if not count and not step.found:
            return
        violations = step.found
        for diagnosis, rows in zip(self._diagnoses, rows_of_spaces, strict=False):
            if not self._on_host and diagnosis is self._diagnoses[0]:
                # Only to name a place: what the rows said when they were verified decides, not what they say now.
                rows = self._refine(step, sort_rows(rows))
            violations += diagnosis.explain(step, rows)
        fresh = self._reporter.report(violations)
        if step.hidden:
            self._reporter.count_unlisted(step.hidden, step.number)
        if self.policy is not None:
            self.policy.judge(step, violations)
        if fresh and self.config.mode == "raise":
            raise CorruptionError(render_line(fresh[0]))

    def _learn(self) -> None:
        """Say once what the first forwards showed of the sources they store."""
        for space, diagnosis in zip(self.spaces, self._diagnoses, strict=False):
            learned = space.presence.conclude() if space.presence is not None else None
            if learned is None:
                continue
            if learned.unstored:
                logger.warning(
                    'kvcanary: pool "%s": none of the first %d tokens stored %s, so presence does not watch that; '
                    "right for layers that share the KV of others, a fault otherwise",
                    diagnosis.pool_name,
                    learned.tokens,
                    ", ".join(f"layer {layer} {half}" for layer, half in learned.unstored),
                )
            self._reporter.event("learned", {"pool": diagnosis.pool_name, **dataclasses.asdict(learned)})
