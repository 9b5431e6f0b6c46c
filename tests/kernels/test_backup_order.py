"""Copies to host memory and the forward that stores what they copy, on two streams of a device."""

import pytest
import torch

from kvcanary_plugin.kernels.record import IDENTITY, LIVE_BIT, RECORD_WORDS
from kvcanary_plugin.runtime.backup_order import BackupOrder


@pytest.mark.gpu
@pytest.mark.parametrize("named_on", ["cpu", "cuda"])
@pytest.mark.parametrize("waits", [True, False])
def test_on_two_streams_only_the_missing_wait_is_found(waits: bool, named_on: str):
    """The forward is slow: harmless with the wait, and found without it."""
    records = torch.zeros((64, RECORD_WORDS), dtype=torch.int64, device="cuda")
    records[:32, IDENTITY] = LIVE_BIT
    order = BackupOrder(records, lambda step, slot: (step, slot))
    slots = torch.arange(16, 48, device=named_on)
    order.begin(slots, 1)  # what is allocated and compiled the first time
    torch.cuda.synchronize()
    assert order.read() == [(1, 32)]
    forward, copying = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(100_000_000)
        records[:, IDENTITY] = LIVE_BIT
    if waits:
        copying.wait_stream(forward)
    with torch.cuda.stream(copying):
        order.begin(slots, 2)
    copying.synchronize()
    assert order.read() == ([] if waits else [(2, 32)])
    assert forward.query() is waits, "the forward was still under way"
    torch.cuda.synchronize()
