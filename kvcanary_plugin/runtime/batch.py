"""What one forward was announced with, as the device sees it: lengths, hashes and CSR offsets, tokens and slots.

Made once and grown on demand. All fields of a batch lie in one contiguous block, so that they travel in one copy; the
slices that a batch size needs are kept, because making them costs more on a CPU than most of what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MAX_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Fields:
    """Int64 views of one contiguous block: (bs,) each, and CSR offsets (bs + 1,) over positions read, tokens stored."""

    block: torch.Tensor
    rows: torch.Tensor
    prefix_lens: torch.Tensor
    anchors: torch.Tensor
    chains: torch.Tensor
    verify_offsets: torch.Tensor
    write_offsets: torch.Tensor


def split_fields(buffer: torch.Tensor, batch_size: int) -> Fields:
    """The fields of a batch within a flat int64 buffer of at least ``words_of(batch_size)``."""
    block = buffer[: words_of(batch_size)]
    return Fields(block, *torch.split(block, [batch_size] * 4 + [batch_size + 1] * 2))


def words_of(batch_size: int) -> int:
    """Words the fields of a batch take."""
    return 6 * batch_size + 2


def fill_fields(
    fields: Fields,
    rows: list[int],
    prefix_lens: list[int],
    write_lens: list[int],
    anchors: npt.NDArray[np.uint64],
    chains: npt.NDArray[np.uint64],
) -> None:
    """Write what the host knows into a block in its memory."""
    host = fields.block.numpy()
    n = len(rows)
    numbers = np.array((rows, prefix_lens, write_lens))
    host[: 2 * n] = numbers[:2].reshape(-1)
    host[2 * n : 3 * n] = anchors.view(np.int64)
    host[3 * n : 4 * n] = chains.view(np.int64)
    offsets = host[4 * n :].reshape(2, n + 1)
    offsets[:, 0] = 0
    np.cumsum(numbers[1:], axis=1, out=offsets[:, 1:])


class BatchBuffers:
    """Buffers for the batch that is being forwarded. Everything is used in the order of one stream."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(words_of(16), dtype=torch.int64, device=device)
        self._snapshot = torch.zeros((2, 0), dtype=torch.int64, device=device)
        self._fields: dict[int, Fields] = {}
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fields_of(self, batch_size: int) -> Fields:
        """The fields of a batch of that size."""
        known = self._fields.get(batch_size)
        if known is None:
            if self._buffer.numel() < words_of(batch_size):
                self._buffer = self._buffer.new_zeros(words_of(2 * batch_size))
                self._fields.clear()
            known = self._fields[batch_size] = split_fields(self._buffer, batch_size)
        return known

    def stored(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and slots, int64 (count,), as :meth:`snapshot` copied them aside."""
        known = self._stored.get(count)
        if known is None:
            if self._snapshot.shape[1] < count:
                self._snapshot = self._snapshot.new_zeros((2, 2 * count))
                self._stored.clear()
            if len(self._stored) >= MAX_REMEMBERED:
                self._stored.clear()
            tokens, slots = self._snapshot[:, :count]
            known = self._stored[count] = (tokens, slots)
        return known

    def snapshot(self, input_ids: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        """Copy tokens (int (n,)) and slots (int (n,)) aside: a model may change them in place."""
        tokens, slots = self.stored(input_ids.numel())
        tokens.copy_(input_ids)
        slots.copy_(out_cache_loc)
