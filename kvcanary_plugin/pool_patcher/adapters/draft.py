"""What an adapter says of a pool before anything is made of it: spaces of slots, and whose bytes lie where."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..sources import PARTIAL_READ_ALIGN_BYTES, SourceTable, make_source
from ..spaces import SlotSpace, StateSpace


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that every slot has.

    Attributes:
        layer: the model's layer.
        half: what of it: "K", "V", "KV", "K scale", "index", ...
        rows: uint8 (page_count, page_size, width), a view of the live buffer whose last dimension is contiguous; or
            with groups, see :class:`Source`.
    """

    layer: int
    half: str
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotDraft:
    """A :class:`SlotSpace` whose sources are not made yet; the same attributes, with ``parts`` for its table."""

    name: str
    parts: Sequence[Part]
    slot_count: int
    page_size: int
    mapping: torch.Tensor | None = None
    window: int | None = None
    allocator: Any = None
    ratio: int = 1

    def finish(self, content: str, device: torch.device) -> SlotSpace:
        """Make its sources."""
        table = make_table(self.parts, self.slot_count, content, device)
        return SlotSpace(
            self.name, table, self.slot_count, self.page_size, self.mapping, self.window, self.allocator, self.ratio
        )


@dataclass(frozen=True, slots=True)
class StateDraft:
    """A :class:`StateSpace` whose sources are not made yet."""

    name: str
    parts: Sequence[Part]
    slot_count: int
    row_slots: torch.Tensor
    split: int = 1

    def finish(self, content: str, device: torch.device) -> StateSpace:
        """Make its sources."""
        table = make_table(self.parts, self.slot_count * self.split, content, device)
        return StateSpace(self.name, table, self.slot_count, self.row_slots, self.split)


@dataclass(frozen=True, slots=True)
class PoolDraft:
    """A pool as an adapter describes it.

    Attributes:
        name: what reports call it.
        main, companions, states: see :class:`GuardedPool`.
        unchecked: names of buffers that are left out knowingly, as paths of attributes, with why.
    """

    name: str
    main: SlotDraft
    companions: tuple[SlotDraft, ...] = ()
    states: tuple[StateDraft, ...] = ()
    unchecked: dict[str, str] = field(default_factory=dict)

    def parts(self) -> Iterator[Part]:
        """The parts of all spaces."""
        for space in self.spaces():
            yield from space.parts

    def spaces(self) -> Iterator[SlotDraft | StateDraft]:
        """All spaces, the main one first."""
        yield self.main
        yield from self.companions
        yield from self.states

    def layout(self) -> str:
        """Spaces, layers and widths in words: equal for two pools whose slots hold the same bytes."""
        words = []
        for space in self.spaces():
            counts = Counter((part.half, int(part.rows.shape[-1])) for part in space.parts)
            layers = sorted({part.layer for part in space.parts})
            held = " ".join(f"{count} {half} of {width}" for (half, width), count in counts.items())
            words.append(f"{space.name} {layers}: {held}")
        return "; ".join(words)


def make_table(parts: Iterable[Part], slot_count: int, content: str, device: torch.device) -> SourceTable:
    """The sources of ``parts``; ``content`` is ``none``, ``partial`` (the first 16 bytes of each) or ``all``."""
    named = []
    for part in parts:
        width = int(part.rows.shape[-1])
        read_bytes = {"none": 0, "partial": min(PARTIAL_READ_ALIGN_BYTES, width), "all": sys.maxsize}[content]
        if read_bytes:
            named.append(((part.layer, part.half), make_source(part.rows, read_bytes)))
    return SourceTable(named, slot_count, device)
