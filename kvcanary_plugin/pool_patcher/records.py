"""Shadow records beside a pool, never in it: enlarging SGLang's buffers would break its transfers and strides."""

from __future__ import annotations

import torch

from ..kernels import record as r


class ShadowRecords:
    """What is known about every slot of one pool.

    Attributes:
        hot: int64 (slot_count, 4), one 32-byte record a slot: chain, digest, locator, identity word.
        writers: int64 (slot_count,), who wrote the slot: step and request row. Cold: touched on write and on report.
        first_slot: slots below it are padding and never verified.
        page_size: slots a page; freeing one of them frees the page.
    """

    def __init__(self, slot_count: int, page_size: int, device: torch.device | str) -> None:
        if slot_count <= page_size or page_size < 1:
            raise ValueError(
                f"kvcanary: a pool of {slot_count} slots has no room beside its padding page of {page_size}"
            )
        self.hot = torch.zeros((slot_count, r.RECORD_WORDS), dtype=torch.int64, device=device)
        self.writers = torch.zeros(slot_count, dtype=torch.int64, device=device)
        self.first_slot = page_size
        self.page_size = page_size
        self._page = torch.arange(page_size, device=device)

    @property
    def slot_count(self) -> int:
        """Slots there are, padding included."""
        return self.hot.shape[0]

    @property
    def resident_bytes(self) -> int:
        """Device bytes kept for the records."""
        return (self.hot.numel() + self.writers.numel()) * 8

    def release(self, slots: torch.Tensor) -> None:
        """Mark freed slots as not live, in stream order.

        Args:
            slots: int64 (n,), ids as given to the allocator's ``free``; ids outside the pool are ignored.
        """
        if self.page_size > 1 and slots.numel() * self.page_size > self.slot_count:
            self._release_pages(slots)
            return
        if self.page_size > 1:
            slots = ((slots // self.page_size)[:, None] * self.page_size + self._page).view(-1)
        slots = torch.where((slots < 0) | (slots >= self.slot_count), 0, slots)
        identity = self.hot[:, r.IDENTITY]
        identity.index_copy_(0, slots, identity[slots] & ~r.LIVE_BIT)

    def _release_pages(self, slots: torch.Tensor) -> None:
        """The same by one look at every record, where listing all slots of all pages would take more memory."""
        slots = torch.where(self._are_inside(slots), slots, 0)
        page_count = -(-self.slot_count // self.page_size)
        kept = torch.full((page_count,), -1, dtype=torch.int64, device=slots.device)
        kept[slots // self.page_size] = ~r.LIVE_BIT
        self.hot[:, r.IDENTITY] &= kept.repeat_interleave(self.page_size)[: self.slot_count]

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the records of ``source`` to ``target``, int64 (n,) both, in stream order; ids outside are ignored."""
        inside = self._are_inside(target) & self._are_inside(source)
        self.restore(torch.where(inside, target, -1), self.copy(torch.where(inside, source, 0)))

    def copy(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records (n, RECORD_WORDS) and writers (n,) of ``slots``; of ids outside the pool those of the padding."""
        slots = torch.where(self._are_inside(slots), slots, 0)
        return self.hot.index_select(0, slots), self.writers.index_select(0, slots)

    def restore(self, slots: torch.Tensor, records: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Put records that :meth:`copy` returned into ``slots``, int64 (n,); ids outside the pool are ignored."""
        hot, writers = records
        slots = torch.where(self._are_inside(slots), slots, 0)
        self.hot.index_copy_(0, slots, hot.to(self.hot.device))
        self.writers.index_copy_(0, slots, writers.to(self.writers.device))
        self.hot[0] = 0  # padding, to which all that was ignored went
        self.writers[0] = 0

    def _are_inside(self, slots: torch.Tensor) -> torch.Tensor:
        return (slots >= 0) & (slots < self.slot_count)

    def release_all(self) -> None:
        """Mark every slot as not live, in stream order."""
        self.hot[:, r.IDENTITY].bitwise_and_(~r.LIVE_BIT)
