"""Byte sources: where the KV bytes of a slot live, as views of the live buffers. Nothing is ever copied to make one,
because a copy would be fingerprinted while the live bytes rot.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.mixing import make_keys

PARTIAL_READ_ALIGN_BYTES = 16
WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Source:
    """One row of bytes per slot: one layer's K or V, say, or a piece of it where the row lies in pieces.

    Attributes:
        rows: uint8 (page_count, page_size, read_bytes), a view of the live buffer; the last dimension is contiguous.
            Where the slots of a page lie in groups, (page_count, groups of a page, slots of a group, read_bytes).
        read_bytes: bytes of each slot that are read.
        words: the same as int64 (page_count * page_size, read_bytes / 8) where alignment and strides allow, else None.
    """

    rows: torch.Tensor
    read_bytes: int
    words: torch.Tensor | None

    @property
    def page_size(self) -> int:
        """Slots a page holds."""
        return math.prod(self.rows.shape[1:-1])

    @property
    def slot_count(self) -> int:
        """Slots there are, padding included."""
        return math.prod(self.rows.shape[:-1])

    @property
    def word_count(self) -> int:
        """64-bit words a slot is folded as; the last one is padded with zero bytes."""
        return -(-self.read_bytes // WORD_BYTES)

    def gather_words(self, slots: torch.Tensor, *, out: torch.Tensor) -> None:
        """Copy the words of ``slots`` (int64 (n,)) into ``out`` (int64 (n, word_count), contiguous)."""
        if self.words is not None:
            torch.index_select(self.words, 0, slots, out=out)
            return
        chosen = self.rows[slots] if self.page_size == 1 else self.rows[self.place(slots)]
        out[:, -1] = 0
        out.view(torch.uint8)[:, : self.read_bytes] = chosen.view(slots.numel(), self.read_bytes)

    def place(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Indices of ``slots``, int64 (n,), in all dimensions of ``rows`` but the last, int64 (n,) each."""
        places: list[torch.Tensor] = []
        for size in reversed(self.rows.shape[1:-1]):
            places.insert(0, slots % size)
            slots = slots // size
        return (slots, *places)


def clip_read_bytes(*, requested: int, num_bytes_per_token: int) -> int:
    """Bytes of a slot to read: ``sys.maxsize`` means all of them, 0 none; the whole slot may have any width.

    Raises:
        ValueError: negative, larger than the slot, or a part of a slot that is not a multiple of 16.
    """
    if num_bytes_per_token <= 0:
        raise ValueError(f"kv-canary: num_bytes_per_token must be positive, got {num_bytes_per_token}")
    if requested in (sys.maxsize, num_bytes_per_token):
        return num_bytes_per_token
    if requested < 0:
        raise ValueError(f"kv-canary: read_bytes must be non-negative, got {requested}")
    if requested > num_bytes_per_token:
        raise ValueError(
            f"kv-canary: read_bytes must be <= num_bytes_per_token ({num_bytes_per_token}), got {requested}"
        )
    if requested % PARTIAL_READ_ALIGN_BYTES:
        raise ValueError(f"kv-canary: read_bytes must be a multiple of {PARTIAL_READ_ALIGN_BYTES}, got {requested}")
    return requested


def make_row_source(*, layer_buffer: torch.Tensor, read_bytes: int) -> tuple[Source, ...]:
    """The source of a buffer with one row a slot.

    Args:
        layer_buffer: (slot_count, ...) of any dtype. Rows may lie apart, but each row is contiguous.
        read_bytes: see :func:`clip_read_bytes`.

    Returns:
        One source, or none where nothing is to be read.

    Raises:
        ValueError: ``read_bytes`` is out of bounds, or a row is not contiguous, so that no view of its bytes exists.
    """
    if layer_buffer.numel() == 0 or read_bytes == 0:
        return ()
    slot_count = layer_buffer.shape[0]
    try:
        rows = layer_buffer.view(slot_count, -1).view(torch.uint8)
    except RuntimeError as error:
        raise ValueError(
            f"kv-canary: layer_buffer of shape {tuple(layer_buffer.shape)}, strides {layer_buffer.stride()}, has rows "
            "that are not contiguous; a source must be a view of the live bytes, so pass one buffer per whole part"
        ) from error
    return (make_source(rows.unsqueeze(1), read_bytes),)


def view_slots(buffer: torch.Tensor, *, slot_axes: Sequence[int] = ()) -> tuple[torch.Tensor, ...]:
    """The bytes of each slot of a buffer, as views of it: one for each stretch of bytes that lie together.

    Args:
        buffer: (slot_count, ...) of any dtype, or (page_count, ..., page_size, ...) with the slots of a page along one
            of ``slot_axes``, or along two of them where they lie in groups. Rows may lie apart, and their elements in
            any order.
        slot_axes: first the one that counts groups, then the one that counts the slots of each.

    Returns:
        uint8 (page_count, page_size, width) each, page_size being 1 for the first kind; with groups uint8 (page_count,
        groups of a page, slots of a group, width). In the order of their memory; each byte of the buffer is in exactly
        one. None where the buffer is empty.

    Raises:
        ValueError: several elements share one place in memory.
    """
    if buffer.numel() == 0:
        return ()
    outer = 1 + max(1, len(slot_axes))
    moved = buffer.movedim(tuple(slot_axes), tuple(range(1, outer))) if slot_axes else buffer.unsqueeze(1)
    item = buffer.element_size()
    shape, strides = moved.shape[:outer], [stride * item for stride in moved.stride()[:outer]]
    rest = zip(moved.shape[outer:], moved.stride()[outer:], strict=True)
    inner = sorted((stride, size) for size, stride in rest if size > 1)
    if any(stride == 0 for stride, _ in inner):
        raise ValueError(
            f"kv-canary: buffer of shape {tuple(buffer.shape)} and strides {buffer.stride()} has elements that share "
            "one place in memory; pass the buffer it was expanded from"
        )
    width = 1
    while inner and inner[0][0] == width:
        width *= inner.pop(0)[1]
    starts = itertools.product(*(range(0, stride * size, stride) for stride, size in reversed(inner)))
    flat = buffer.as_strided((1,), (1,), buffer.storage_offset()).view(torch.uint8)
    return tuple(
        flat.as_strided(
            (*shape, width * item),
            (*strides, 1),
            (buffer.storage_offset() + sum(start)) * item,
        )
        for start in starts
    )


