"""Who may use which slot: what the allocator and the radix tree did, queued as they do it, applied in stream order.

SGLang frees, inserts and stashes slots while a launched forward still uses them. That is how overlap scheduling works
and no fault: a forward is checked against the ledger as it stood at its launch, and whatever was called since takes
effect on the forward's stream, ahead of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import ledger as g
from ..kernels.backend import Backend
from ..kernels.mixing import as_array
from ..kernels.violations import ViolationBuffer
from ..pool_patcher.records import ShadowRecords
from .flights import Flights
from .tenancy import Event, EventHistory, Tenants
from .truth import Request

NEIGHBOURS = 8
FORWARDS_A_ROUND = 64  # at least that often every row is looked at, whatever is known of it
_HARMLESS = (g.Op.ALLOC, g.Op.INSERT, g.Op.HOLD, g.Op.LAND, g.Op.UNTRIM, g.Op.AIM)
_SLOTS_PER_REMEMBERED = 8  # one slot is remembered in the history for every so many of the pool: one byte a slot


class Delta(NamedTuple):
    """One call. ``slots``: int64 (n,), a copy; None for a flush."""

    op: g.Op
    actor: int
    slots: torch.Tensor | None


class Ledger:
    """The ledger of one pool.

    Calls of the scheduler's thread are noted; :meth:`apply` and the checks run on the forward's stream.

    Attributes:
        words: int64 (slot_count,), see ``kernels.ledger``.
        seats: int64 (row_count,), owner bits of the request on each row.
        tenants, history: who is who, and what was done lately.
        may_share: nobody tells which slots the radix tree holds, so requests may share any.
        before_free: called ahead of every free, so that transfers which are over have landed by then.
        flights: transfers between servers that use slots, None where there are none.
        is_muted: nobody listens: what is found takes no room from what other checks find.
    """

    def __init__(
        self,
        *,
        allocator: object,
        req_to_token: torch.Tensor,
        records: ShadowRecords,
        backend: Backend,
        window: int = 0,
    ) -> None:
        """Make the ledger of a pool none of whose slots is given out.

        Args:
            allocator: SGLang's object that hands out the slots, only ever compared by identity.
            req_to_token: int32 (row_count, context), the live table of slots, compared by identity as well.
            records: the shadow records of the same pool.
            backend: the kernels for its device.
            window: positions of a sliding window whose part of a slot may be freed apart from it, 0 if there is none.
        """
        device = req_to_token.device
        self.words = torch.zeros(records.slot_count, dtype=torch.int64, device=device)
        self.seats = torch.zeros(req_to_token.shape[0], dtype=torch.int64, device=device)
        self.tenants = Tenants(req_to_token.shape[0])
        self.history = EventHistory(max(64, records.slot_count // _SLOTS_PER_REMEMBERED))
        self.may_share = True
        self.before_free: Callable[[], None] | None = None
        self.flights: Flights | None = None
        self.is_muted = False
        self._unheard = ViolationBuffer(1, device)
        self._allocator = allocator
        self._rows = req_to_token
        self._req_to_token = req_to_token.detach()  # what is kept with a tensor is not kept with SGLang's
        self._records = records
        self._backend = backend
        self._window = window
        self._on_host = device.type == "cpu"
        self._queue: list[Delta] = []
        self._left: list[int] = []
        self._actors = [0]
        self._is_read = np.zeros(req_to_token.shape[0], dtype=np.bool_)
        self._group: list[tuple[int, int]] | None = None
        self._pieces: list[tuple[int, int]] = []

    @property
    def resident_bytes(self) -> int:
        """Device bytes kept beside the pool, the history at its fullest included."""
        remembered = max(64, self.words.numel() // _SLOTS_PER_REMEMBERED)
        return (self.words.numel() + self.seats.numel() + remembered) * 8

    def follows(self, subject: object) -> bool:
        """Whether calls of ``subject``, an allocator or a table of request rows, concern this ledger."""
        return subject is self._allocator or subject is self._rows

    def adopt_tree(self) -> None:
        """From now on every slot that the radix tree takes and gives back is noted, or there is no radix tree."""
        self.may_share = False

    def note_alloc(self, slots: torch.Tensor | None) -> None:
        """The allocator gave out ``slots``; None if it could not."""
        if slots is not None:
            if self.flights is not None:
                self.flights.poll()
            self._note(g.Op.ALLOC, slots)

    def note_free(self, slots: torch.Tensor) -> None:
        """``slots`` were given to the allocator's ``free``. Within a group they are freed at its end only."""
        if not slots.numel():
            return
        if self.before_free is not None:
            self.before_free()
        if self._group is not None:
            self._group.append((self._actors[-1], slots.numel()))
        else:
            # What a group held back comes as it is by now, which is what the allocator gets.
            count, pieces = slots.numel(), self._pieces
            is_group = sum(count for _, count in pieces) == count
            self._free(slots, pieces if is_group else [(self._actors[-1], count)])

    def begin_group(self) -> None:
        """The allocator holds back what is freed from now on."""
        self._group = []

    def end_group(self) -> None:
        """The allocator is about to free what it held back, by one more call of ``free`` with all of it."""
        self._pieces, self._group = self._group or [], None

    def close_group(self) -> None:
        """That call was made, if there was anything to free."""
        self._pieces = []

    def note_insert(self, slots: torch.Tensor) -> None:
        """The radix tree took ``slots``."""
        self._note(g.Op.INSERT, slots)

    def note_trim(self, slots: torch.Tensor) -> None:
        """The part of ``slots`` that layers with a sliding window keep was freed."""
        self._note(g.Op.TRIM, slots)

    def note_untrim(self, slots: torch.Tensor) -> None:
        """``slots`` have such a part again."""
        self._note(g.Op.UNTRIM, slots)

    def quarantine(self, slots: torch.Tensor) -> None:
        """Take ``slots`` out of circulation until the next flush."""
        self._note(g.Op.QUARANTINE, slots)

    def hold(self, slots: torch.Tensor) -> None:
        """A transfer on another stream uses ``slots``; they must not be freed before :meth:`land`."""
        self._note(g.Op.HOLD, slots)

    def land(self, slots: torch.Tensor) -> None:
        """The transfer is over."""
        self._note(g.Op.LAND, slots)

    def aim(self, slots: torch.Tensor) -> None:
        """A transfer between servers uses ``slots``; they must not be given out before :meth:`land`."""
        self._note(g.Op.AIM, slots)

    def note_row_free(self, row: int) -> None:
        """The request on ``row`` has left it. Its slots may be freed before or after."""
        self.tenants.leave(row)
        self._left.append(row)
        self._is_read[row] = False

    def note_flush(self) -> None:
        """The allocator holds every slot again."""
        self.tenants.leave_all()
        self._left.clear()
        self._group = None
        self._queue[:] = [Delta(g.Op.FREE, 0, None)]
        if self.flights is not None:
            self.flights.clear()

    def act_for_row(self, row: int) -> None:
        """What is noted until :meth:`stop_acting` is done for the request on ``row``."""
        self._actors.append(self.tenants.owner_of(row))

    def act_for_tree(self) -> None:
        """What is noted until :meth:`stop_acting` is done by the radix tree itself."""
        self._actors.append(g.TREE)

    def stop_acting(self) -> None:
        """See :meth:`act_for_row`."""
        if len(self._actors) > 1:
            self._actors.pop()

    def seat(
        self, step: int, requests: Sequence[Request], rows: npt.NDArray[np.int64], started: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """Owner bits of the requests of the forward being announced; see :meth:`Tenants.seat`."""
        owners = self.tenants.seat(step, requests, rows, started)
        for row in self.tenants.newcomers:
            self._is_read[row] = False
        return owners

    def apply(self, step: int, violations: ViolationBuffer) -> None:
        """Bring the ledger up to what was noted, ahead of forward ``step``. Enqueued on the forward's stream."""
        violations = self._unheard if self.is_muted else violations
        if self.flights is not None:
            self.flights.poll()
            self.flights.step = step + 1
        if self._left:
            # Ahead of the frees: a finished request frees its slots first and its row last.
            rows = torch.tensor(self._left, pin_memory=not self._on_host).to(self.seats.device, non_blocking=True)
            self.seats.index_fill_(0, rows, 0)
            self._left.clear()
        for delta in self._queue:
            if delta.op not in _HARMLESS:
                self._is_read[:] = False
            if delta.slots is None:
                self.words.zero_()
                self.seats.zero_()
                self.history.clear()
                continue
            if not self._on_host:
                delta.slots.record_stream(torch.get_device_module(self.words.device).current_stream())
            self.apply_delta(delta.op, delta.actor, delta.slots, violations)
            if delta.op is not g.Op.SWEEP:
                self.history.note(Event(step, delta.op, delta.actor), delta.slots)
        self._queue.clear()

    def apply_delta(self, op: g.Op, actor: int, slots: torch.Tensor, violations: ViolationBuffer) -> None:
        """One call, on the device only. Enqueued on the current stream."""
        self._backend.apply_delta(
            op=op,
            actor=actor,
            slots=slots,
            words=self.words,
            seats=self.seats,
            records=self._records.hot,
            writers=self._records.writers,
            req_to_token=self._req_to_token,
            page_size=self._records.page_size,
            first_slot=self._records.first_slot,
            violations=violations,
        )

    def check(
        self,
        *,
        batch: Any,
        step: int | torch.Tensor,
        owners: torch.Tensor,
        total: int,
        violations: ViolationBuffer,
        rows_are_sound: bool = False,
    ) -> None:
        """Check what a forward will store and read. Enqueued on its stream, behind :meth:`apply`.

        Args:
            batch: its ``fields``, ``forward_rows`` and ``slots``.
            step: its number, or an int64 tensor (1,).
            owners: int64 (bs,), from :meth:`seat`.
            total: positions to be read, at most.
            violations: where to report.
            rows_are_sound: on a CPU, that every entry of the rows was just looked at and names the right token. Then a
                row that was checked before is not checked again until a slot is freed: who owns its slots cannot have
                changed, and what was added since, the forwards of its own request have claimed.
        """
        violations = self._unheard if self.is_muted else violations
        self._backend.claim_writes(
            words=self.words,
            seats=self.seats,
            writers=self._records.writers,
            slots=batch.slots,
            rows=batch.forward_rows,
            owners=owners,
            prefix_lens=batch.fields.prefix_lens,
            offsets=batch.fields.write_offsets,
            step=step,
            first_slot=self._records.first_slot,
            violations=violations,
        )
        rows = as_array(batch.forward_rows) if self._on_host else None
        if rows is not None:
            is_due = step % FORWARDS_A_ROUND == 0
            if rows_are_sound and not is_due and self._is_read.take(rows, mode="clip").all():
                return
            known = violations.count_on_host()
        self._backend.check_reads(
            words=self.words,
            writers=self._records.writers,
            req_to_token=self._req_to_token,
            rows=batch.forward_rows,
            owners=owners,
            offsets=batch.fields.verify_offsets,
            total=total,
            window=self._window,
            may_share=self.may_share,
            first_slot=self._records.first_slot,
            violations=violations,
        )
        if rows is not None:
            self._is_read[np.clip(rows, 0, len(self._is_read) - 1)] = violations.count_on_host() == known

    def strip_of(self, slot: int) -> str:
        """States of the slots around ``slot``, which is in brackets: ``..oo[o]cc.``. Waits for the device."""
        first = max(slot - NEIGHBOURS, 0)
        words = self.words[first : slot + NEIGHBOURS + 1].tolist()
        letters = [_LETTERS[g.state_of(word)] if not word & (g.IN_FLIGHT | g.AIMED) else "i" for word in words]
        if 0 <= slot - first < len(letters):
            letters[slot - first] = f"[{letters[slot - first]}]"
        return "".join(letters)

    def _note(self, op: g.Op, slots: torch.Tensor) -> None:
        if slots.numel():
            # A copy: often a view of a row or of a free list that is about to change.
            self._queue.append(Delta(op, self._actors[-1], slots.to(torch.int64, copy=True)))

    def _free(self, slots: torch.Tensor, pieces: list[tuple[int, int]]) -> None:
        """Queue a free, in the pieces (actor, count) that it was asked for in."""
        slots, start = slots.to(torch.int64, copy=True), 0
        for actor, count in pieces:
            self._queue.append(Delta(g.Op.FREE, actor, slots[start : start + count]))
            start += count
        if self._records.page_size > 1:
            self._queue.append(Delta(g.Op.SWEEP, 0, slots))


_LETTERS = {g.State.FREE: ".", g.State.OWNED: "o", g.State.CACHED: "c", g.State.QUARANTINED: "q"}
