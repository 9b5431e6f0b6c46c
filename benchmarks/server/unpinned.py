"""SGLang's launcher where no memory can be pinned: its LoRA layers pin theirs without asking whether there is a device.

Run as a module in place of ``sglang.launch_server``. The code at the top also runs in the scheduler process, which is
spawned from here. Everything else of LoRA is SGLang's own: its backend ``torch_native`` runs on a CPU as it is.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import torch


def _without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        del pin_memory
        return make(*args, **kwargs)

    return call


if not torch.accelerator.is_available():
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
