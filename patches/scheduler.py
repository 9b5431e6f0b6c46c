"""The scheduler: who is in the batch, and the moment a result is processed."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Field, Patch, fields_of

from .fence import Fence
from .speculation import count_nodes, read_trees
from .stages import pick_token

if TYPE_CHECKING:
    from kvcanary_plugin.pool_patcher.patch import Wrapper
    from kvcanary_plugin.runtime.session import Session

MODULE = "sglang.srt.managers.scheduler"
BATCH = "sglang.srt.managers.schedule_batch"
BEAM_SEARCH = "sglang.srt.beam_search.coordinator"
MODE = "sglang.srt.model_executor.forward_batch_info"

READS = (
    *fields_of(BATCH, "ScheduleBatch", "reqs", "forward_mode", "seq_lens_cpu", "extend_lens"),
    *fields_of(BATCH, "Req", "rid", "origin_input_ids", "output_ids", "extra_key", "retraction_count"),
    *fields_of(MODE, "ForwardMode", "is_extend"),
)
ROW_OF_REQUEST = fields_of(BATCH, "Req", "req_pool_idx")
ROW_OF_KV = fields_of(BATCH, "Req", "kv") + fields_of(BATCH, "ReqKvInfo", "req_pool_idx")
FENCE_FLAG = fields_of(MODULE, "Scheduler", "_war_barrier_enabled")

Batch = tuple[list[Any], list[int], list[int], list[int]]
Trees = tuple[list[Any], list[int], list[int], list[int], int]


def lacks_fence_always(_: Any) -> bool:
    """Until 0.5.15 rows may change while they are read."""
    return True


def lacks_fence_by_flag(scheduler: Any) -> bool:
    """Since 0.5.16 the scheduler says whether it keeps rows as they are until they have been read."""
    return not scheduler._war_barrier_enabled


def read_batch(batch: Any, row_of: Callable[[Any], int]) -> Batch:
    """Requests, rows, prefix lengths and new tokens of a ``ScheduleBatch``, from its host-side fields only."""
    requests = batch.reqs
    if not requests:
        return [], [], [], []
    lengths = batch.seq_lens_cpu.tolist()
    written = list(batch.extend_lens) if batch.forward_mode.is_extend() else [1] * len(requests)
    return (
        requests,
        [row_of(request) for request in requests],
        [length - new for length, new in zip(lengths, written, strict=True)],
        written,
    )


def declare_patches(session: Session, fence: Fence) -> list[Patch]:
    """Start of the scheduler, launch of a batch, processing of its result, and requests that cannot be followed."""

    def init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        session.confirm(instance.tp_worker.model_runner)
        return result

    def announce_with(row_of: Callable[[Any], int], lacks_fence: Callable[[Any], bool]) -> Wrapper:
        def run_batch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def read(batch: Any) -> Batch | Trees:
                nodes = count_nodes(instance, batch) if session.has_drafts else 0
                return read_trees(batch, row_of, nodes) if nodes else read_batch(batch, row_of)

            batch = args[0] if args else kwargs["batch"]
            session.announce(read, batch)
            fence.is_needed = lacks_fence(instance)
            result = wrapped(*args, **kwargs)
            fence.wait()
            session.note_launched(pick_token(instance, batch, result))
            return result

        return run_batch

    def process_batch_result(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = args[0] if args else kwargs["batch"]
        session.settle(pick_token(instance, batch, args[1] if len(args) > 1 else kwargs["result"]))
        return wrapped(*args, **kwargs)

    def validate_and_init(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if session.guard is not None:
            return "Beam search is not covered by kvcanary yet, which guards this server; start it without --kvcanary."
        return wrapped(*args, **kwargs)

    def declare_run_batch(wrapper: Wrapper, since: str, until: str | None, *more: Field) -> Patch:
        return Patch(
            MODULE,
            "Scheduler",
            "run_batch",
            wrapper,
            parameters=("self", "batch"),
            since=since,
            until=until,
            why="learns which requests a forward serves and their true tokens",
            reads=READS + more,
        )

    row, row_of_kv = attrgetter("req_pool_idx"), attrgetter("kv.req_pool_idx")
    return [
        Patch(
            MODULE,
            "Scheduler",
            "__init__",
            init,
            parameters=("self", "server_args"),
            since="0.5.11",
            why="refuses to serve if a guard was asked for and is not attached",
            reads=fields_of(MODULE, "Scheduler", "tp_worker")
            + fields_of("sglang.srt.managers.tp_worker", "TpModelWorker", "model_runner"),
        ),
        declare_run_batch(announce_with(row, lacks_fence_always), "0.5.11", "0.5.16", *ROW_OF_REQUEST),
        declare_run_batch(announce_with(row, lacks_fence_by_flag), "0.5.16", "0.5.19", *ROW_OF_REQUEST, *FENCE_FLAG),
        declare_run_batch(announce_with(row_of_kv, lacks_fence_by_flag), "0.5.19", None, *ROW_OF_KV, *FENCE_FLAG),
        Patch(
            MODULE,
            "Scheduler",
            "process_batch_result",
            process_batch_result,
            parameters=("self", "batch", "result"),
            since="0.5.11",
            why="reads the verdict of a forward before its tokens go out",
        ),
        Patch(
            BEAM_SEARCH,
            "BeamCoordinator",
            "validate_and_init",
            validate_and_init,
            parameters=("self", "req"),
            since="0.5.19",
            why="turns beam search away: its rows are no requests",
        ),
    ]
