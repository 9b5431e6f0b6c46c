"""The forward: verify before it, record and scrub behind it, outside any CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Patch, fields_of

from .fence import Fence
from .speculation import read_forward

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session


def declare_patches(session: Session, fence: Fence) -> list[Patch]:
    """``ModelRunner.forward``, which every batch of the target model passes."""

    def forward(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not session.guards(instance):
            return wrapped(*args, **kwargs)
        batch = args[0] if args else kwargs["forward_batch"]
        trees = read_forward(batch) if session.has_drafts else None
        session.before(batch.input_ids, batch.out_cache_loc, batch.req_pool_indices, trees)
        fence.set_behind_reads(batch.req_pool_indices.device)
        output = wrapped(*args, **kwargs)
        session.after()
        return output

    return [
        Patch(
            "sglang.srt.model_executor.model_runner",
            "ModelRunner",
            "forward",
            forward,
            parameters=("self", "forward_batch"),
            since="0.5.11",
            why="verifies the slots a forward reads and records the ones it stores",
            reads=fields_of(
                "sglang.srt.model_executor.forward_batch_info",
                "ForwardBatch",
                "input_ids",
                "out_cache_loc",
                "req_pool_indices",
            ),
        )
    ]