def make_packed_source(
    *, page_buffer: torch.Tensor, page_size: int, bytes_per_token: int, read_bytes: int
) -> tuple[Source, ...]:
    """The source of a buffer whose pages hold ``page_size`` slots of ``bytes_per_token`` bytes, then anything else.

    Args:
        page_buffer: (page_count, ...) of any dtype, or one page as a flat buffer; each page is contiguous.
        page_size: slots a page.
        bytes_per_token: bytes a slot has within its page.
        read_bytes: see :func:`clip_read_bytes`.

    Returns:
        One source, or none where nothing is to be read.

    Raises:
        ValueError: a size is out of bounds, or a page is too small or not contiguous.
    """
    if page_buffer.numel() == 0 or read_bytes == 0:
        return ()
    if page_size <= 0:
        raise ValueError(f"kv-canary: page_size must be positive, got {page_size}")
    clip_read_bytes(requested=read_bytes, num_bytes_per_token=bytes_per_token)
    pages = page_buffer.unsqueeze(0) if page_buffer.ndim == 1 else page_buffer
    try:
        flat = pages.view(pages.shape[0], -1).view(torch.uint8)
    except RuntimeError as error:
        raise ValueError(
            f"kv-canary: page_buffer of shape {tuple(page_buffer.shape)} and strides {page_buffer.stride()} has pages "
            "that are not contiguous; a source must be a view of the live bytes"
        ) from error
    if page_size * bytes_per_token > flat.shape[1]:
        raise ValueError(
            f"kv-canary: a page of {flat.shape[1]} bytes cannot hold page_size={page_size} slots of "
            f"bytes_per_token={bytes_per_token}"
        )
    rows = flat.as_strided((flat.shape[0], page_size, bytes_per_token), (flat.stride(0), bytes_per_token, 1))
    return (make_source(rows, read_bytes),)


def make_source(rows: torch.Tensor, read_bytes: int) -> Source:
    """The source of uint8 (page_count, page_size, width), a view whose last dimension is contiguous; or with groups.

    Raises:
        ValueError: see :func:`clip_read_bytes`.
    """
    clipped = clip_read_bytes(requested=read_bytes, num_bytes_per_token=rows.shape[-1])
    return Source(rows=rows[..., :clipped], read_bytes=clipped, words=_view_words(rows[..., :clipped]))


def _view_words(rows: torch.Tensor) -> torch.Tensor | None:
    """The int64 view of uint8 rows with one row a slot, if there is one."""
    try:
        flat = rows.view(math.prod(rows.shape[:-1]), rows.shape[-1])
    except RuntimeError:  # no single stride leads from slot to slot
        return None
    if flat.shape[1] % WORD_BYTES or flat.stride(0) % WORD_BYTES or flat.data_ptr() % WORD_BYTES:
        return None
    return flat.view(torch.int64)


class SourceTable:
    """All sources of one pool in a fixed order, with the fold keys and weights that belong to them.

    Attributes:
        sources: source b of the digest is ``sources[b]``.
        names: (layer, half) of each source, for reports; pieces of one row share it.
        slot_count: slots of the pool, padding included.
        bytes_per_slot: bytes folded per slot.
        keys: int64 (source_count, most words of a source).
        weights: int64 (source_count,), 2b + 1.
        arrays: on a CPU, the words of each source as numpy uint64 over the same memory; None elsewhere.
        runs: (first, last + 1, word_count) of neighbouring sources of equal width.
    """

    def __init__(self, named: Sequence[tuple[tuple[int, str], Source]], slot_count: int, device: torch.device) -> None:
        self.names = tuple(name for name, _ in named)
        self.sources = tuple(source for _, source in named)
        for (layer, half), source in named:
            if source.slot_count < slot_count:
                raise ValueError(
                    f"kv-canary: layer {layer} {half} has {source.slot_count} slots, the pool {slot_count}"
                )
        self.slot_count = slot_count
        self.bytes_per_slot = sum(source.read_bytes for source in self.sources)
        widest = max((source.word_count for source in self.sources), default=0)
        self.keys = make_keys(len(self.sources), widest, device)
        self.weights = torch.arange(len(self.sources), device=device) * 2 + 1
        self.runs = self._find_runs()
        self.arrays = tuple(
            None if source.words is None or device.type != "cpu" else source.words.numpy().view(np.uint64)
            for source in self.sources
        )

    def _find_runs(self) -> tuple[tuple[int, int, int], ...]:
        runs: list[tuple[int, int, int]] = []
        for index, source in enumerate(self.sources):
            if runs and runs[-1][2] == source.word_count:
                runs[-1] = (runs[-1][0], index + 1, source.word_count)
            else:
                runs.append((index, index + 1, source.word_count))
        return tuple(runs)

    @property
    def resident_bytes(self) -> int:
        """Device bytes this table keeps."""
        return (self.keys.numel() + self.weights.numel()) * 8
