"""The miniature engine behind a session: what the wrappers in patches/ would call is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvcanary_plugin.config import Config
from kvcanary_plugin.runtime.session import Session
from tests.engine import WITHOUT_OWNERSHIP, Engine


class Calls:
    """Takes an engine's calls of its guard to the session; anything else is that of the guard."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def announce(self, *batch: Any) -> None:
        self._session.announce(lambda it: it, batch)

    def __getattr__(self, name: str) -> Any:
        if name in ("before", "after", "note_launched", "settle"):
            return getattr(self._session, name)
        return getattr(self._session.guard, name)


class Served(Engine):
    """An engine whose guard is attached by a session, for as long as it has one."""

    def __init__(self, *, mode: str = "log", checks: tuple[str, ...] = WITHOUT_OWNERSHIP, **options: Any) -> None:
        super().__init__(mode=mode, checks=checks, **options)
        self.session = Session(Config(mode=mode, checks=checks))
        self.session.reporter = self.reporter
        self.session.attach(self.runner(), [], rank=3)
        self.guard = Calls(self.session)

    def runner(self) -> Any:
        return SimpleNamespace(
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            model=torch.nn.Identity(),
            model_config=SimpleNamespace(model_path="test"),
        )
