"""SGLang's launcher, with several ranks that work on a CPU. Run in place of ``sglang.launch_server``.

SGLang opens NCCL in every group of ranks, which wants a GPU; gloo does the same on a CPU. The code at the top also runs
in the scheduler processes, which are spawned from here.
"""

from __future__ import annotations

import functools
import inspect
import runpy
from typing import Any

from sglang.srt.distributed.parallel_state import GroupCoordinator


def without_nccl(init: Any) -> Any:
    """``GroupCoordinator.__init__``, which then has gloo alone."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["use_pynccl"] = False
        init(*bound.args, **bound.kwargs)

    return call


GroupCoordinator.__init__ = without_nccl(GroupCoordinator.__init__)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
