"""The states of the slots around a damaged one, as a strip with a caret: it tells overwrite from stale from shift."""

from __future__ import annotations

MEANINGS = {".": "free", "o": "owned", "c": "cached", "q": "quarantined", "i": "in a transfer"}
MAX_LENGTH = 80


def draw_strip(neighbours: str, slot: int) -> tuple[str, ...]:
    """Lines of equal indent: the strip, a caret below the slot with the slots shown, and what the letters mean.

    Args:
        neighbours: one letter a slot, the damaged one in brackets, as ``..oo[o]cc.``.
        slot: the one in brackets.
    """
    strip = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in neighbours[:MAX_LENGTH])
    before = strip.find("[")
    legend = "  ".join(f"{letter} {meaning}" for letter, meaning in MEANINGS.items() if letter in strip)
    if before < 0:
        return (strip, legend)
    shown = f"{slot - before}..{slot - before + len(strip) - 3}"
    return (strip, f"{' ' * before} ^ slot {slot}, of {shown}", legend)
