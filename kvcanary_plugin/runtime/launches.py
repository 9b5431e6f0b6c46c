"""What is enqueued around a forward. Decode steps replay it from device graphs: the host then pays for two calls.

Only fixed tensors are read and written here, so a recorded launch stays valid; whatever changes from step to step lies
in them. That is why a decode batch is padded to the next power of two and has tensors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.backend import Backend
from ..kernels.captured import CapturedLaunches
from .batch import Batch, BatchBuffers, HostFields
from .ledger import Ledger
from .order import Order
from .space import Space

MAX_CAPTURED_REQUESTS = 1024  # 160 bytes each on the device, 57 KiB to upload
MAX_GRAPHS = 1024
_LEAST_TOTAL = 1024

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # input_ids, out_cache_loc, req_pool_indices of the forward
Scrubs = tuple[tuple[int, int], ...]  # first slot and number of slots of the rotating pass, for each space


class Launches:
    """The kernels of one guard, launched one by one.

    Attributes:
        rows_tell: every entry of the rows is looked at, so that on a CPU the ledger need not always do it.
    """

    def __init__(
        self,
        backend: Backend,
        spaces: Sequence[Space],
        ledger: Ledger | None = None,
        order: Order | None = None,
        *,
        rows_tell: bool = True,
    ) -> None:
        self._backend = backend
        self._spaces = spaces
        self._ledger = ledger
        self._order = order
        self.rows_tell = rows_tell

    def prepare(self, batch: Batch, source: torch.Tensor, inputs: Inputs, total: int, step: int | torch.Tensor) -> None:
        """Before the forward: take what the host knows (``source``) and what the forward may change, verify what it
        will read, ``total`` positions at most, check who owns it, and poison what the forward is to store.
        """
        input_ids, out_cache_loc, req_pool_indices = inputs
        self._backend.stage_batch(
            source=source,
            block=batch.fields.block,
            input_ids=input_ids,
            out_cache_loc=out_cache_loc,
            req_pool_indices=req_pool_indices,
            tokens=batch.tokens,
            slots=batch.slots,
            rows=batch.forward_rows,
        )
        if self._order is not None:
            self._order.check(batch, self._spaces[0].violations)
        for space in self._spaces:
            space.find_slots(batch)
            space.verify(batch, total)
        if self._ledger is not None:
            found = self._spaces[0].violations
            self._ledger.check(
                batch=batch,
                step=step,
                owners=batch.fields.owners,
                total=total,
                violations=found,
                rows_are_sound=self.rows_tell and found.is_on_host and not found.count_on_host(),
            )
        for space in self._spaces:
            space.poison(batch)

    def conclude(self, batch: Batch, step: int | torch.Tensor, starts: Sequence[Any], counts: Sequence[int]) -> None:
        """Behind the forward: records, poison that is left, the next piece of the pool, and the verdict."""
        for space in self._spaces:
            space.record(batch, step, starts[space.index], counts[space.index])
        self.close(batch)

    def seal(self, batch: Batch, step: int, starts: Sequence[int], counts: Sequence[int]) -> None:
        """The same for a forward whose records have been stamped, and without the verdict."""
        for space in self._spaces:
            space.record(batch, step, starts[space.index], counts[space.index], is_stamped=True)

    def close(self, batch: Batch) -> None:
        """The verdict of what was enqueued so far."""
        for space in self._spaces:
            space.drain(batch)
        if self._order is not None:
            self._order.note_forward(batch)


class CapturedDecode:
    """The same launches for decode steps, recorded at the second use of each size and replayed from then on."""

    def __init__(self, launches: Launches, device: torch.device, companions: int = 0) -> None:
        self._launches = launches
        self._companions = companions
        self._device = device
        self._buffers: dict[int, Batch] = {}
        self._graphs: dict[tuple[Any, ...], CapturedLaunches | None] = {}

    @staticmethod
    def serves(device: torch.device) -> bool:
        """Whether this kind of device has graphs."""
        return device.type != "cpu" and hasattr(torch.get_device_module(device), "CUDAGraph")

    def batch_of(self, batch_size: int) -> Batch:
        """Tensors for up to the next power of two of requests that store one token each."""
        room = 1 << (batch_size - 1).bit_length()
        batch = self._buffers.get(room)
        if batch is None:
            batch = self._buffers[room] = BatchBuffers(self._device, self._companions).batch_of(room, room)
        return batch

    def prepare(self, batch: Batch, host: HostFields, inputs: Inputs, total: int) -> None:
        """See :meth:`Launches.prepare`. Where the inputs lie must stand in ``host``."""
        room = max(_LEAST_TOTAL, 1 << (total - 1).bit_length())
        kinds = inputs[0].dtype, inputs[1].dtype, inputs[2].dtype
        self._run(
            ("prepare", id(batch), id(host), room, *kinds),
            lambda: self._launches.prepare(batch, host.block, inputs, room, batch.fields.step),
        )

    def conclude(self, batch: Batch, counts: Sequence[int]) -> None:
        """See :meth:`Launches.conclude`."""
        self._run(
            ("conclude", id(batch), *counts),
            lambda: self._launches.conclude(batch, batch.fields.step, batch.fields.scrub_starts, counts),
        )

    def forget(self) -> None:
        """What is to be launched has changed."""
        self._graphs.clear()

    def _run(self, key: tuple[Any, ...], enqueue: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif key in self._graphs:
            graph = self._graphs[key] = CapturedLaunches(enqueue, self._device)
            graph.replay()
        else:
            if len(self._graphs) >= MAX_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = None
            enqueue()  # compiles and allocates what the recording must find ready
