"""A scheduler with nothing to do: time to fold the pool at full pace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Patch

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session


def declare_patches(session: Session) -> list[Patch]:
    """What the scheduler does when no batch is to run."""

    def on_idle(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # First, because SGLang may go to sleep in there until the next request.
        session.idle()
        return wrapped(*args, **kwargs)

    return [
        Patch(
            "sglang.srt.managers.scheduler",
            "Scheduler",
            "on_idle",
            on_idle,
            parameters=("self",),
            since="0.5.11",
            why="folds the pool at full pace while nothing runs",
        )
    ]
