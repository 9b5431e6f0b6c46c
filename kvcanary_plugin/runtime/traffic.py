"""What happens to the slots of a guard between its forwards: given back, moved, copied away and back, on their way to
host memory. Noted as SGLang does it, and enqueued ahead of the next forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import GuardError, UncoveredError
from ..kernels.backend import Backend
from ..pool_patcher.spaces import GuardedPool
from ..tiers import page_records
from .arrivals import Arrivals
from .backup_order import BackupOrder
from .copies import Copies
from .flights import Flights
from .handover import Handover
from .host_slots import FollowedSlots
from .ledger import Ledger
from .load_order import LoadOrder
from .page_rows import fingerprint_of
from .space import Space
from .speculation import Drafts
from .step import Step
from .transfers import Transfers
from .truth import TruthTable
from .violation import Violation


class Traffic:
    """The traffic of one guard.

    Attributes:
        transfers: to host memory and back, None where there are none.
        drafts: trees of draft tokens that forwards verify, None where there are none.
        handover: to or from another server, None where there is none.
        arrivals: KV that has come from it and is compared, None where none comes.
    """

    def __init__(
        self, pool: GuardedPool, spaces: Sequence[Space], ledger: Ledger | None, truth: TruthTable, backend: Backend
    ) -> None:
        self.transfers: Transfers | None = None
        self.drafts: Drafts | None = None
        self.handover: Handover | None = None
        self.arrivals: Arrivals | None = None
        self._pool = pool
        self._spaces = spaces
        self._ledger = ledger
        self._truth = truth
        self._backend = backend
        self._copies = Copies(spaces)
        self._late: list[tuple[Space, torch.Tensor, int]] = []

    def clear(self) -> None:
        """The pool holds nothing: forget what was noted, and everything in it."""
        if self.drafts is not None:
            self.drafts.step = None
        self._copies.clear()
        if self.arrivals is not None:
            self.arrivals.clear()
        if self.transfers is not None:
            self.transfers.clear()
        self.release_all()
        if self._ledger is not None:
            self._ledger.note_flush()

    def release(self, slots: torch.Tensor | None, allocator: object = None) -> None:
        """Slots were given back to an allocator, by default that of the main space; None means all of them."""
        given = self._pool.allocator if allocator is None else allocator
        for space in self._spaces:
            if space.allocator is given:
                space.release(slots)

    def release_all(self) -> None:
        """The pool was flushed."""
        for space in self._spaces:
            space.release(None)

    def move(self, kv_cache: object, target: torch.Tensor, source: torch.Tensor) -> None:
        """The guarded pool copied the rows of slots ``source`` to ``target``, (n,) both."""
        if kv_cache is not self._pool.kv_cache:
            return
        is_path = self.drafts is not None and self.drafts.step is not None  # and its records are needed right away
        for space in self._spaces:
            (space.move_now if is_path else space.move)(target, source)

    def note_copied(self, allocator: object, slots: torch.Tensor, copy: object) -> None:
        """The rows of ``slots`` left the pool as ``copy``, in which SGLang keeps tensors."""
        if allocator is self._pool.allocator:
            self._copies.note_copied(slots, copy)

    def note_loaded(self, allocator: object, slots: torch.Tensor, copy: object) -> None:
        """``copy`` came back into ``slots``."""
        if allocator is self._pool.allocator:
            self._copies.note_loaded(slots, copy)

    def open_host(
        self,
        host_pool: Any,
        has_storage: Callable[[], bool],
        layer_count: int,
        *,
        rank: int,
        checks_order: bool,
        next_step: Callable[[], int],
    ) -> Transfers:
        """Rows of the guarded pool go to and come from ``host_pool`` from now on, SGLang's.

        Args:
            host_pool: has ``size`` slots, numbered from 0, none of them given out.
            has_storage: whether something else than the guarded pool may fill them.
            layer_count: layers that come back one after the other.
            rank: of this process, for reports.
            checks_order: a forward must not use a layer before it has come back, nor may rows be copied before they
                have been stored.
            next_step: number of the next step.

        Raises:
            GuardError: the pool has other spaces or states, whose rows travel by ways of their own.
        """
        name, device = self._pool.name, self._pool.req_to_token.device
        if len(self._spaces) > 1 or self._pool.states:
            raise GuardError(f'pool "{name}" has more than one space, so its way to host memory is not covered')

        def describe(kind: str, slot: int, request: str | None) -> Violation:
            return Violation(
                "ownership", kind, f"{name}/host", rank, next_step(), "host", slot, request=request, tier="host"
            )

        def describe_late(step: int, layer: int, request: str) -> Violation:
            return Violation("order", "unordered_load", name, rank, step, "load", -1, layer=layer, request=request)

        def describe_early(step: int, slot: int) -> Violation:
            return Violation("order", "unordered_backup", name, rank, step, "backup", slot)

        self.transfers = Transfers(
            self._spaces[0], self._ledger, self._truth, self._backend, host_pool, has_storage, describe
        )
        if checks_order:
            self.transfers.order = LoadOrder(layer_count, device, describe_late)
            self.transfers.backups = BackupOrder(self._spaces[0].records.hot, describe_early)
        return self.transfers

    def open_drafts(self) -> None:
        """Forwards may verify trees of draft tokens from now on.

        Raises:
            UncoveredError: the pool has parts in which the accepted path is chosen by ways of its own.
        """
        self._refuse_parts("speculative decoding")
        rows = self._pool.req_to_token
        self.drafts = Drafts(self._backend, self._spaces[0], rows.shape[0], rows.device)

    def open_handover(
        self,
        ranks: int,
        *,
        receives: bool,
        inject: Callable[[Step], None],
        judge: Callable[[Step], None],
        next_step: Callable[[], int],
    ) -> None:
        """KV of the guarded pool goes to another server, or comes from one; each has as many ``ranks``. What it takes
        besides is for :class:`Arrivals`.

        Raises:
            UncoveredError: the pool has other spaces or states, whose rows travel by ways of their own.
        """
        self._refuse_parts("prefill/decode disaggregation")
        name = hashlib.sha256(repr((ranks, self._pool.fingerprint)).encode()).hexdigest()
        if self._ledger is not None:
            self._ledger.flights = Flights(
                self._ledger, self._pool.slot_count, self._pool.page_size, self._pool.req_to_token.device
            )
        self.handover = handover = Handover(self._spaces[0], self._truth, name[:12], receives=receives)
        if receives:
            self.arrivals = Arrivals(
                self._spaces[0],
                handover.records,
                self._truth,
                self._backend,
                inject=inject,
                judge=judge,
                next_step=next_step,
            )

    def share_host(self, is_followed: Callable[[], bool]) -> None:
        """Storage code learns of host slots, and tells what it does with them, while ``is_followed``."""
        transfers = self.transfers
        if transfers is not None and transfers.keeps_rows:
            fingerprint = fingerprint_of(self._spaces[0].slots.table)
            page_records.follow(
                transfers.host_pool, FollowedSlots(transfers.host, fingerprint, is_followed, transfers.report)
            )

    def apply(self, step: int) -> None:
        """Bring records and ledger up to what was noted. Enqueued ahead of forward ``step``."""
        if self.transfers is not None:
            self.transfers.poll()
        for space in self._spaces:
            space.apply_changes()
        if self._ledger is not None:
            self._ledger.apply(step, self._spaces[0].violations)

    def begin(self, step: Step) -> None:
        """A forward is about to start, on what may still be on its way."""
        if self.transfers is not None:
            step.found += self.transfers.take_found()
            self.transfers.begin(step)

    def check_prefix(self, space: Space, step: Step, index: int) -> None:
        """Fold the prefix of a request that starts: now, or behind the forward if parts of it are still coming."""
        if self.arrivals is not None and self.arrivals.was_folded(step.requests[index]):
            return
        slots = space.slots_of_prefix(step.rows[index], step.prefix_lens[index])
        if self.transfers is None or not self.transfers.is_loading:
            space.check_slots(slots, index)
        else:
            self._late.append((space, self.transfers.hide_coming(slots), index))

    def land(self, step: int) -> None:
        """Behind forward ``step`` everything it was waiting for has come: records follow, and are compared."""
        if self.transfers is None:
            return
        if self.transfers.is_loading:
            self.transfers.land(step)
        for space, slots, index in self._late:
            space.check_slots(slots, index)
        self._late.clear()

    def read(self, step: Step) -> None:
        """The verdict of a forward is read: what is known of the order of its loads goes with it."""
        if self.transfers is not None and self.transfers.order is not None:
            step.found += self.transfers.order.read(step.number)

    def _refuse_parts(self, what: str) -> None:
        if len(self._spaces) > 1 or self._pool.states:
            raise UncoveredError(
                f'{what} with pool "{self._pool.name}" is not covered yet (it has more than one space, or a state of '
                "each request)"
            )
