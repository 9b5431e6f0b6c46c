"""Records that go from a prefill server to a decode server with the KV they belong to.

SGLang registers the buffers of its pool with a transfer backend, page by page. The records of the same pages are
registered as two more of them, so they take the same way, by the same transport, in the same request. They arrive in
an inbox: the records themselves change in the order of one stream, and nothing arrives in that order. When all has come
it is compared there, see :mod:`.arrivals`; then SGLang lets the request go on, and the records are taken over ahead of
the next forward, which checks them again.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..pool_patcher.records import ShadowRecords
from .adoption import make_records
from .space import Space
from .truth import Request, TruthTable

# Of what is sent: hot records and writers, as ShadowRecords has them; and when a transfer that was given up is over.
FORMAT: Final = 2
Infos = tuple[list[int], list[int], list[int]]  # address, bytes, and bytes a page of each buffer


class Handover:
    """What one pool sends or receives besides its KV.

    Attributes:
        tag: says what is sent; both sides must have the same.
        records: the records themselves, or the inbox of those that come.
        hot: int64 (slot_count, RECORD_WORDS), of them.
        receives: from a prefill server.
    """

    def __init__(self, space: Space, truth: TruthTable, name: str, *, receives: bool) -> None:
        """``name`` is the same where records mean the same: for the same model, layout and number of ranks."""
        records = space.records
        self._space, self._truth = space, truth
        inbox = ShadowRecords(records.slot_count, records.page_size, records.hot.device) if receives else None
        self.records = inbox or records
        self.hot = self.records.hot
        self.receives = receives
        self.tag = f"kvcanary-{FORMAT}-{name}"

    @property
    def resident_bytes(self) -> int:
        """Device bytes of the inbox."""
        return self.records.resident_bytes if self.receives else 0

    @property
    def bytes_per_token(self) -> int:
        """What a transfer carries more."""
        return (self.hot.shape[1] + 1) * 8

    def splice(self, infos: Infos, halves: int) -> Infos:
        """The buffers of the pool and ours. Whoever has ``halves``, K and V, splits the list in the middle."""
        pointers, sizes, items = (list(part) for part in infos)
        middle = len(pointers) // halves
        for place, buffer in (
            (len(pointers), self.records.writers),
            (middle if halves == 2 else len(pointers), self.hot),
        ):
            pointers.insert(place, buffer.data_ptr())
            sizes.insert(place, buffer.nbytes)
            items.insert(place, buffer[0].nbytes * self._space.records.page_size)
        return pointers, sizes, items

    def take_over(self, request: Request, slots: torch.Tensor) -> None:
        """KV of the first n tokens of ``request`` is in ``slots``, int (n,), with its records in the inbox."""
        kept = slots.to(torch.int64, copy=True)

        def restore() -> None:
            there = self._space.in_stream(kept)
            self._space.records.restore(there, (self.hot[there], torch.zeros_like(there)))
            self.hot.index_fill_(0, there, 0)  # what does not come next time must not look as if it had

        self._space.defer(restore)

    def make_up(self, request: Request, slots: torch.Tensor) -> None:
        """Nothing was sent for ``request``, by intent: its records are made of its tokens and the bytes there are."""
        kept = slots.to(torch.int64, copy=True)
        positions = torch.arange(len(kept)).numpy()
        made = make_records(request, self._truth.anchor_of(request), positions, None)
        hot = torch.from_numpy(made).to(self.hot.device)

        def restore() -> None:
            there = self._space.in_stream(kept)
            self._space.records.restore(there, (hot, torch.zeros_like(there)))
            self._space.seal(there)

        self._space.defer(restore)


class Tagged:
    """Arguments of SGLang whose KV dtype, which both sides compare when they connect, says what is sent besides."""

    def __init__(self, server_args: Any, tag: str) -> None:
        self._server_args = server_args
        self.kv_cache_dtype = f"{server_args.kv_cache_dtype} with records {tag}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server_args, name)
