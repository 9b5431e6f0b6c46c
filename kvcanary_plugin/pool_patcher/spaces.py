"""What a KV pool of SGLang is made of, in the engine's terms: numberings of slots, and the bytes each slot has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from .sources import SourceTable


@dataclass(frozen=True, slots=True)
class SlotSpace:
    """One numbering of slots, and the bytes that belong to each.

    Attributes:
        name: what reports call it: "full", "window", "c4".
        table: byte sources, empty where content is not checked.
        slot_count: slots, padding included.
        page_size: slots a page.
        mapping: int (>= main slot_count,), live: the slot here of each slot of the main space, <= 0 for none. None in
            the main space, and where the slot here is the main slot divided by ``ratio``.
        window: positions, counted from a request's end, that are kept here; None if all are.
        allocator: SGLang's object whose ``free`` takes slots of this space, only ever compared by identity; None where
            a slot lives and dies with its main slots.
        ratio: positions of a request that share one slot. It is stored by the forward that stores the last of them.
    """

    name: str
    table: SourceTable
    slot_count: int
    page_size: int
    mapping: torch.Tensor | None = None
    window: int | None = None
    allocator: Any = None
    ratio: int = 1


@dataclass(frozen=True, slots=True)
class StateSpace:
    """State that a request has one of and every forward rewrites, such as the convolution and SSM states of Mamba.

    A state may be many MiB, and a fold key is kept for every word of a table's row: hence ``split``.

    Attributes:
        name: what reports call it.
        table: byte sources of slot_count * split rows: those of state slot s are s * split to (s + 1) * split - 1.
        slot_count: state slots, padding included.
        row_slots: int (request rows,), live: the state slot of each request row.
        split: rows of the table a state slot has.
    """

    name: str
    table: SourceTable
    slot_count: int
    row_slots: torch.Tensor
    split: int = 1


@dataclass(frozen=True, slots=True)
class GuardedPool:
    """One KV pool as the guard sees it.

    Attributes:
        name: what reports call it.
        kv_cache: SGLang's pool, only ever compared by identity.
        allocator: that of the main space.
        req_to_token: int32 (row_count, context), the live table of slots of the main space.
        main: the space whose slots ``req_to_token`` and ``out_cache_loc`` name.
        fingerprint: what partitions whole prefixes: everything two pools must share for their KV to mean the same.
        companions: spaces that hold a part of what belongs to a slot of the main space.
        states: per-request state beside the slots.
    """

    name: str
    kv_cache: Any
    allocator: Any
    req_to_token: torch.Tensor
    main: SlotSpace
    fingerprint: tuple[tuple[str, str], ...]
    companions: tuple[SlotSpace, ...] = ()
    states: tuple[StateSpace, ...] = ()

    @property
    def shares_slots(self) -> bool:
        """Whether several tables name slots of one allocator, so that nobody can say who owns one."""
        return self.main.window is not None

    @property
    def table(self) -> SourceTable:
        """Byte sources of the main space."""
        return self.main.table

    @property
    def slot_count(self) -> int:
        """Slots of the main space, padding included."""
        return self.main.slot_count

    @property
    def page_size(self) -> int:
        """Slots a page of the main space."""
        return self.main.page_size


# What the guard follows beyond the main space; a pool that needs more is refused. Names as in list_needs.
FOLLOWED: Final = frozenset({"mapping", "ratio", "window", "state"})


def list_needs(pool: GuardedPool) -> dict[str, str]:
    """What a guard of ``pool`` must follow beyond the main space, and why: name and words."""
    needs = {}
    if pool.main.window is not None:
        needs["window"] = "slots are freed while their request runs, once they have left the window"
    for space in pool.companions:
        if space.mapping is not None:
            needs["mapping"] = f"space {space.name!r} has its own numbering of slots, reached through a table"
        if space.ratio > 1:
            needs["ratio"] = f"a slot of space {space.name!r} stands for {space.ratio} positions"
    for state in pool.states:
        needs["state"] = f"requests have a {state.name} that every forward rewrites"
    return needs
