"""Faults in the order of the device's streams, put in where a batch is launched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .library import Fault, Injected

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step

_DELAY_CYCLES = 40_000_000  # some 20 ms: longer than a forward that is under way


def drop_wait(guard: Guard, step: Step, _: random.Random, __: dict[str, str]) -> Injected | None:
    """Keep the forward's stream from waiting for the scheduler's, which is late at that moment."""
    device = guard.pool.req_to_token.device
    module: Any = torch.get_device_module(device)
    scheduler = module.current_stream(device)
    if guard.stream is None or guard.stream == scheduler:
        return None  # one stream: there is nothing to wait for
    module._sleep(_DELAY_CYCLES)
    return Injected("order", (), (), {"request": step.requests[0].rid}, _without_wait(module.Stream, scheduler))


def _without_wait(owner: Any, late: Any) -> Callable[[], None]:
    """From now on no stream waits for ``late``. Returns what undoes it."""
    wait_stream = vars(owner)["wait_stream"]

    def wait_for_others(self: Any, stream: Any) -> Any:
        return None if stream == late else wait_stream(self, stream)

    owner.wait_stream = wait_for_others

    def restore() -> None:
        owner.wait_stream = wait_stream

    return restore


ORDER_FAULTS: dict[str, Fault] = {"drop_wait": drop_wait}
