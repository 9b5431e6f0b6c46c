"""Faults of speculative decoding: what goes wrong between the verification of drafts and the committed path.

The first two are put in where the rows of the accepted path have been moved, and take the lengths of the paths.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..kernels import record as r
from ..kernels.poison_reference import poison_slots
from .library import Fault, Injected, bytes_of

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step

PathFault = Callable[[torch.Tensor, "Guard", "Step", random.Random, dict[str, str]], Injected | None]


def leave_rejected(
    accept_lens: torch.Tensor, guard: Guard, step: Step, rng: random.Random, _: dict[str, str]
) -> Injected | None:
    """Leave a rejected draft token, KV and record, where the last accepted one belongs: its row was never moved."""
    found = _pick_path(accept_lens, guard, step, rng)
    if found is None:
        return None
    index, place, target, source = found
    _copy_bytes(guard, target, source)
    guard.records.hot[target], guard.records.writers[target] = guard.records.hot[source], guard.records.writers[source]
    return _tell("chain", guard, step, index, place, target, source)


def move_wrong_draft(
    accept_lens: torch.Tensor, guard: Guard, step: Step, rng: random.Random, _: dict[str, str]
) -> Injected | None:
    """Move the KV of a wrong draft token to the place of the last accepted one, as if it were the right one."""
    found = _pick_path(accept_lens, guard, step, rng)
    if found is None:
        return None
    index, place, target, source = found
    _copy_bytes(guard, target, source)
    return _tell("content", guard, step, index, place, target, source)


def skip_draft_store(guard: Guard, step: Step, rng: random.Random, options: dict[str, str]) -> Injected | None:
    """Leave K or V of one layer as it was before the forward, for the root of one tree, which is always accepted."""
    space, batch = guard.spaces[0], step.batch
    if not step.nodes or batch is None or space.presence is None or space.presence.learned is None:
        return None
    expected = [space.slots.table.names[i] for i in space.presence.expects.nonzero().flatten().tolist()]
    some_layer, some_half = rng.choice(expected)
    layer = int(options["layer"]) if "layer" in options else some_layer
    half = options.get("half", some_half)
    part, presence = space.slots.table.names.index((layer, half)), space.presence
    index = rng.randrange(len(step.requests))

    def strike() -> None:
        chosen = torch.zeros_like(presence.chosen)
        chosen[part] = 1
        root = batch.slots[index * step.nodes : index * step.nodes + 1]
        poison_slots(table=space.slots.table, slots=root, chosen=chosen)

    fields = {"layer": layer, "half": half, "request": step.requests[index].rid}
    return Injected("presence", (), (), fields, strike=strike)


PATH_FAULTS: dict[str, PathFault] = {fault.__name__: fault for fault in (leave_rejected, move_wrong_draft)}
STORE_FAULTS: dict[str, Fault] = {"skip_draft_store": skip_draft_store}
FOUND_BY = {"leave_rejected": "chain", "move_wrong_draft": "content", "skip_draft_store": "presence"}


def for_paths(accept_lens: torch.Tensor) -> dict[str, Fault]:
    """The faults of a round whose paths have these lengths."""
    return {name: partial(fault, accept_lens) for name, fault in PATH_FAULTS.items()}


def _pick_path(
    accept_lens: torch.Tensor, guard: Guard, step: Step, rng: random.Random
) -> tuple[int, int, int, int] | None:
    """A request, the last place of its path, the slot there, and a slot that holds another draft token."""
    if step.batch is None:
        return None
    slots, lens = step.batch.slots.view(-1, step.nodes).tolist(), accept_lens.tolist()
    places = [(index, other) for index, length in enumerate(lens) for other in range(length, step.nodes)]
    rng.shuffle(places)
    hot = guard.records.hot
    for index, other in places:
        place = min(lens[index], step.nodes) - 1
        target, source = slots[index][place], slots[index][other]
        names = hot[[target, source]][:, [r.IDENTITY, r.DIGEST]]
        if bool((names[0] != names[1]).all()):
            return index, place, target, source
    return None


def _copy_bytes(guard: Guard, target: int, source: int) -> None:
    for view in guard.pool.table.sources:
        bytes_of(view.rows, target).copy_(bytes_of(view.rows, source))


def _tell(check: str, guard: Guard, step: Step, index: int, place: int, target: int, source: int) -> Injected:
    assert guard.traffic.drafts is not None
    position = int(guard.traffic.drafts.lengths[index]) + place
    fields = {"request": step.requests[index].rid, "copied_from": source}
    return Injected(check, (target,), (position,), fields)
