"""What the wrappers of a hierarchical cache call: KV on its way to host memory and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UncoveredError
from .load_order import LoadOrder
from .transfers import Transfers

if TYPE_CHECKING:
    from .guard import Guard
    from .session import Session

logger = logging.getLogger("kvcanary")


class Hierarchy:
    """The hierarchical cache of one session's server, if it has one."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def open(
        self, allocator: object, host_pool: Any, has_storage: Callable[[], bool], gaps: Sequence[str], layer_count: int
    ) -> None:
        """Rows of the pool of ``allocator`` go to and come from ``host_pool``; see :meth:`Guard.open_host`.

        Raises:
            UncoveredError: there are ``gaps``, and ``--kvcanary-allow-uncovered`` was not given.
        """
        guard = self._session.guard
        if guard is None or guard.pool.allocator is not allocator:
            return
        if gaps:
            self._session.waive(UncoveredError("; ".join(gaps)))
            return
        guard.open_host(host_pool, has_storage, layer_count)
        guard.traffic.share_host(lambda: self.follows(host_pool))
        logger.info("kvcanary: following KV to %d slots of host memory and back", host_pool.size)

    def follows(self, host_pool: object) -> bool:
        """Whether everything that happens to the slots of ``host_pool`` is known. Of any thread."""
        return self._session.is_looking and self._transfers_of(host_pool) is not None

    def note_transfer(self, host_pool: object, action: Callable[[Transfers, int], None]) -> None:
        """Something happened to slots of ``host_pool``, or to rows on their way there or back.

        ``action`` takes the transfers and the number of the next step.
        """

        def act(guard: Guard) -> None:
            transfers = self._transfers_of(host_pool)
            if transfers is not None:
                action(transfers, guard.forwards + 1)

        self._session.call(act)

    def note_layer(self, host_pool: object, action: Callable[[LoadOrder], None]) -> None:
        """A layer came from ``host_pool``, or is used. Called for every layer of a forward that is not captured."""
        transfers = self._transfers_of(host_pool)
        order = None if transfers is None else transfers.order
        if order is not None and self._session.is_looking:
            self._session.call(lambda _: action(order))

    def _transfers_of(self, host_pool: object) -> Transfers | None:
        guard = self._session.guard
        transfers = None if guard is None else guard.traffic.transfers
        return transfers if transfers is not None and transfers.host_pool is host_pool else None
