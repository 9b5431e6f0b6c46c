"""Memory saver: an idle server gives the memory of its KV back, and takes it again, with nothing in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Field, Patch, fields_of

from .weights import OWNERS

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

KV = "kv_cache"
READS: tuple[Field, ...] = (
    *fields_of("sglang.srt.managers.io_struct", "ReleaseMemoryOccupationReqInput", "tags"),
    *fields_of("sglang.srt.managers.io_struct", "ResumeMemoryOccupationReqInput", "tags"),
)


def concerns_kv(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the request is about KV, as one without tags is."""
    tags = (args[0] if args else kwargs["recv_req"]).tags
    return not tags or KV in tags


def declare_patches(session: Session) -> list[Patch]:
    """Both ways, which SGLang takes only while nothing runs."""

    def release(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if concerns_kv(args, kwargs):
            session.note_memory_released()  # first: from then on the rows have no memory behind them
        return wrapped(*args, **kwargs)

    def resume(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        if concerns_kv(args, kwargs):
            session.note_memory_resumed()
        return result

    return [
        Patch(
            module,
            owner,
            method,
            wrapper,
            parameters=("self", "recv_req"),
            since=since,
            until=until,
            why=why,
            reads=READS,
        )
        for module, owner, since, until in OWNERS
        for method, wrapper, why in (
            ("release_memory_occupation", release, "looks away before the rows lose their memory"),
            ("resume_memory_occupation", resume, "starts over with the empty rows that come back"),
        )
    ]
