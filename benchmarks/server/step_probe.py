"""A server launcher that times decode steps inside the engine, the same in every arm.

Run as a module in place of ``sglang.launch_server``. The code at the top also runs in the scheduler process. Every
``process_batch_result`` of a full decode batch appends the time since the previous one to the file named by
KVCANARY_BENCH_STEPS, eight bytes of nanoseconds each.
"""

from __future__ import annotations

import os
import runpy
import struct
import time
from typing import Any

from kvcanary_plugin.pool_patcher.patch import Patch, PatchSet
from kvcanary_plugin.versions import installed_sglang

FILE_VARIABLE = "KVCANARY_BENCH_STEPS"
BATCH_VARIABLE = "KVCANARY_BENCH_BATCH"

_last = 0


def _run_batch(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One interval from launch to launch: the whole loop of the scheduler, the forward and everything of ours."""
    global _last
    batch = args[0]
    now = time.perf_counter_ns()
    if batch.forward_mode.is_decode() and len(batch.reqs) == int(os.environ[BATCH_VARIABLE]):
        if _last:
            with open(os.environ[FILE_VARIABLE], "ab") as steps:
                steps.write(struct.pack("<q", now - _last))
        _last = now
    else:
        _last = 0
    return wrapped(*args, **kwargs)


if FILE_VARIABLE in os.environ:
    PatchSet(
        [
            Patch(
                "sglang.srt.managers.scheduler",
                "Scheduler",
                "run_batch",
                _run_batch,
                parameters=("self", "batch"),
                since="0.5.11",
                why="times decode steps",
            )
        ]
    ).install(installed_sglang())

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
