"""Host memory behind the device (``--enable-hierarchical-cache``): records go where rows go, and come back with them.

Every copy passes ``start_writing`` or ``start_loading`` of the cache controller, with what is to be copied in its
queues, and what SGLang itself waits for in the acknowledgements. Host slots are given out and taken back by the host
pool.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from kvcanary_plugin.pool_patcher.patch import Patch, Wrapper, fields_of
from kvcanary_plugin.runtime.transfers import Copy

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

CONTROLLER = "sglang.srt.managers.cache_controller"
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
RADIX, UNIFIED = "sglang.srt.mem_cache.hiradix_cache", "sglang.srt.mem_cache.unified_radix_cache"
ONE_FILE, HOST_POOLS = "sglang.srt.mem_cache.memory_pool_host", "sglang.srt.mem_cache.pool_host"
BASE = f"{HOST_POOLS}.base"
PARAMS = fields_of("sglang.srt.mem_cache.base_prefix_cache", "InitLoadBackParams", "req")
REQUESTS = "sglang.srt.managers.schedule_batch"
COVERED_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
PROVEN_DEVICES = ("cpu", "cuda")  # where servers have run with it: streams and graphs differ
COVERED_HOST_POOLS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
UNTIL_UNIFIED = "0.5.18"  # until then the controller of the unified tree copies by ways of its own
POOL = "_kvcanary_host_pool"  # on the events of a load: from which host pool it comes
READER = "_kvcanary_reader"  # on a queued load: for which request it is, and from which position on


def list_pool_gaps(model_runner: Any) -> list[str]:
    """Why the KV of this runner cannot be followed to host memory and back; empty if it can."""
    pool = model_runner.token_to_kv_pool
    kind, device = type(pool).__name__, torch.device(pool.device).type
    if device not in PROVEN_DEVICES:
        return [
            f"--enable-hierarchical-cache is not covered yet on a device {device} (it was tried on "
            f"{', '.join(PROVEN_DEVICES)} only)"
        ]
    if kind in COVERED_POOLS:
        return []
    return [
        f"--enable-hierarchical-cache is not covered yet for KV pool {kind} (its rows have parts that travel by "
        f"ways of their own); covered are {' and '.join(COVERED_POOLS)}"
    ]


def list_host_gaps(controller: Any, covered: tuple[str, ...]) -> list[str]:
    """Why what ``controller`` copies cannot be followed; empty if it can. ``covered`` are kinds of controllers."""
    kinds = (
        ("cache controller", type(controller).__name__, covered),
        ("KV pool", type(controller.mem_pool_device).__name__, COVERED_POOLS),
        ("host pool", type(host_pool_of(controller)).__name__, COVERED_HOST_POOLS),
    )
    gaps = [
        f"--enable-hierarchical-cache is not covered yet for {what} {kind}; covered are {', '.join(known)}"
        for what, kind, known in kinds
        if kind not in known
    ]
    if len(getattr(controller.mem_pool_host, "entries", ())) > 1:
        gaps.append("--enable-hierarchical-cache is not covered yet with more than one host pool")
    return gaps


def host_pool_of(controller: Any) -> Any:
    """The host pool of the KV; the unified tree has a group of pools of which it is the anchor."""
    anchor = getattr(controller.mem_pool_host, "anchor_entry", None)
    return controller.mem_pool_host if anchor is None else anchor.host_pool


def declare_patches(session: Session) -> list[Patch]:
    """The cache controller, what says how far loads are, the tree that asks for them, and the host pools."""
    return [
        *_declare_controllers(session),
        *_declare_layers(session),
        *_declare_trees(),
        *_declare_host_pools(session),
    ]


def _declare_controllers(session: Session) -> list[Patch]:
    def open_with(covered: tuple[str, ...]) -> Wrapper:
        def open_host(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = wrapped(*args, **kwargs)
            gaps = list_host_gaps(instance, covered)
            allocator = instance.mem_pool_device_allocator
            host_pool, counter = host_pool_of(instance), instance.layer_done_counter
            session.hierarchy.open(
                allocator, host_pool, lambda: bool(instance.enable_storage), gaps, counter.num_layers
            )
            for each in (counter, *counter.events):
                setattr(each, POOL, host_pool)
            return result

        return open_host

    def start_writing(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copies = [_read(operation) for operation in instance.write_queue]
        result = wrapped(*args, **kwargs)
        if copies:
            event = instance.ack_write_queue[-1].finish_event
            session.hierarchy.note_transfer(
                host_pool_of(instance), lambda transfers, step: transfers.note_backup(copies, event, step)
            )
        return result

    def start_loading(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copies = [_read(operation) for operation in instance.load_queue]
        if copies:
            session.hierarchy.note_transfer(host_pool_of(instance), lambda transfers, _: transfers.begin_load())
        result = wrapped(*args, **kwargs)
        if copies:
            event = instance.ack_load_queue[-1].finish_event
            session.hierarchy.note_transfer(
                host_pool_of(instance), lambda transfers, _: transfers.note_load(copies, event)
            )
        return result

    def back_up(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = args[2] if len(args) > 2 else kwargs["device_indices"]
        session.hierarchy.note_transfer(instance, lambda transfers, step: transfers.begin_backup(device, step))
        return wrapped(*args, **kwargs)

    owner, only = "HiCacheController", ("HiCacheController",)
    pools = fields_of(CONTROLLER, owner, "mem_pool_device", "mem_pool_device_allocator", "mem_pool_host")
    acknowledged = fields_of(CONTROLLER, "HiCacheAck", "finish_event")
    operations = fields_of(CONTROLLER, "CacheOperation", "host_indices", "device_indices") + acknowledged + pools
    both = (*only, "HybridCacheController")

    def declare_init(covered: tuple[str, ...], since: str, until: str | None) -> Patch:
        parameters = ("self", "token_to_kv_pool_allocator", "mem_pool_host")
        why = "learns of the host pool and makes room for its records"
        reads = pools + fields_of(CONTROLLER, owner, "enable_storage", "layer_done_counter")
        reads += fields_of(CONTROLLER, "LayerDoneCounter", "num_layers", "events")
        return Patch(CONTROLLER, owner, "__init__", open_with(covered), parameters, why, since, until, reads=reads)

    def declare_copies(owner: str, module: str, since: str, until: str | None) -> Patch:
        parameters = ("self", "device_pool", "host_indices", "device_indices")
        why = "learns whether rows are stored by the time they are copied"
        return Patch(module, owner, "backup_from_device_all_layer", back_up, parameters, why, since, until)

    mha, mla = COVERED_HOST_POOLS
    return [
        declare_copies(mha, ONE_FILE, "0.5.11", "0.5.16"),
        declare_copies(mla, ONE_FILE, "0.5.11", "0.5.16"),
        declare_copies(mha, f"{HOST_POOLS}.mha", "0.5.16", None),
        declare_copies(mla, f"{HOST_POOLS}.mla", "0.5.16", None),
        declare_init(only, "0.5.11", UNTIL_UNIFIED),
        declare_init(both, UNTIL_UNIFIED, None),
        Patch(
            CONTROLLER,
            owner,
            "start_writing",
            start_writing,
            parameters=("self",),
            since="0.5.11",
            why="records go to host memory with the rows",
            reads=operations + fields_of(CONTROLLER, owner, "write_queue", "ack_write_queue"),
        ),
        Patch(
            CONTROLLER,
            owner,
            "start_loading",
            start_loading,
            parameters=("self",),
            since="0.5.11",
            why="and come back with them, and the rows are compared",
            reads=operations + fields_of(CONTROLLER, owner, "load_queue", "ack_load_queue"),
        ),
    ]


def _declare_layers(session: Session) -> list[Patch]:
    def complete(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer, pool = args[0] if args else kwargs["layer_index"], getattr(instance, POOL, None)
        if pool is not None:
            session.hierarchy.note_layer(pool, lambda order: order.note_layer(layer))
        return wrapped(*args, **kwargs)  # behind the ticket: whoever waits for this has to find it

    def wait_until(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        layer, pool = args[0] if args else kwargs["threshold"], getattr(instance, POOL, None)
        if pool is not None:
            session.hierarchy.note_layer(pool, lambda order: order.note_use(layer))
        return result

    why = "learns when a layer has come back"
    return [
        Patch(CONTROLLER, "LayerLoadingEvent", "complete", complete, ("self", "layer_index"), why, "0.5.11"),
        Patch(CONTROLLER, "LayerDoneCounter", "wait_until", wait_until, ("self", "threshold"), "and is used", "0.5.11"),
    ]


def _declare_trees() -> list[Patch]:
    def load_back_with(read_prefix: Callable[[Any], int]) -> Wrapper:
        def init_load_back(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            request = (args[0] if args else kwargs["params"]).req
            queue = getattr(instance.cache_controller, "load_queue", [])
            queued, start = len(queue), None if request is None else read_prefix(request)
            result = wrapped(*args, **kwargs)
            for operation in queue[queued:]:
                setattr(operation, READER, (request, start))
            return result

        return init_load_back

    def declare(module: str, owner: str, name: str, since: str, until: str | None) -> Patch:
        read = attrgetter(name) if name == "prefix_len" else lambda request: len(request.prefix_indices)
        return Patch(
            module,
            owner,
            "init_load_back",
            load_back_with(read),
            parameters=("self", "params"),
            since=since,
            until=until,
            why="learns for which request rows come back",
            reads=PARAMS
            + fields_of(module, owner, "cache_controller")
            + fields_of(CONTROLLER, "HiCacheController", "load_queue")
            + fields_of(REQUESTS, "Req", name),
        )

    return [
        declare(RADIX, "HiRadixCache", "prefix_indices", "0.5.11", "0.5.21"),
        declare(UNIFIED, "UnifiedRadixCache", "prefix_indices", UNTIL_UNIFIED, "0.5.22"),
        declare(UNIFIED, "UnifiedRadixCache", "prefix_len", "0.5.22", None),
    ]


def _declare_host_pools(session: Session) -> list[Patch]:
    def alloc(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = wrapped(*args, **kwargs)
        session.hierarchy.note_transfer(instance, lambda transfers, _: transfers.note_alloc(slots))
        return slots

    def free(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = args[0] if args else kwargs["indices"]
        session.hierarchy.note_transfer(instance, lambda transfers, _: transfers.note_free(slots))
        return wrapped(*args, **kwargs)

    def clear(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        session.hierarchy.note_transfer(instance, lambda transfers, _: transfers.clear())
        return result

    def declare(module: str, since: str, until: str | None) -> list[Patch]:
        owner = "HostKVCache"
        size = fields_of(module, owner, "size")
        return [
            Patch(
                module,
                owner,
                "alloc",
                alloc,
                ("self", "need_size"),
                "learns which host slots are given out",
                since,
                until,
            ),
            Patch(module, owner, "free", free, ("self", "indices"), "and which are taken back", since, until),
            Patch(module, owner, "clear", clear, ("self",), "takes back all of them", since, until, reads=size),
        ]

    return [*declare(ONE_FILE, "0.5.11", "0.5.14"), *declare(BASE, "0.5.14", None)]


def _read(operation: Any) -> Copy:
    request, start = getattr(operation, READER, (None, 0))
    return Copy(operation.host_indices, operation.device_indices, request, start or 0)
