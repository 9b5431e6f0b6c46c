"""Faults in host memory behind the device, put in ahead of a forward. They act on SGLang's own host pool."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..runtime.host_rows import find_rows
from .library import Fault, Injected

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step

# What SGLang copies rows with, by the layout of its host memory.
_BACKENDS = {"layer_first": "direct", "page_first_direct": "direct", "page_first": "kernel"}
_DELAY_CYCLES = 100_000_000  # some 50 ms: longer than a forward of a small model


def flip_host(guard: Guard, _: Step, rng: random.Random, options: dict[str, str]) -> Injected | None:
    """Flip one bit of K or V of one layer in host memory, of a row that can be loaded."""
    slots = _filled(guard)
    rows = _rows_of(guard, slots[rng.randrange(len(slots))]) if slots else None
    if rows is None:
        return None
    names = guard.pool.table.names
    fitting = [
        index
        for index, (layer, half) in enumerate(names)
        if options.get("layer", str(layer)) == str(layer) and options.get("half", half) == half
    ]
    slot, views = rows
    index = rng.choice(fitting)
    row = views[index]
    while row.dim() > 1:
        row = row[rng.randrange(len(row))]
    data = row.contiguous().view(torch.uint8)
    bit = int(options.get("bit", rng.randrange(len(data) * 8))) % (len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    row.copy_(data.view(row.dtype))
    layer, half = names[index]
    return Injected("content", (), (), {"host_slot": slot, "layer": layer, "half": half, "bit": bit})


def swap_host_pages(guard: Guard, _: Step, rng: random.Random, __: dict[str, str]) -> Injected | None:
    """Exchange the rows of two host pages, while the nodes of the prefix cache go on naming them as before."""
    size = guard.pool.page_size
    pages = sorted({slot // size for slot in _filled(guard)})
    if len(pages) < 2:
        return None
    one, other = rng.sample(pages, 2)
    for offset in range(size):
        here, there = _rows_of(guard, one * size + offset), _rows_of(guard, other * size + offset)
        if here is None or there is None:
            return None
        for mine, theirs in zip(here[1], there[1], strict=True):
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)
    return Injected("content", (), (), {"host_slot": one * size, "other_host_slot": other * size, "entries": size})


def free_host_in_use(guard: Guard, _: Step, rng: random.Random, __: dict[str, str]) -> Injected | None:
    """Give a page of host slots back while a copy or a storage thread uses it, and take it again after the forward."""
    transfers = guard.traffic.transfers
    used = np.zeros(0, np.int64) if transfers is None else transfers.slots_in_use()
    if transfers is None or not len(used):
        return None
    size, pool = guard.pool.page_size, transfers.host_pool
    first = int(rng.choice(used.tolist())) // size * size
    slots = torch.arange(first, first + size)
    since = transfers.host.since[first : first + size].copy()
    pool.free(slots)

    def restore() -> None:
        pool.free_slots = pool.free_slots[~torch.isin(pool.free_slots, slots)]
        if hasattr(pool, "slot_used"):
            pool.slot_used[slots] = True
        transfers.note_alloc(slots)
        transfers.host.since[first : first + size] = since

    return Injected("ownership", (), (), {"host_slot": first, "entries": size}, restore)


def skip_layer_wait(guard: Guard, _: Step, __: random.Random, ___: dict[str, str]) -> Injected | None:
    """Have the next load start late, and the forwards until the load after it use its layers without waiting."""
    transfers, module = guard.traffic.transfers, torch.get_device_module(guard.pool.req_to_token.device)
    pool: Any = None if transfers is None else transfers.host_pool
    counter = getattr(getattr(pool, "device_pool", None), "layer_transfer_counter", None)
    if counter is None or not hasattr(module, "_sleep"):
        return None  # nothing runs beside the forward here
    load, loads = pool.load_to_device_per_layer, []

    def load_late(*args: Any, **kwargs: Any) -> Any:
        layer = args[3] if len(args) > 3 else kwargs["layer_id"]
        if layer == 0:
            loads.append(layer)
            if len(loads) == 1:  # on the stream that copies
                module._sleep(_DELAY_CYCLES)
                counter.wait_until = lambda threshold: None
            else:
                del pool.load_to_device_per_layer, counter.wait_until
        return load(*args, **kwargs)

    pool.load_to_device_per_layer = load_late
    return Injected("order", (), (), {})


def early_backup(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Copy the page of a row that the forward is about to store to host memory already, and forget that copy."""
    transfers = guard.traffic.transfers
    pool: Any = None if transfers is None else transfers.host_pool
    backend = _BACKENDS.get(getattr(pool, "layout", ""))
    if backend is None or step.write_total != len(step.requests):
        return None
    index = rng.randrange(len(step.requests))
    size, entries = guard.pool.page_size, guard.pool.req_to_token[step.rows[index]]
    slot = int(entries[step.prefix_lens[index]])
    host = pool.alloc(size)
    if host is None:
        return None
    device = torch.arange(slot // size * size, (slot // size + 1) * size, device=entries.device)
    if backend == "direct":
        device = device.cpu()
    else:
        host = host.to(entries.device)
    pool.backup_from_device_all_layer(pool.device_pool, host, device, backend)
    fields = {"request": step.requests[index].rid}
    return Injected("order", (slot,), (), fields, lambda: pool.free(host.cpu()))


def _filled(guard: Guard) -> list[int]:
    """Host slots that hold rows of the device."""
    return [] if guard.traffic.transfers is None else np.flatnonzero(guard.traffic.transfers.host.since).tolist()


def _rows_of(guard: Guard, slot: int) -> tuple[int, list[torch.Tensor]] | None:
    assert guard.traffic.transfers is not None
    rows = find_rows(guard.traffic.transfers.host_pool, slot, guard.pool.table.names)
    return None if rows is None else (slot, rows)


HOST_FAULTS: dict[str, Fault] = {
    fault.__name__: fault for fault in (flip_host, swap_host_pages, free_host_in_use, early_backup)
}
LAUNCH_FAULTS: dict[str, Fault] = {"skip_layer_wait": skip_layer_wait}
FOUND_BY = {
    "flip_host": "content",
    "swap_host_pages": "content",
    "free_host_in_use": "ownership",
    "skip_layer_wait": "order",
    "early_backup": "order",
}
