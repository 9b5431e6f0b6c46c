"""What mode ``quarantine`` does to SGLang's requests: end one, and keep others from finding its prefix.

Wrapped in that mode only.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvcanary_plugin.errors import UncoveredError
from kvcanary_plugin.pool_patcher.patch import Patch, fields_of
from kvcanary_plugin.runtime.policy import Levers

from . import circulation
from .circulation import count_free, evict, take_free

if TYPE_CHECKING:
    from kvcanary_plugin.pool_patcher.patch import Wrapper
    from kvcanary_plugin.runtime.session import Session

SCHEDULER = "sglang.srt.managers.scheduler"
BATCH = "sglang.srt.managers.schedule_batch"
ERROR_TYPE = "DamagedKVError"
# A tree that takes no notice of the extra key would go on giving out a tainted prefix.
IGNORES_EXTRA_KEY = "RadixCacheCpp"

REQUEST = fields_of(
    BATCH,
    "Req",
    "to_finish",
    "finished_len",
    "send_output_token_logprobs_offset",
    "finished",
    "is_retracted",
    "skip_radix_cache_insert",
    "origin_input_ids",
    "output_ids",
    "extra_key",
) + fields_of(BATCH, None, "FINISH_ABORT")
ON_REQUEST = fields_of(BATCH, "Req", "req_pool_idx", "kv_committed_len")
ON_KV = fields_of(BATCH, "Req", "kv") + fields_of(BATCH, "ReqKvInfo", "req_pool_idx", "kv_committed_len")


def end(request: Any, message: str) -> None:
    """End ``request`` with an error at its next result, without the token of that result, and cache nothing of it."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    request.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, ERROR_TYPE)
    request.finished_len = len(request.output_ids)
    if not request.output_ids:
        # SGLang sends at least one log probability, and its token, even of an answer without tokens.
        request.send_output_token_logprobs_offset = 1
    keep_out(request)


def keep_out(request: Any) -> None:
    """Cache nothing of ``request`` from now on."""
    request.skip_radix_cache_insert = True


def is_over(request: Any) -> bool:
    """Whether it has its answer, or was retracted and starts again."""
    return bool(request.is_retracted or request.finished())


def make_levers(home: Callable[[Any], Any], middle_chunks: str) -> Levers:
    """How requests are handled in one release.

    Args:
        home: what has ``req_pool_idx`` and ``kv_committed_len`` of a request.
        middle_chunks: attribute that counts chunks under way other than the last one.
    """

    def held_by(request: Any) -> tuple[int, int] | None:
        kv = home(request)
        return None if kv.req_pool_idx is None else (kv.req_pool_idx, kv.kv_committed_len)

    def is_in_prefill(request: Any) -> bool:
        tokens, kv = len(request.origin_input_ids) + len(request.output_ids), home(request)
        # Who speculates has slots in reserve, and no KV of the last token yet.
        has_reserve = getattr(kv, "kv_allocated_len", 0) > kv.kv_committed_len
        return bool(getattr(request, middle_chunks) > 0 or (kv.kv_committed_len < tokens and not has_reserve))

    return Levers(held_by, is_over, is_in_prefill, end, keep_out, take_free, count_free, evict)


def declare_patches(session: Session) -> list[Patch]:
    """To be installed ahead of the patches of ``allocators``, which must see what is held back here."""

    def init_with(levers: Levers) -> Wrapper:
        def init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = wrapped(*args, **kwargs)
            if type(instance.tree_cache).__name__ == IGNORES_EXTRA_KEY:
                raise UncoveredError(
                    f"kvcanary: --kvcanary quarantine cannot keep a prefix from being found in {IGNORES_EXTRA_KEY}; "
                    "unset SGLANG_EXPERIMENTAL_CPP_RADIX_TREE or use --kvcanary log"
                )
            session.enforce(levers, instance.tp_cpu_group, instance.tree_cache)
            return result

        return init

    def run_batch(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if session.policy is not None:
            session.policy.note_launched((args[0] if args else kwargs["batch"]).reqs)
        return wrapped(*args, **kwargs)

    def init_next_round_input(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (args[0] if args else kwargs.get("tree_cache")) is not None:
            session.admit(instance)
        return wrapped(*args, **kwargs)

    def declare_init(levers: Levers, since: str, until: str | None, *homes: Any) -> Patch:
        return Patch(
            SCHEDULER,
            "Scheduler",
            "__init__",
            init_with(levers),
            parameters=("self", "server_args"),
            since=since,
            until=until,
            why="starts quarantine with the group of the ranks that must act alike",
            reads=fields_of(SCHEDULER, "Scheduler", "tp_cpu_group", "tree_cache") + REQUEST + homes,
        )

    plain, inner = attrgetter("kv"), "inflight_middle_chunks"
    return [
        declare_init(
            make_levers(_itself, "is_chunked"), "0.5.11", "0.5.13", *ON_REQUEST, *fields_of(BATCH, "Req", "is_chunked")
        ),
        declare_init(make_levers(_itself, inner), "0.5.13", "0.5.19", *ON_REQUEST, *fields_of(BATCH, "Req", inner)),
        declare_init(make_levers(plain, inner), "0.5.19", None, *ON_KV, *fields_of(BATCH, "Req", inner)),
        Patch(
            SCHEDULER,
            "Scheduler",
            "run_batch",
            run_batch,
            parameters=("self", "batch"),
            since="0.5.11",
            why="knows which requests hold KV",
            reads=fields_of(BATCH, "ScheduleBatch", "reqs"),
        ),
        Patch(
            BATCH,
            "Req",
            "init_next_round_input",
            init_next_round_input,
            parameters=("self", "tree_cache"),
            since="0.5.11",
            why="keeps new requests from finding a damaged prefix",
        ),
        *circulation.declare_patches(session),
    ]


def _itself(request: Any) -> Any:
    return request
