"""Slots that are out of circulation: whoever holds one may give it back, but nobody is given it again until a flush.

The unit is the page, because that is what allocators hand out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

MAX_SHARE = 0.125


class Withheld:
    """Pages of one allocator that are not to be handed out again.

    Attributes:
        refused: slots that were to be withheld but are not, because an eighth of the pool already is.
    """

    def __init__(self, page_size: int, slot_count: int, device: torch.device, *, is_possible: bool = True) -> None:
        """``is_possible``: the allocator is one whose free list is known; otherwise everything is refused."""
        self.refused = 0
        self._page_size = page_size
        self._page_count = slot_count // page_size
        self._limit = max(1, int(self._page_count * MAX_SHARE)) if is_possible else 0
        self._device = device
        self._pages: dict[int, None] = {}
        self._caught: set[int] = set()
        self._on_device = torch.empty(0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        """Slots withheld, also those that somebody still holds."""
        return len(self._pages) * self._page_size

    @property
    def caught(self) -> int:
        """Slots that are missing from circulation by now: withheld, and held by nobody."""
        return len(self._caught) * self._page_size

    @property
    def pending(self) -> int:
        """Slots that somebody still holds, and that will not come back when they are freed."""
        return len(self) - self.caught

    def add(self, slots: Iterable[int]) -> list[int]:
        """Withhold the pages of ``slots``; padding and ids outside the pool are ignored. Returns the new pages."""
        fresh: dict[int, None] = {}
        for page in sorted({slot // self._page_size for slot in slots}):
            if not 0 < page < self._page_count or page in self._pages:
                continue
            if len(self._pages) >= self._limit:
                self.refused += self._page_size
                continue
            fresh[page] = self._pages[page] = None
        if fresh:
            self._on_device = torch.tensor(list(self._pages), device=self._device)
        return list(fresh)

    def keep_back(self, ids: torch.Tensor, *, are_pages: bool = False) -> torch.Tensor:
        """What may go back into circulation of ``ids``, slots or pages that are being freed.

        Waits for the device, but only while anything is withheld.

        Args:
            ids: int (n,).
            are_pages: they are pages.
        """
        if not self._pages or not ids.numel():
            return ids
        pages = ids if are_pages else ids // self._page_size
        stays = torch.isin(pages, self._on_device)
        held = pages[stays].tolist()
        if not held:
            return ids
        self._caught.update(held)
        return ids[~stays]

    def clear(self) -> int:
        """Let everything circulate again. Returns the slots this concerns."""
        count = len(self)
        self._pages.clear()
        self._caught.clear()
        self._on_device = self._on_device[:0]
        self.refused = 0
        return count
