"""Prefill and decode in two servers: records go along with the KV, and are taken over when a transfer is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packaging.version import Version

from kvcanary_plugin.pool_patcher.patch import Patch, Wrapper, fields_of
from kvcanary_plugin.runtime.handover import Tagged
from kvcanary_plugin.versions import installed_sglang

from . import arrivals, flights

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

POOLS = "sglang.srt.mem_cache.memory_pool"
MANAGER = "sglang.srt.disaggregation.common.conn"
DECODE = "sglang.srt.disaggregation.decode"
BATCH = "sglang.srt.managers.schedule_batch"
SINCE, UNTIL = "0.5.15", "0.5.16"  # the releases whose queues and backends were read through
BACKENDS = ("mooncake",)
HALVES = {"MHATokenToKVPool": 2, "MLATokenToKVPool": 1}  # of the buffers it registers: SGLang splits the list


def is_followed(mode: str) -> bool:
    """Whether such a server can be followed in the SGLang that is installed."""
    return mode in ("prefill", "decode") and Version(SINCE) <= Version(installed_sglang()) < Version(UNTIL)


def list_transfer_gaps(settings: Any, mode: str) -> list[str]:
    """Why a server of two cannot be followed although its role can, one line each."""
    role = getattr(settings, "disaggregation_mode", None) or "null"
    if role == "null":
        return []
    backend = getattr(settings, "disaggregation_transfer_backend", None)
    refused = [
        (mode == "quarantine", "--kvcanary quarantine"),
        (backend not in BACKENDS, f"--disaggregation-transfer-backend {backend}; covered is {', '.join(BACKENDS)}"),
        (getattr(settings, "speculative_algorithm", None), "--speculative-algorithm"),
        (getattr(settings, "enable_hierarchical_cache", False), "--enable-hierarchical-cache"),
        ((getattr(settings, "pp_size", 1) or 1) > 1, "--pp-size above 1"),
        (getattr(settings, "disaggregation_decode_enable_radix_cache", False), "its radix cache on the decode side"),
    ]
    return [f"--disaggregation-mode {role} is not covered yet with {what}" for applies, what in refused if applies]


def list_pool_gaps(model_runner: Any) -> list[str]:
    """Why the KV of this runner cannot be followed to or from another server; empty if it can."""
    kind = type(model_runner.token_to_kv_pool).__name__
    if kind in HALVES:
        return []
    return [f"--disaggregation-mode is not covered yet for KV pool {kind}; covered is {', '.join(HALVES)}"]


def declare_patches(session: Session) -> list[Patch]:
    """Buffers that are registered, what both sides compare when they connect, and the end of a transfer."""

    def splice_with(halves: int) -> Wrapper:
        def buffers(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return session.splice(instance, wrapped(*args, **kwargs), halves)

        return buffers

    def connect(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if session.handover is None:
            return wrapped(*args, **kwargs)
        kept = instance.server_args
        instance.server_args = Tagged(kept, session.handover.tag)
        try:
            return wrapped(*args, **kwargs)
        finally:
            instance.server_args = kept

    def commit(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = (args[0] if args else kwargs["decode_req"]).req
        result = wrapped(*args, **kwargs)
        if request.finished_reason is None:
            was_sent = request.bootstrap_host != arrivals.FAKE_HOST
            session.take_over(request, request.req_pool_idx, request.kv_committed_len, was_sent=was_sent)
        return result

    def free_row(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row = (args[0] if args else kwargs["req"]).req_pool_idx
        session.note_ownership(instance.req_to_token, lambda ledger: ledger.note_row_free(row))
        return wrapped(*args, **kwargs)

    why = "records go to the other server with the rows"
    return [
        *(
            Patch(POOLS, pool, "get_contiguous_buf_infos", splice_with(halves), ("self",), why, SINCE, UNTIL)
            for pool, halves in HALVES.items()
        ),
        *(
            Patch(
                MANAGER,
                "CommonKVManager",
                name,
                connect,
                parameters=parameters,
                why="both sides must send the same",
                since=SINCE,
                until=UNTIL,
                reads=fields_of(MANAGER, "CommonKVManager", "server_args"),
            )
            for name, parameters in (
                ("register_to_bootstrap", ("self",)),
                ("try_ensure_parallel_info", ("self", "bootstrap_addr")),
            )
        ),
        Patch(
            DECODE,
            "DecodeReqToTokenPool",
            "free",
            free_row,
            parameters=("self", "req"),
            why="learns that a request has left its row",
            since=SINCE,
            until=UNTIL,
            reads=fields_of(DECODE, "DecodeReqToTokenPool", "req_to_token"),
        ),
        Patch(
            DECODE,
            "DecodeTransferQueue",
            "_commit_transfer_to_req",
            commit,
            parameters=("self", "decode_req"),
            why="takes over the records of a request whose KV has come",
            since=SINCE,
            until=UNTIL,
            reads=fields_of(DECODE, "DecodeRequest", "req")
            + fields_of(BATCH, "Req", "finished_reason", "bootstrap_host", "req_pool_idx", "kv_committed_len"),
        ),
        *flights.declare_patches(session, SINCE, UNTIL),
        *arrivals.declare_patches(session, SINCE, UNTIL),
    ]
