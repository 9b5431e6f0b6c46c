"""Control requests: SGLang hands them to the scheduler of every rank between two batches.

``/server_info`` shows the state of the guard, ``/set_internal_state`` takes changes; SGLang authorises both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Patch, fields_of
from kvcanary_plugin.runtime.control import PREFIX

if TYPE_CHECKING:
    from kvcanary_plugin.pool_patcher.patch import Wrapper
    from kvcanary_plugin.runtime.session import Session

SCHEDULER = "sglang.srt.managers.scheduler"
MESSAGES = "sglang.srt.managers.io_struct"


def declare_patches(session: Session) -> list[Patch]:
    """What the scheduler answers to, and does upon, control requests."""

    def get_internal_state(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = wrapped(*args, **kwargs)
        answer.internal_state["kvcanary"] = session.control.describe()
        return answer

    def set_internal_state_with(rest: dict[str, Any]) -> Wrapper:
        def set_internal_state(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            from sglang.srt.managers.io_struct import SetInternalStateReqOutput

            settings = (args[0] if args else kwargs["recv_req"]).server_args
            changes = [name for name in settings if name.startswith(PREFIX)]
            if not changes:
                return wrapped(*args, **kwargs)
            is_alone = len(settings) == 1  # several would have to be undone if one is refused
            return SetInternalStateReqOutput(updated=is_alone and session.control.apply(changes[0]), **rest)

        return set_internal_state

    def declare_set(rest: dict[str, Any], since: str, until: str | None) -> Patch:
        return Patch(
            SCHEDULER,
            "Scheduler",
            "set_internal_state",
            set_internal_state_with(rest),
            parameters=("self", "recv_req"),
            since=since,
            until=until,
            why="takes changes of mode, checks and budget, and starts audits",
            reads=fields_of(MESSAGES, "SetInternalStateReq", "server_args")
            + fields_of(MESSAGES, "SetInternalStateReqOutput", "updated", *rest),
        )

    return [
        Patch(
            SCHEDULER,
            "Scheduler",
            "get_internal_state",
            get_internal_state,
            parameters=("self", "recv_req"),
            since="0.5.11",
            why="shows the state of the guard",
            reads=fields_of(MESSAGES, "GetInternalStateReqOutput", "internal_state"),
        ),
        declare_set({"server_args": {}}, "0.5.11", "0.5.16"),
        declare_set({}, "0.5.16", None),
    ]
