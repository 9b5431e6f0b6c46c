"""KV pools: attach the guard once the pools exist, before anything is captured or served."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Field, Patch, fields_of

from . import disaggregation
from .hierarchical import list_pool_gaps
from .modes import SETTLED, list_mode_gaps, settle

if TYPE_CHECKING:
    from kvcanary_plugin.pool_patcher.patch import Wrapper
    from kvcanary_plugin.runtime.session import Session

MODULE = "sglang.srt.model_executor.model_runner"
WHY = "makes the shadow records beside the KV pool"
STATE = "sglang.srt.distributed.parallel_state_wrapper"
CONTEXT = "sglang.srt.runtime_context"
READS = fields_of(
    MODULE,
    "ModelRunner",
    "is_draft_worker",
    "server_args",
    "model",
    "model_config",
    "token_to_kv_pool",
    "token_to_kv_pool_allocator",
    "req_to_token_pool",
) + fields_of("sglang.srt.configs.model_config", "ModelConfig", "model_path", "is_encoder_decoder")


def find_ranks_on_runner(model_runner: Any) -> Any:
    """What has ``tp_rank`` and ``tp_size``, and from 0.5.13 on ``dp_rank``."""
    return model_runner


def find_ranks_on_state(model_runner: Any) -> Any:
    """The same in its ``ParallelState``."""
    return model_runner.ps


def find_ranks_in_context(_: Any) -> Any:
    """The same in the context of the process."""
    return importlib.import_module(CONTEXT).get_parallel()


def declare_patches(session: Session) -> list[Patch]:
    """The moment the pools of a model runner have been allocated."""

    def attach_with(find_ranks: Callable[[Any], Any]) -> Wrapper:
        def attach(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = wrapped(*args, **kwargs)
            if not instance.is_draft_worker:
                settings = settle(instance.server_args)
                gaps = list_mode_gaps(settings, session.mode)
                if instance.model_config.is_encoder_decoder:
                    gaps.append("encoder-decoder models are not covered yet (rows begin with the encoder's slots)")
                if getattr(settings, "enable_hierarchical_cache", False):
                    gaps += list_pool_gaps(instance)
                role = getattr(settings, "disaggregation_mode", None) or "null"
                if role != "null":
                    gaps += disaggregation.list_pool_gaps(instance)
                ranks = find_ranks(instance)
                replica = getattr(ranks, "dp_rank", None) or 0
                # The turns of a session hand their slots on to each other without giving them back.
                has_owners = not getattr(settings, "enable_streaming_session", False)
                stage = replica * getattr(ranks, "pp_size", 1) + getattr(ranks, "pp_rank", 0)
                rank = stage * ranks.tp_size + ranks.tp_rank
                has_drafts = bool(settings.speculative_algorithm)
                session.attach(
                    instance,
                    gaps,
                    rank=rank,
                    has_owners=has_owners,
                    has_drafts=has_drafts,
                    role=role,
                    ranks=ranks.tp_size,
                )
                if settings.enable_metrics:
                    session.heartbeat.export(rank)
            return result

        return attach

    def declare(
        method: str,
        parameter: str,
        find_ranks: Callable[[Any], Any],
        since: str,
        until: str | None,
        *more: Field,
    ) -> Patch:
        return Patch(
            MODULE,
            "ModelRunner",
            method,
            attach_with(find_ranks),
            parameters=("self", parameter),
            since=since,
            until=until,
            why=WHY,
            reads=READS + more,
        )

    # Where it is in 0.5.19 and 0.5.20 differs between the two; both have it.
    metrics = fields_of("sglang.srt.server_args", "ServerArgs", "enable_metrics")
    grouped = fields_of("sglang.srt.arg_groups.fields.observability", "Observability", "enable_metrics")
    own = fields_of(MODULE, "ModelRunner", "tp_rank", "tp_size") + metrics
    replica = fields_of(MODULE, "ModelRunner", "dp_rank")
    state = fields_of(STATE, "ParallelState", "tp_rank", "tp_size", "dp_rank") + fields_of(MODULE, "ModelRunner", "ps")
    context = fields_of(CONTEXT, None, "get_parallel") + grouped
    alloc = ("alloc_memory_pool", "memory_pool_config")
    return [
        declare("init_memory_pool", "pre_model_load_memory", find_ranks_on_runner, "0.5.11", "0.5.13", *own),
        declare("init_memory_pool", "pre_model_load_memory", find_ranks_on_runner, "0.5.13", "0.5.14", *own, *replica),
        declare(*alloc, find_ranks_on_runner, "0.5.14", "0.5.16", *own, *replica),
        declare(*alloc, find_ranks_on_state, "0.5.16", "0.5.19", *state, *metrics),
        declare(*alloc, find_ranks_on_state, "0.5.19", "0.5.21", *state, *SETTLED),
        declare(*alloc, find_ranks_in_context, "0.5.21", None, *context, *SETTLED),
    ]
