"""The scheduler: who is in the batch, and the moment a result is processed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Patch

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

MODULE = "sglang.srt.managers.scheduler"


def read_batch(batch: Any) -> tuple[list[Any], list[int], list[int], list[int]]:
    """Requests, rows, prefix lengths and new tokens of a ``ScheduleBatch``, from its host-side fields only."""
    requests = batch.reqs
    if not requests:
        return [], [], [], []
    lengths = batch.seq_lens_cpu.tolist()
    written = list(batch.extend_lens) if batch.forward_mode.is_extend() else [1] * len(requests)
    return (
        requests,
        [request.req_pool_idx for request in requests],
        [length - new for length, new in zip(lengths, written, strict=True)],
        written,
    )


def declare_patches(session: Session) -> list[Patch]:
    """Start of the scheduler, launch of a batch, processing of its result."""

    def init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        session.confirm(instance.tp_worker.model_runner)
        return result

    def run_batch(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.announce(read_batch, args[0] if args else kwargs["batch"])
        result = wrapped(*args, **kwargs)
        session.note_launched(result)
        return result

    def process_batch_result(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session.settle(args[1] if len(args) > 1 else kwargs["result"])
        return wrapped(*args, **kwargs)

    return [
        Patch(
            MODULE,
            "Scheduler",
            "__init__",
            init,
            parameters=("self", "server_args"),
            since="0.5.11",
            why="refuses to serve if a guard was asked for and is not attached",
        ),
        Patch(
            MODULE,
            "Scheduler",
            "run_batch",
            run_batch,
            parameters=("self", "batch"),
            since="0.5.11",
            why="learns which requests a forward serves and their true tokens",
        ),
        Patch(
            MODULE,
            "Scheduler",
            "process_batch_result",
            process_batch_result,
            parameters=("self", "batch", "result"),
            since="0.5.11",
            why="reads the verdict of a forward before its tokens go out",
        ),
    ]
