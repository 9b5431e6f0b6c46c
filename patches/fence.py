"""The order between the forward's stream and the scheduler's, where SGLang leaves it open.

``before`` reads rows of ``req_to_token`` on the forward's stream. Under overlap scheduling the scheduler goes on at
once and changes rows on its own stream. Until 0.5.12 nothing keeps the two apart, and until 0.5.15 nothing does while
the previous result is processed; since 0.5.16 SGLang has a fence right behind ``run_batch``, but on CUDA only. Where
it has none, the scheduler's stream waits for an event behind ``before``. That wait is over before the result for
which the scheduler waits anyway.
"""

from __future__ import annotations

from typing import Any

import torch


class Fence:
    """One event, recorded behind the reads of a forward and awaited by the scheduler's stream.

    Attributes:
        is_needed: whether SGLang leaves the order open in the batch that is being launched.
    """

    def __init__(self) -> None:
        self.is_needed = False
        self._event: Any = None
        self._is_set = False

    def set_behind_reads(self, device: torch.device) -> None:
        """Everything enqueued so far on the current stream of ``device`` is ahead of the fence. Nothing on a CPU."""
        if not self.is_needed or device.type == "cpu":
            return
        if self._event is None:
            self._event = torch.get_device_module(device).Event()
        self._event.record()
        self._is_set = True

    def wait(self) -> None:
        """Whatever is enqueued from now on on the current stream runs behind the fence, if one was set since."""
        if self._is_set:
            self._is_set = False
            self._event.wait()  # makes the current stream wait, not the host
