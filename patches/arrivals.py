"""Prefill and decode in two servers: a request goes on when what has come for it was compared, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Patch, fields_of

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

MANAGER = "sglang.srt.disaggregation.common.conn"
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
DECODE = "sglang.srt.disaggregation.decode"
BATCH = "sglang.srt.managers.schedule_batch"
FAKE_HOST = "2.2.2.2"  # of requests that warm a decode server up
TRANSFERRING, SUCCESS = 3, 4  # of SGLang's KVPoll: of ranks, the least of what they say counts


def declare_patches(session: Session, since: str, until: str) -> list[Patch]:
    """Which request a transfer is for, when it may go on, and when nobody waits for it any more."""

    def expect(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for each in args[0] if args else kwargs["decode_reqs"]:
            if each.req.bootstrap_host != FAKE_HOST:
                session.expect(each.req.bootstrap_room, each.req)
        return wrapped(*args, **kwargs)

    def poll(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        status = wrapped(*args, **kwargs)
        if status == SUCCESS and not session.has_settled(instance.bootstrap_room):
            return TRANSFERRING
        return status

    def clear(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.forget(instance.bootstrap_room)
        return wrapped(*args, **kwargs)

    of_receiver = fields_of(MANAGER, "CommonKVReceiver", "bootstrap_room")
    of_request = fields_of(DECODE, "DecodeRequest", "req") + fields_of(
        BATCH, "Req", "bootstrap_host", "bootstrap_room", "req_pool_idx", "kv_committed_len"
    )
    queued, when = ("self", "decode_reqs"), "no token goes out until what has come was compared"
    over = "a request goes on, or was given up"
    return [
        Patch(
            DECODE, "DecodeTransferQueue", "extend", expect, queued, "for whom KV comes", since, until, reads=of_request
        ),
        Patch(MOONCAKE, "MooncakeKVReceiver", "poll", poll, ("self",), when, since, until, reads=of_receiver),
        Patch(MANAGER, "CommonKVReceiver", "clear", clear, ("self",), over, since, until, reads=of_receiver),
    ]
