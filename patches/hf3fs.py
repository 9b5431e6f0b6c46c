"""Storage behind the host pools: what SGLang's keys leave out, and a guard around whatever backend is chosen.

The scope is wrapped in mode ``off`` too where this package's own backend is used.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvcanary_plugin.display import mask_secrets
from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.pool_patcher.patch import Patch, fields_of
from kvcanary_plugin.tiers import scope
from kvcanary_plugin.tiers.hf3fs.options import to_extra_config

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

CONTROLLER = "sglang.srt.managers.cache_controller"
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater"
FACTORY = "sglang.srt.mem_cache.storage.backend_factory"


def declare_scope_patches() -> list[Patch]:
    """Extra key and weight version of each storage operation, from its creation to the I/O thread."""
    owners = ((CONTROLLER, "HiCacheController"), (HYBRID, "HybridCacheController"))
    return [
        Patch(
            CONTROLLER,
            "StorageOperation",
            "__init__",
            _create_operation,
            parameters=("self", "host_indices", "token_ids"),
            since="0.5.11",
            why="takes down the extra key (LoRA adapter, cache salt) that SGLang's storage keys leave out",
        ),
        *(
            Patch(
                module,
                owner,
                attribute,
                _run_operation,
                parameters=("self", "operation"),
                since="0.5.11",
                why="puts it into force on the I/O thread",
            )
            for module, owner in owners
            for attribute in ("_storage_hit_query", "_page_transfer", "_page_backup")
        ),
        Patch(
            WEIGHTS,
            "SchedulerWeightUpdaterManager",
            "flush_cache_after_weight_update",
            _update_weights,
            parameters=("self", "recv_req"),
            since="0.5.13",
            why="pages of older weights must not be found any more",
            reads=fields_of("sglang.srt.managers.io_struct", "UpdateWeightFromDiskReqInput", "weight_version"),
        ),
    ]


def declare_patches(session: Session) -> list[Patch]:
    """The place where every storage backend is made."""

    def create_backend(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from kvcanary_plugin.tiers.finding import listen
        from kvcanary_plugin.tiers.guarded_storage import guard_storage

        name, config = (*args, kwargs.get("backend_name"), kwargs.get("storage_config"))[:2]
        listen(session.reporter)
        backend = guard_storage(lambda: wrapped(*args, **kwargs), name, config)
        session.heartbeat.watch_storage(backend.status)
        return backend

    return [
        *declare_scope_patches(),
        Patch(
            FACTORY,
            "StorageBackendFactory",
            "create_backend",
            create_backend,
            parameters=("cls", "backend_name", "storage_config", "mem_pool_host"),
            kind="classmethod",
            since="0.5.11",
            why="verifies what comes back from any storage backend",
        ),
    ]


def choose_storage(hf3fs: str | None, arguments: Any) -> None:
    """What ``--kvcanary-hf3fs`` stands for, put into SGLang's own arguments before it settles them.

    Raises:
        ConfigError: there is no hierarchical cache, or another storage backend was chosen too.
    """
    if hf3fs is None:
        return
    ours = json.loads(to_extra_config(hf3fs))
    backend, text = arguments.hicache_storage_backend, arguments.hicache_storage_backend_extra_config or "{}"
    try:
        theirs = dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            "kvcanary: beside --kvcanary-hf3fs, --hicache-storage-backend-extra-config has to be a JSON object; "
            f"it is {mask_secrets(text)!r}"
        ) from error
    if backend is not None and theirs.get("backend_name") != ours["backend_name"]:
        raise ConfigError(
            f"kvcanary: --kvcanary-hf3fs and --hicache-storage-backend {backend} exclude each other; drop one of them"
        )
    if not arguments.enable_hierarchical_cache:
        raise ConfigError(
            "kvcanary: --kvcanary-hf3fs stores what the hierarchical cache holds; add --enable-hierarchical-cache"
        )
    arguments.hicache_storage_backend = "dynamic"
    arguments.hicache_storage_backend_extra_config = json.dumps(theirs | ours)


def _create_operation(wrapped: Any, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    scope.note_operation(operation, args[1] if len(args) > 1 else kwargs["token_ids"])
    return result


def _run_operation(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with scope.running(args[0] if args else kwargs["operation"]):
        return wrapped(*args, **kwargs)


def _update_weights(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = args[0] if args else kwargs["recv_req"]
    scope.note_weights_changed(getattr(request, "weight_version", None))
    return wrapped(*args, **kwargs)
