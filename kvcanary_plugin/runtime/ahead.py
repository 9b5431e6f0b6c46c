"""Compiles what a guard is going to launch while the server is still starting.

A kernel is compiled when it is first used, which takes some tenths of a second where Triton's cache on disk does not
have it: forwards that use one size for the first time would stand still for so long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from ..kernels import ledger as g
from ..kernels.backend import Backend
from .batch import Batch, BatchBuffers
from .launches import Launches
from .ledger import Ledger
from .space import Space

logger = logging.getLogger("kvcanary")

# One of each range within which the kernels are the same.
DECODES = (1, 32, 64, 128, 256)
EXTENDS = ((1, 20), (1, 1000), (1, 20_000), (32, 1000), (64, 1000))
FOLDS = (1, 1000, 5000)
DELTAS = (1, 50, 100, 200)
OPERATIONS = (g.Op.ALLOC, g.Op.FREE, g.Op.INSERT, g.Op.SWEEP)


class Ahead:
    """Does so in a thread of its own. What fails is left to the first use.

    The thread asks the device for nothing, memory above all: the server is recording graphs by then, and that would
    spoil them.
    """

    def __init__(
        self,
        launches: Launches,
        spaces: Sequence[Space],
        ledger: Ledger | None,
        device: torch.device,
    ) -> None:
        self._launches = launches
        self._spaces = spaces
        self._ledger = ledger
        self._device = device
        self._thread = threading.Thread(target=self._run, name="kvcanary-compile", daemon=True)
        self._batches: list[tuple[Batch, bool]] = []
        self._slots = torch.zeros(0, dtype=torch.int64, device=device)

    @staticmethod
    def serves(backend: Backend, device: torch.device) -> bool:
        """Whether anything is compiled for this device."""
        return backend.name == "triton" and device.type != "cpu"

    def start(self) -> None:
        """Begin, and return."""
        from ..kernels.pointers import pointers_of  # these need Triton, which a host without a GPU may not have

        for space in self._spaces:
            pointers_of(space.slots.table)
        sizes = [(size, size, True) for size in DECODES] + [(size, written, False) for size, written in EXTENDS]
        for size, written, is_recorded in sizes:
            buffers = BatchBuffers(self._device, len(self._spaces) - 1)
            self._batches.append((buffers.batch_of(size, written), is_recorded))
        self._slots = self._slots.new_zeros(max(*FOLDS, *DELTAS))
        self._thread.start()

    def wait(self) -> None:
        """Until everything is compiled."""
        self._thread.join()

    def _run(self) -> None:
        from ..kernels.launch import compiling_only

        try:
            torch.get_device_module(self._device).set_device(self._device)
            with compiling_only():
                for batch, is_recorded in self._batches:
                    self._compile(batch, is_recorded=is_recorded)
                for space in self._spaces:
                    self._compile_folds(space)
                if self._ledger is not None:
                    self._compile_deltas(self._ledger)
        except Exception:
            logger.debug("kvcanary: kernels are compiled when they are first used", exc_info=True)
        finally:
            self._batches.clear()

    def _compile(self, batch: Batch, *, is_recorded: bool) -> None:
        """A forward of so many requests that stores so many tokens."""
        step = batch.fields.step if is_recorded else 1
        inputs = batch.tokens, batch.slots, batch.forward_rows
        self._launches.prepare(batch, batch.fields.block, inputs, 1, step)
        for space in self._spaces:
            self._compile_record(space, batch, step, is_recorded=is_recorded)
            space.drain(batch)

    def _compile_record(self, space: Space, batch: Batch, step: int | torch.Tensor, *, is_recorded: bool) -> None:
        for count in FOLDS if space.scrubber is not None else (0,):
            space.record(batch, step, batch.fields.scrub_starts[space.index] if is_recorded else 1, count)

    def _compile_folds(self, space: Space) -> None:
        """Prefixes that requests start on, and what is folded while nothing runs."""
        for count in FOLDS:
            space.check_slots(self._slots[:count], 0)
            if space.scrubber is not None:
                space.scrub(1, min(count, space.slots.slot_count - 1))

    def _compile_deltas(self, ledger: Ledger) -> None:
        for op in OPERATIONS:
            for count in DELTAS:
                ledger.apply_delta(op, 0, self._slots[:count], self._spaces[0].violations)
