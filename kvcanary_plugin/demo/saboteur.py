"""A server with a bad memory cell: SGLang's launcher, and one bit of V that flips while the canary is off.

Run as a module in place of ``sglang.launch_server``. The code at the top also runs in the scheduler process, which is
spawned from here; that is the only reason why this is a launcher and not a plugin.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

from kvcanary_plugin.pool_patcher.patch import Patch, PatchSet
from kvcanary_plugin.versions import installed_sglang

VARIABLE = "KVCANARY_DEMO_BAD_CELL_AT_HIT"
BIT = 11  # of a bfloat16: the value changes by a factor of 65536
HIT_LENGTH = 32  # prefixes shorter than this are SGLang's own warm-up

_hits = 0


def _forward(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before the chosen cache hit is served, flip one exponent bit of one V element in the middle of its prefix."""
    global _hits
    batch = args[0]
    if batch.forward_mode.is_extend() and batch.extend_prefix_lens_cpu[0] >= HIT_LENGTH:
        _hits += 1
        if str(_hits) in os.environ[VARIABLE].split(","):
            row, middle = int(batch.req_pool_indices[0]), batch.extend_prefix_lens_cpu[0] // 2
            slot = int(instance.req_to_token_pool.req_to_token[row, middle])
            import torch

            instance.token_to_kv_pool.v_buffer[1].view(torch.int16)[slot, 0, 5] ^= 1 << BIT
    return wrapped(*args, **kwargs)


if VARIABLE in os.environ:
    PatchSet(
        [
            Patch(
                "sglang.srt.model_executor.model_runner",
                "ModelRunner",
                "forward",
                _forward,
                parameters=("self", "forward_batch"),
                since="0.5.11",
                why="plays a bad memory cell",
            )
        ]
    ).install(installed_sglang())

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
