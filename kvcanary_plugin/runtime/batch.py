"""The device's private copy of what one forward was announced with: lengths, hashes, tokens, slots, CSR offsets.

Made once and grown on demand; the slices a batch size needs are kept too, because making them costs more on a CPU than
most of what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROWS, PREFIX_LENS, WRITE_LENS, ANCHORS, CHAINS = range(5)
FIELDS = 5


@dataclass(frozen=True, slots=True)
class Requests:
    """One int64 tensor (bs,) per field, and CSR offsets (bs + 1,) over positions read and tokens stored."""

    block: torch.Tensor  # (FIELDS, bs): the fields below, as they are uploaded
    rows: torch.Tensor
    prefix_lens: torch.Tensor
    write_lens: torch.Tensor
    anchors: torch.Tensor
    chains: torch.Tensor
    verify_offsets: torch.Tensor
    write_offsets: torch.Tensor


class BatchBuffers:
    """Buffers for the batch that is being forwarded. Everything is used in the order of one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fields = torch.zeros((FIELDS, 0), dtype=torch.int64, device=device)
        self._offsets = torch.zeros((2, 1), dtype=torch.int64, device=device)
        self._snapshot = torch.zeros((2, 0), dtype=torch.int64, device=device)
        self._requests: dict[int, Requests] = {}
        self._tokens: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def requests_of(self, batch_size: int) -> Requests:
        """The per-request tensors of a batch of that size."""
        known = self._requests.get(batch_size)
        if known is not None:
            return known
        if self._fields.shape[1] < batch_size:
            self._fields = torch.zeros((FIELDS, 2 * batch_size), dtype=torch.int64, device=self._device)
            self._offsets = torch.zeros((2, 2 * batch_size + 1), dtype=torch.int64, device=self._device)
            self._requests.clear()
        block = self._fields[:, :batch_size]
        requests = Requests(block, *block, *self._offsets[:, : batch_size + 1])
        self._requests[batch_size] = requests
        return requests

    def snapshot(self, input_ids: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        """Copy tokens (int (n,)) and slots (int (n,)) aside: a model may change them in place."""
        tokens, slots = self.stored(input_ids.numel())
        tokens.copy_(input_ids)
        slots.copy_(out_cache_loc)

    def stored(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and slots, int64 (count,), as they were copied aside."""
        known = self._tokens.get(count)
        if known is not None:
            return known
        if self._snapshot.shape[1] < count or len(self._tokens) >= 1024:
            if self._snapshot.shape[1] < count:
                self._snapshot = torch.zeros((2, 2 * count), dtype=torch.int64, device=self._device)
            self._tokens.clear()
        tokens, slots = self._snapshot[:, :count]
        self._tokens[count] = (tokens, slots)
        return tokens, slots
