"""The miniature engine behind a session: what the wrappers in patches/ would call is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvcanary_plugin.config import Config
from kvcanary_plugin.runtime.control import Change
from kvcanary_plugin.runtime.session import Session
from tests.engine import WITHOUT_OWNERSHIP, Engine


class Calls:
    """Takes an engine's calls of its guard to the session, as the wrappers do; anything else is that of the guard."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._runner = session._model_runner

    def announce(self, *batch: Any) -> None:
        self._session.announce(lambda it: it, batch)

    def before(self, *inputs: Any) -> None:
        if self._session.guards(self._runner):
            self._session.before(*inputs)

    def after(self) -> None:
        if self._session.guards(self._runner):
            self._session.after()

    @property
    def traffic(self) -> Calls:
        return self

    def release(self, slots: torch.Tensor | None) -> None:
        guard = self._session.guard
        if guard is not None:
            self._session.release(guard.pool.allocator, slots)

    @property
    def ledger(self) -> Any:
        """As :meth:`Session.note_ownership` has it: None while nobody looks."""
        guard = self._session.guard
        return guard.ledger if guard is not None and self._session.guards(self._runner) else None

    def __getattr__(self, name: str) -> Any:
        if name in ("note_launched", "settle"):
            return getattr(self._session, name)
        return getattr(self._session.guard, name)


class Served(Engine):
    """An engine whose guard is attached by a session, for as long as it has one."""

    def __init__(
        self,
        *,
        mode: str = "log",
        checks: tuple[str, ...] = WITHOUT_OWNERSHIP,
        scrub_budget: float = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(mode=mode, checks=checks, **options)
        self.session = Session(Config(mode=mode, checks=checks, scrub_budget=scrub_budget))
        self.session.reporter = self.reporter
        self.session.attach(self.runner(), [], rank=3)
        self.guard = Calls(self.session)
        self.unwrapped: Any = self.session.guard

    def runner(self) -> Any:
        return SimpleNamespace(
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            model=torch.nn.Identity(),
            model_config=SimpleNamespace(model_path="test"),
        )

    @property
    def state(self) -> dict[str, Any]:
        return self.session.control.describe()

    def set(self, **values: Any) -> None:
        """A change while it runs."""
        assert self.session.control.apply(Change(id="i", **values).to_key()), self.state["last_change"]

    def flush(self) -> None:
        """What SGLang does where nothing runs."""
        for row in range(self.rows.req_to_token.shape[0]):
            if self.unwrapped.ledger is not None:
                self.unwrapped.ledger.note_row_free(row)
        self.rows.clear()
        self.session.release(self.allocator, None)
        self.allocator.clear()

    def flip(self, slot: int, layer: int = 1) -> None:
        self.pool.k_buffer[layer].view(torch.int16)[slot, 0, 3] ^= 1 << 7

    def idle_forwards(self, count: int) -> None:
        for _ in range(count):
            self.forward([], [], [], ForwardMode.IDLE)

    def cover(self) -> None:
        """Forwards in which the rotating pass goes over everything."""
        self.idle_forwards(2 * (self.unwrapped.scrubber.period_forwards + 1))
