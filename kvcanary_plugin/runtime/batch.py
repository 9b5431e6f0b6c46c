"""What one forward was announced with, as the device sees it: lengths, hashes and CSR offsets, tokens and slots.

Made once and grown on demand. All fields of a batch lie in one contiguous block, so that they travel together; the
views that a batch size needs are kept, because making them costs more than most of what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.record import HEADER_WORDS, Header
from .truth import Truth

MAX_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Fields:
    """Int64 views of one contiguous block: header words, then (bs,) each, then CSR offsets (bs + 1,) over positions
    read and over tokens stored; the number of the step, (1,), lies within the header.
    """

    block: torch.Tensor
    header: torch.Tensor
    rows: torch.Tensor
    prefix_lens: torch.Tensor
    anchors: torch.Tensor
    chains: torch.Tensor
    owners: torch.Tensor
    verify_offsets: torch.Tensor
    write_offsets: torch.Tensor
    step: torch.Tensor

    @property
    def due(self) -> torch.Tensor:
        """Steps that the writers of tickets must have come to, (2,)."""
        return self.header[Header.FORWARD_DUE : Header.BATCH_DUE + 1]

    @property
    def scrub_starts(self) -> tuple[torch.Tensor, ...]:
        """First slot of the rotating pass of each space, (1,)."""
        return tuple(self.header[place : place + 1] for place in range(Header.SCRUB_STARTS, HEADER_WORDS))


def words_of(batch_size: int) -> int:
    """Words the fields of a batch take, header included."""
    return HEADER_WORDS + 7 * batch_size + 2


def split_fields(buffer: torch.Tensor, batch_size: int) -> Fields:
    """The fields of a batch within a flat int64 buffer of at least ``words_of(batch_size)``."""
    block = buffer[: words_of(batch_size)]
    sizes = [HEADER_WORDS] + [batch_size] * 5 + [batch_size + 1] * 2
    header, rows, lengths, anchors, chains, owners, reads, writes = torch.split(block, sizes)
    step = header[Header.STEP : Header.STEP + 1]
    return Fields(block, header, rows, lengths, anchors, chains, owners, reads, writes, step)


class HostFields:
    """The fields of a batch as the host writes them, which may have room for more requests than there are.

    Requests past the batch get row 0 and neither read nor store anything.

    Attributes:
        block: int64 (words,) in host memory.
        header: the same memory in numpy, HEADER_WORDS of it.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block
        words = block.numpy()
        room = (len(words) - HEADER_WORDS - 2) // 7
        self.header = words[:HEADER_WORDS]
        self._numbers = words[HEADER_WORDS : HEADER_WORDS + 5 * room].reshape(5, room)
        self._offsets = words[HEADER_WORDS + 5 * room :].reshape(2, room + 1)
        self._filled: Truth | None = None

    def fill(
        self,
        step: int,
        truth: Truth,
        write_lens: Sequence[int],
        owners: npt.NDArray[np.int64] | None = None,
        *,
        is_even: bool,
    ) -> None:
        """Write what the host knows of a batch; ``owners`` are its owner bits, int64 (bs,).

        ``is_even``: each request stores one token.
        """
        n = len(truth.rows)
        self.header[Header.STEP] = step
        # Of a batch that goes on evenly the truth stays the same object, and nothing else was filled in meanwhile.
        if not is_even or self._filled is not truth:
            self._fill_all(n, truth, write_lens)
            self._filled = truth if is_even else None
        self._lengths[:] = truth.lengths
        self._chains[:] = truth.chains
        if owners is not None:
            self._owners[:] = owners
        truth.lengths.cumsum(out=self._ends)
        if n < self._numbers.shape[1]:
            self._offsets[0, n + 1 :] = self._ends[-1] if n else 0

    def set_scrub(self, space: int, start: int) -> None:
        """First slot of the rotating pass of a space."""
        self.header[Header.SCRUB_STARTS + space] = start

    def set_inputs(self, input_ids: torch.Tensor, out_cache_loc: torch.Tensor, req_pool_indices: torch.Tensor) -> None:
        """Where the forward's own tensors lie, for a device that looks them up itself."""
        self.header[Header.INPUT_IDS] = input_ids.data_ptr()
        self.header[Header.OUT_CACHE_LOC] = out_cache_loc.data_ptr()
        self.header[Header.REQ_POOL_INDICES] = req_pool_indices.data_ptr()

    def _fill_all(self, n: int, truth: Truth, write_lens: Sequence[int]) -> None:
        """What does not change while the same requests go on decoding, and the views of what does."""
        self._lengths = self._numbers[1, :n]
        self._chains = self._numbers[3, :n].view(np.uint64)
        self._owners = self._numbers[4, :n]
        self._ends = self._offsets[0, 1 : n + 1]
        self._numbers[0, :n] = truth.rows
        self._numbers[2, :n] = truth.anchors.view(np.int64)
        self._numbers[:, n:] = 0
        self._offsets[:, 0] = 0
        ends = self._offsets[1, 1:]
        np.cumsum(write_lens, out=ends[:n])
        ends[n:] = ends[n - 1] if n else 0
        self.header[Header.REQUESTS], self.header[Header.WRITTEN] = n, ends[-1] if len(ends) else 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one forward that nothing but the guard writes to.

    Attributes:
        fields: what the host knew.
        forward_rows: int64 (bs,), request rows as the forward has them.
        tokens, slots: int64 (written,), what the forward stores and where.
        companion_slots: the same in each companion space, -1 where a token has no slot there.
        host: where the host writes the fields if that is the same memory; None on a device, which is sent them.
    """

    fields: Fields
    forward_rows: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor
    companion_slots: tuple[torch.Tensor, ...]
    host: HostFields | None

    def slots_of(self, space: int) -> torch.Tensor:
        """Where the forward stores in a space, int64 (written,); 0 is the main one."""
        return self.companion_slots[space - 1] if space else self.slots


class BatchBuffers:
    """Buffers for the batch that is being forwarded. Everything is used in the order of one stream."""

    def __init__(self, device: torch.device, companions: int = 0) -> None:
        self._companions = companions
        self._buffer = torch.zeros(words_of(16), dtype=torch.int64, device=device)
        self._rows = torch.zeros(16, dtype=torch.int64, device=device)
        self._snapshot = torch.zeros((2 + companions, 0), dtype=torch.int64, device=device)
        self._batches: dict[tuple[int, int], Batch] = {}

    def batch_of(self, batch_size: int, written: int) -> Batch:
        """The tensors of a batch of ``batch_size`` requests that stores ``written`` tokens."""
        known = self._batches.get((batch_size, written))
        if known is not None:
            return known
        if self._rows.numel() < batch_size or self._snapshot.shape[1] < written:
            self._buffer = self._buffer.new_zeros(words_of(max(2 * batch_size, 16)))
            self._rows = self._rows.new_zeros(max(2 * batch_size, 16))
            self._snapshot = self._snapshot.new_zeros((2 + self._companions, 2 * written))
            self._batches.clear()
        if len(self._batches) >= MAX_REMEMBERED:
            self._batches.clear()
        fields = split_fields(self._buffer, batch_size)
        host = HostFields(fields.block) if self._buffer.device.type == "cpu" else None
        tokens, slots, *companions = self._snapshot[:, :written]
        batch = Batch(fields, self._rows[:batch_size], tokens, slots, tuple(companions), host)
        self._batches[(batch_size, written)] = batch
        return batch
