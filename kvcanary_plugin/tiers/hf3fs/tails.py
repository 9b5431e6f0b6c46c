"""Memory for what follows the payload of a page in its slot, records and padding, as it is read."""

from __future__ import annotations


class Tails:
    """Memory that is used again: new memory costs a page fault every 4 KiB, more than all else that is done for a
    small page. It belongs to one taker until it is given back; what is never given back is only made anew.
    """

    def __init__(self) -> None:
        self._spare: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """At least ``size`` bytes, with anything in them."""
        try:
            memory = self._spare.pop()  # atomic: nobody else has it
        except IndexError:
            memory = bytearray()
        return memory if len(memory) >= size else bytearray(size)

    def give_back(self, memory: bytearray) -> None:
        """Nobody looks at it any more."""
        self._spare.append(memory)
