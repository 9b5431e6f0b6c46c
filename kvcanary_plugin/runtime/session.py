"""What the wrappers call: one session per process, holding the configuration, the reporter and the guard.

A bug of ours must never take a server down that was asked to ``log``: the session then detaches its guard once, loudly,
and the server goes on unguarded. In ``raise`` the server stops instead.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..config import Config
from ..errors import CorruptionError, UncoveredError
from ..pool_patcher.adapters import adapt_model_runner
from ..report.attached import announce_guard
from ..report.jsonl import EventLog
from ..report.reporter import Reporter
from .arrivals import Arrivals
from .consensus import Consensus
from .control import Control
from .flights import Flight, Flights
from .guard import Guard
from .handover import Handover, Infos
from .heartbeat import Heartbeat
from .hierarchy import Hierarchy
from .ledger import Ledger
from .policy import Levers, Quarantine
from .sending import Sending
from .speculation import Trees
from .truth import Received, Request

logger = logging.getLogger("kvcanary")

_Announced = tuple[Sequence[Request], Sequence[int], Sequence[int], Sequence[int]]
Announcement = _Announced | tuple[Sequence[Request], Sequence[int], Sequence[int], Sequence[int], int]


class Session:
    """The plugin within one process.

    Attributes:
        config: what was asked for.
        reporter: where violations go.
        guard: the guard of this process's model runner; None before pools exist, when uncovered, and after a detach.
        policy: what is done about damage; None in other modes than quarantine, and before the scheduler is ready.
        mode: in force now, which may be changed while the server runs.
        control: takes such changes.
        hierarchy: takes what happens on the way to host memory and back.
        heartbeat: says how things stand, also when the guard is gone.
        is_paused: nobody looks: the mode is ``off``, or was, and the cache was not flushed since.
        is_released: nobody looks: the server has given the memory of its KV back.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.reporter = Reporter(EventLog(config.log) if config.log else None)
        self.guard: Guard | None = None
        self.policy: Quarantine | None = None
        self.mode = config.mode
        self.control = Control(self)
        self.is_paused = False
        self.is_released = False
        self.hierarchy = Hierarchy(self)
        self.heartbeat = Heartbeat(self)
        self._model_runner: Any = None
        self._is_waived = False
        self.sending: Sending | None = None
        atexit.register(self.reporter.close)

    def attach(
        self,
        model_runner: Any,
        gaps: Sequence[str],
        *,
        rank: int,
        has_owners: bool = True,
        has_drafts: bool = False,
        role: str = "null",
        ranks: int = 1,
    ) -> None:
        """Guard the pools of ``model_runner``, which were just allocated.

        Args:
            model_runner: SGLang's runner.
            gaps: why the server's mode is not covered; empty if it is.
            rank: of this process, for reports.
            has_owners: a slot belongs to one request at a time.
            has_drafts: forwards may verify trees of draft tokens.
            role: ``prefill`` or ``decode`` of two servers, ``null`` of one that does both.
            ranks: that share the heads of a layer.

        Raises:
            UncoveredError: the mode or the pool is not covered and ``--kvcanary-allow-uncovered`` was not given.
        """
        try:
            if gaps:
                raise UncoveredError("; ".join(gaps))
            pool = adapt_model_runner(model_runner, self.config.content if self.config.reads_rows else "none")
            guard = Guard(pool, self.config, self.reporter, rank=rank, has_owners=has_owners)
            if has_drafts:
                guard.traffic.open_drafts()
            if role != "null":
                guard.open_handover(ranks, receives=role == "decode")
                self.sending = Sending() if role == "prefill" else None
        except UncoveredError as error:
            self.waive(error)
            return
        self.guard = guard
        self._model_runner = model_runner
        announce_guard(guard, self.reporter)

    def confirm(self, model_runner: Any) -> None:
        """The scheduler is ready: make sure that what was asked for is in force.

        Raises:
            UncoveredError: no guard was attached to this scheduler's runner.
        """
        if not self._is_waived and (self.guard is None or self._model_runner is not model_runner):
            raise UncoveredError(
                "kvcanary: --kvcanary was given but no guard is attached to this scheduler's model runner; the seam "
                "ModelRunner.alloc_memory_pool was not reached. Run 'kvcanary doctor'"
            )

    def enforce(self, levers: Levers, group: Any, prefix_cache: Any) -> None:
        """The scheduler is ready: from now on damage has consequences.

        Args:
            levers: how this SGLang is acted upon.
            group: gloo group of the ranks that must act alike; None for a single one.
            prefix_cache: SGLang's.
        """
        if self.guard is None:
            return
        consensus = Consensus(group if dist.is_available() and dist.is_initialized() else None)
        self.policy = Quarantine(self.guard, self.reporter, levers, consensus, prefix_cache)
        self.guard.settings.set_mode(self.mode, self.policy)

    @property
    def state(self) -> str:
        """``guarding``, ``paused`` (mode off), ``waiting`` (for the cache to be flushed, after that), ``released`` (no
        memory behind the KV), ``detached``, ``uncovered`` or, before there is a guard, ``starting``.
        """
        if self.guard is not None:
            if self.is_released:
                return "released"
            return "guarding" if not self.is_paused else "paused" if self.mode == "off" else "waiting"
        if self._is_waived:
            return "uncovered"
        return "starting" if self._model_runner is None else "detached"

    @property
    def handover(self) -> Handover | None:
        """What goes to or comes from another server; None if there is none, or nobody looks."""
        return self.guard.traffic.handover if self.guard is not None else None

    @property
    def flights(self) -> Flights | None:
        """Transfers under way; None if there are none, or nobody asks who owns a slot."""
        ledger = self.guard.ledger if self.guard is not None else None
        return ledger.flights if ledger is not None else None

    def begin_flight(self, room: int, pages: Any, peer: str = "", answers: int = 1) -> Flight | None:
        """See :meth:`Flights.begin`; None where nobody asks."""
        begun: list[Flight] = []
        if (flights := self.flights) is not None:
            self.call(lambda _: begun.append(flights.begin(room, pages, peer, answers)))
        return begun[0] if begun else None

    def splice(self, kv_cache: object, infos: Infos, halves: int) -> Infos:
        """See :meth:`Handover.splice`; of a pool that is not guarded, ``infos``."""
        guard, handover = self.guard, self.handover
        if guard is None or handover is None or kv_cache is not guard.pool.kv_cache:
            return infos
        return handover.splice(infos, halves)

    def expect(self, room: int, request: Received) -> None:
        """See :meth:`Arrivals.expect`."""
        self._with_arrivals(lambda arrivals: arrivals.expect(room, request))

    def has_settled(self, room: int) -> bool:
        """See :meth:`Arrivals.settle`; where nobody looks, True."""
        told: list[bool] = []
        self._with_arrivals(lambda arrivals: told.append(arrivals.settle(room)))
        return told != [False]

    def forget(self, room: int) -> None:
        """See :meth:`Arrivals.forget`."""
        self._with_arrivals(lambda arrivals: arrivals.forget(room))

    def _with_arrivals(self, action: Callable[[Arrivals], None]) -> None:
        def act(guard: Guard) -> None:
            if guard.traffic.arrivals is not None:
                action(guard.traffic.arrivals)

        self.call(act)

    def take_over(self, request: Request, row: int, length: int, *, was_sent: bool) -> None:
        """The KV of the first ``length`` tokens of ``request`` is there, unless ``was_sent`` is false."""

        def act(guard: Guard) -> None:
            if guard.traffic.handover is not None:
                slots = guard.pool.req_to_token[row, :length]
                take = guard.traffic.handover.take_over if was_sent else guard.traffic.handover.make_up
                take(request, slots)

        self.call(act)

    def guards(self, model_runner: Any) -> bool:
        """Whether forwards of this runner are guarded now."""
        return self.is_looking and self._model_runner is model_runner

    @property
    def is_looking(self) -> bool:
        """Whether there is a guard at work."""
        return self.guard is not None and not self.is_paused and not self.is_released

    @property
    def has_drafts(self) -> bool:
        """Forwards may verify trees of draft tokens."""
        return self.guard is not None and self.guard.traffic.drafts is not None

    def announce(self, read: Callable[[Any], Announcement], batch: object) -> None:
        """See :meth:`Guard.announce`; ``read`` takes its arguments from SGLang's ``batch``."""
        self.call(lambda guard: guard.announce(*read(batch)))

    def before(
        self,
        input_ids: torch.Tensor,
        out_cache_loc: torch.Tensor,
        req_pool_indices: torch.Tensor,
        trees: Trees | None = None,
    ) -> None:
        """See :meth:`Guard.before`."""
        self.call(lambda guard: guard.before(input_ids, out_cache_loc, req_pool_indices, trees))

    def commit(self, accept_lens: torch.Tensor, accepted: torch.Tensor) -> None:
        """See :meth:`Guard.commit`."""
        self.call(lambda guard: guard.commit(accept_lens, accepted))

    def after(self) -> None:
        """See :meth:`Guard.after`."""
        self.call(lambda guard: guard.after())

    def note_launched(self, result: object) -> None:
        """See :meth:`Guard.note_launched`."""
        self.call(lambda guard: guard.note_launched(result))

    def settle(self, result: object) -> None:
        """See :meth:`Guard.settle`; then act on the verdict, which ranks do together even where one's guard is gone."""
        self.call(lambda guard: guard.settle(result))
        self._enforce(lambda policy: policy.act())
        self.heartbeat.beat()

    def admit(self, request: object) -> None:
        """See :meth:`Quarantine.admit`."""
        self._enforce(lambda policy: policy.admit(request))

    def release(self, allocator: object, slots: torch.Tensor | None) -> None:
        """Slots went back to ``allocator``; None means all of them: a guard that was paused may start over."""
        guard = self.guard
        if self.is_paused and slots is None and guard is not None:
            if allocator is not guard.pool.allocator or self.mode == "off":
                return
            self.is_paused = False
            self.call(lambda guard: guard.reset())
            logger.info("kvcanary: the cache was flushed: guarding again in mode %s", self.mode)
            self.reporter.event("resumed", {"mode": self.mode})
        self.call(lambda guard: guard.traffic.release(slots, allocator))

    def move(self, kv_cache: object, target: torch.Tensor, source: torch.Tensor) -> None:
        """See :meth:`Traffic.move`."""
        self.call(lambda guard: guard.traffic.move(kv_cache, target, source))

    def note_copied(self, allocator: object, slots: torch.Tensor, copy: object) -> None:
        """See :meth:`Traffic.note_copied`."""
        self.call(lambda guard: guard.traffic.note_copied(allocator, slots, copy))

    def note_loaded(self, allocator: object, slots: torch.Tensor, copy: object) -> None:
        """See :meth:`Traffic.note_loaded`."""
        self.call(lambda guard: guard.traffic.note_loaded(allocator, slots, copy))

    def note_ownership(self, subject: object, action: Callable[[Ledger], None]) -> None:
        """``subject``, an allocator or a table of request rows, did something that a ledger has to know."""
        guard = self.guard
        ledger = guard.ledger if guard is not None and self.is_looking else None
        if ledger is not None and ledger.follows(subject):
            self.call(lambda _: action(ledger))

    def idle(self) -> None:
        """See :meth:`Guard.idle`."""
        before = self.heartbeat.serving_seconds
        self.call(lambda guard: guard.idle())
        if self.policy is not None and self.policy.is_alone:  # ranks do not idle in step with each other
            self._enforce(lambda policy: policy.act())
        self.heartbeat.idle_seconds += self.heartbeat.serving_seconds - before
        self.heartbeat.serving_seconds = before
        self.heartbeat.beat()

    def note_memory_released(self) -> None:
        """The memory of the KV and of the request rows is about to be given back: nothing of it is touched from now on.

        Raises:
            CorruptionError: the last verdicts found damage and the mode is ``raise``.
        """
        self.call(lambda guard: guard.conclude())
        if self.guard is not None and not self.is_released:
            self.is_released = True
            logger.info("kvcanary: the memory of the KV is given back; guarding again once it is there")
            self.reporter.event("released", {"state": self.state, "mode": self.mode})

    def note_memory_resumed(self) -> None:
        """The memory is back, with nothing in it."""
        if not self.is_released:
            return
        self.is_released = False
        self.call(lambda guard: guard.reset())
        logger.info("kvcanary: the memory of the KV is back: %s in mode %s", self.state, self.mode)
        self.reporter.event("resumed", {"state": self.state, "mode": self.mode})

    def replace_weights(self, version: str) -> None:
        """See :meth:`Guard.replace_weights`."""
        if self.guard is None and self.policy is not None:  # the other ranks know of it too
            self.policy.truth.identities.replace_weights(version)
        if self.guard is not None and not self.is_looking:
            self.guard.truth.identities.replace_weights(version)
        self.call(lambda guard: guard.replace_weights(version))

    def call(self, action: Callable[[Guard], None]) -> None:
        """Have the guard do something, if there is one at work, and contain its errors.

        Raises:
            CorruptionError: something is damaged and the mode is ``raise``, in which other errors go through as well.
        """
        if self.guard is None or not self.is_looking:
            return
        spent, began = self.heartbeat.serving_seconds, time.perf_counter()
        try:
            action(self.guard)
        except CorruptionError as error:
            logger.critical("kvcanary: stopping the server, as --kvcanary raise asks")
            self.reporter.event("stopped", {"why": str(error)})
            self.reporter.close()
            raise
        except Exception as error:
            if self.mode == "raise":
                raise
            self._detach(error)
        finally:  # a call within a call is part of it
            self.heartbeat.serving_seconds = spent + time.perf_counter() - began

    def _enforce(self, action: Callable[[Quarantine], None]) -> None:
        if self.policy is None:
            return
        spent, began = self.heartbeat.serving_seconds, time.perf_counter()
        try:
            action(self.policy)
        except Exception as error:
            if not self.policy.is_alone:
                raise  # the other ranks have acted: going on otherwise than they do would be worse than stopping
            self.policy.stop()
            self._detach(error)
        finally:
            self.heartbeat.serving_seconds = spent + time.perf_counter() - began

    def waive(self, error: UncoveredError) -> None:
        """What was asked for cannot be done: there is no guard, if that is allowed.

        Raises:
            UncoveredError: it is not.
        """
        self.guard = None
        if not self.config.allow_uncovered:
            raise UncoveredError(
                f"kvcanary: refusing to start half-blind: {error}. Drop --kvcanary or the setting named, or pass "
                "--kvcanary-allow-uncovered to start without a guard"
            ) from error
        self._is_waived = True
        logger.warning("kvcanary: NOT guarding this process, as allowed: %s", error)
        self.reporter.event("uncovered", {"why": str(error)})

    def _detach(self, error: Exception) -> None:
        self.heartbeat.note()
        self.guard = None
        logger.exception("kvcanary: DETACHED after an error of its own; this server is no longer guarded")
        self.reporter.event("detached", {"why": f"{type(error).__name__}: {error}"})
