"""The bytes of one page in a host pool of SGLang, whatever its class and layout.

Most pools can say where a page lies (``get_page_buffer_meta``): 2 pieces for K and V, twice the number of layers for
``layer_first``, one for MLA. Those are read and written in place. The others are copied through ``get_data_page`` and
``set_from_flat_data_page``. A logical pool, which only numbers pages, has no bytes at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..errors import UncoveredError

Parts = tuple[Any, ...]


class HostPages(Protocol):
    """How pages of one pool are read and written.

    Attributes:
        page_tokens: indices a page.
        payload_bytes: bytes a page; 0 for a logical pool.
        order: how the bytes are strung together. Pages of another order are other pages.
    """

    page_tokens: int
    payload_bytes: int
    order: str

    def sources(self, host_indices: torch.Tensor) -> list[Parts]:
        """For each page its pieces as they are now."""

    def targets(self, host_indices: torch.Tensor) -> list[Parts]:
        """For each page the pieces to fill; followed by :meth:`accept` for those that are good."""

    def accept(self, host_indices: torch.Tensor, page: int, parts: Parts) -> None:
        """``parts``, made by :meth:`targets`, hold the right bytes of the page with that number."""


class PlacedPages:
    """A pool that says where its pages lie: no copies."""

    order = "placed"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = int(pool.page_size)
        self.payload_bytes = sum(piece_sizes(pool) or ())

    def sources(self, host_indices: torch.Tensor) -> list[Parts]:
        """See the protocol."""
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        pages = len(host_indices) // self.page_tokens
        pieces = len(pointers) // pages if pages else 0
        memory = [(ctypes.c_ubyte * size).from_address(p) for p, size in zip(pointers, sizes, strict=True)]
        return [tuple(memory[page * pieces : (page + 1) * pieces]) for page in range(pages)]

    targets = sources

    def accept(self, host_indices: torch.Tensor, page: int, parts: Parts) -> None:
        """See the protocol."""


class CopiedPages:
    """A pool whose pages have to be gathered and scattered."""

    order = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = int(pool.page_size)
        self.payload_bytes = int(pool.get_dummy_flat_data_page().nbytes)

    def sources(self, host_indices: torch.Tensor) -> list[Parts]:
        """See the protocol."""
        firsts = host_indices[:: self.page_tokens].tolist()
        return [(self._pool.get_data_page(first, flat=True).contiguous(),) for first in firsts]

    def targets(self, host_indices: torch.Tensor) -> list[Parts]:
        """See the protocol."""
        return [(self._pool.get_dummy_flat_data_page(),) for _ in range(len(host_indices) // self.page_tokens)]

    def accept(self, host_indices: torch.Tensor, page: int, parts: Parts) -> None:
        """See the protocol."""
        self._pool.set_from_flat_data_page(int(host_indices[page * self.page_tokens]), parts[0])


class LogicalPages:
    """A pool of page numbers without memory. Whether a page is stored is all there is to know."""

    order = "logical"
    payload_bytes = 0

    def __init__(self, pool: Any) -> None:
        self.page_tokens = int(pool.page_size)

    def sources(self, host_indices: torch.Tensor) -> list[Parts]:
        """See the protocol."""
        return [() for _ in range(len(host_indices) // self.page_tokens)]

    targets = sources

    def accept(self, host_indices: torch.Tensor, page: int, parts: Parts) -> None:
        """See the protocol."""


def open_host_pages(pool: Any) -> HostPages:
    """The pages of a host pool, or of the anchor of a pool group.

    Raises:
        UncoveredError: the pool can neither place nor copy its pages; names class and layout.
    """
    anchor = getattr(pool, "anchor_entry", None)
    pool = pool if anchor is None else anchor.host_pool
    try:
        return LogicalPages(pool) if piece_sizes(pool) is None else PlacedPages(pool)
    except (ValueError, NotImplementedError, AttributeError):
        pass
    try:
        first = pool.get_data_page(0, flat=True)
        if first.nbytes == pool.get_dummy_flat_data_page().nbytes > 0:
            return CopiedPages(pool)
    except (ValueError, NotImplementedError, AttributeError):
        pass
    raise UncoveredError(
        f"kvcanary: {type(pool).__name__} with layout {getattr(pool, 'layout', None)!r} has no pages that can be "
        "stored; use --hicache-mem-layout page_first or page_first_direct"
    )


def piece_sizes(pool: Any) -> Sequence[int] | None:
    """Bytes of each piece of a page; None from a logical pool."""
    meta = pool.get_page_buffer_meta(torch.arange(int(pool.page_size)))
    sizes: Sequence[int] | None = None if meta is None else meta[1]
    return sizes
