"""KV pools: attach the guard once the pools exist, before anything is captured or served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Patch

from .server_args import list_mode_gaps

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session


def declare_patches(session: Session) -> list[Patch]:
    """The moment the pools of a model runner have been allocated."""

    def alloc_memory_pool(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        if not instance.is_draft_worker:
            gaps = list_mode_gaps(instance.server_args)
            if instance.model_config.is_encoder_decoder:
                gaps.append("encoder-decoder models are not covered yet (rows begin with the encoder's slots)")
            session.attach(instance, gaps, rank=(instance.dp_rank or 0) * instance.tp_size + instance.tp_rank)
        return result

    return [
        Patch(
            "sglang.srt.model_executor.model_runner",
            "ModelRunner",
            "alloc_memory_pool",
            alloc_memory_pool,
            parameters=("self", "memory_pool_config"),
            since="0.5.14",
            why="makes the shadow records beside the KV pool",
        )
    ]
