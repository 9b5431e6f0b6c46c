"""Weight updates: KV made before one is not KV made after it."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Patch

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

OWNERS = (
    ("sglang.srt.managers.scheduler_update_weights_mixin", "SchedulerUpdateWeightsMixin", "0.5.11", "0.5.13"),
    ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager", "0.5.13", None),
)
METHODS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def declare_patches(session: Session) -> list[Patch]:
    """Every way in which the weights of a running server are replaced."""
    numbers = count(1)

    def update_weights(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = args[0] if args else kwargs["recv_req"]
        result = wrapped(*args, **kwargs)
        if result.success:
            name = getattr(request, "weight_version", None) or "update"
            session.replace_weights(f"{name}#{next(numbers)}")
        return result

    return [
        Patch(
            module,
            owner,
            method,
            update_weights,
            parameters=("self", "recv_req"),
            since=since,
            until=until,
            why="gives KV made after an update another identity",
        )
        for module, owner, since, until in OWNERS
        for method in METHODS
    ]
