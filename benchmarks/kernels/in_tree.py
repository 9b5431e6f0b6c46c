"""The kv-canary kernels inside SGLang, over a batch whose requests are all equally long.

Importing this imports SGLang, which takes half a minute; the first launches compile its kernels with nvcc.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.jit_kernel.kv_canary import consts
from sglang.jit_kernel.kv_canary.plan.api import launch_canary_plan_kernels
from sglang.jit_kernel.kv_canary.verify import (
    CANARY_SLOT_BYTES,
    CanaryLaunchTag,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    launch_canary_verify_kernel,
)
from sglang.jit_kernel.kv_canary.write import WritePlan, launch_canary_write_kernel
from sglang.version import __version__ as VERSION  # noqa: N812

__all__ = ["VERSION", "InTreeCanary"]

_RING_ROWS = 1024


class InTreeCanary:
    """Its records of one pool, its plans and its launches.

    What a server may configure is set to what costs the in-tree kernels least: no room in the plans beyond the batch,
    no table of expected tokens, no comparison of the input.

    Args:
        req_to_token: int32 (row_count, context), contiguous.
        rows: int64 (bs,), none of them 0.
        tokens: int64 (bs, length).
        slot_count: slots of the pool, 0 of which is padding.
        layer: uint8 (slot_count, row_bytes), contiguous, to read all bytes of; None to read none.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        slot_count: int,
        layer: torch.Tensor | None = None,
    ) -> None:
        device = tokens.device
        self._bs, self._length = tokens.shape
        self._req_to_token, self._rows, self._tokens = req_to_token, rows, tokens
        self._slots = req_to_token[rows, : self._length].long()
        self._capacity = self._bs * self._length
        self._verify_plan = VerifyPlan.allocate(verify_capacity=self._capacity, device=device)
        self._write_plan = WritePlan.allocate(write_req_capacity=self._bs, device=device)
        sources: tuple[RealKvSource, ...] = ()
        if layer is not None:
            width = layer.shape[1]
            sources = (RealKvSource(tensor=layer, page_size=1, num_bytes_per_token=width, read_bytes=width),)
        self._context = VerifyOrWriteContext(
            canary_buf=torch.zeros((slot_count, CANARY_SLOT_BYTES), dtype=torch.uint8, device=device),
            kernel_kind=CanaryLaunchTag.TAIL_K_FULL,
            violation_ring=torch.zeros((_RING_ROWS, consts.VIOLATION_FIELDS), dtype=torch.int64, device=device),
            violation_write_index=torch.zeros(1, dtype=torch.int32, device=device),
            slot_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
            real_kv_sources=sources,
            real_kv_hash_mode=consts.RealKvHashMode.ALL if sources else consts.RealKvHashMode.NONE,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=device),
        )

    def make_plan(self, stored: int, new: int) -> Callable[[], None]:
        """The launch that plans to read ``stored`` positions of every request and to store ``new`` behind them."""
        prefix_lens, extend_seq_lens = torch.full_like(self._rows, stored), torch.full_like(self._rows, new)

        def plan() -> None:
            launch_canary_plan_kernels(
                verify_plan_out=self._verify_plan,
                write_plan_out=self._write_plan,
                req_pool_indices=self._rows,
                prefix_lens=prefix_lens,
                extend_seq_lens=extend_seq_lens,
                req_to_token=self._req_to_token,
                swa_window_size=0,
                full_to_swa_index_mapping=None,
                verify_capacity=self._capacity,
                req_to_verify_expected_tokens=None,
                req_to_verify_expected_tokens_valid_lens=None,
                kv_token_id_vs_position_offset=0,
            )

        return plan

    def verify(self) -> None:
        """Check what the last plan says."""
        launch_canary_verify_kernel(context=self._context, plan=self._verify_plan, check_verify_expected_token=False)

    def make_write(self, stored: int, new: int) -> Callable[[], None]:
        """The launch that stores what ``make_plan`` of the same numbers planned."""
        stop = stored + new
        input_ids = self._tokens[:, stored:stop].flatten().contiguous()
        positions = torch.arange(stored, stop, device=self._tokens.device).repeat(self._bs)
        out_cache_loc = self._slots[:, stored:stop].flatten().contiguous()

        def write() -> None:
            launch_canary_write_kernel(
                context=self._context,
                plan=self._write_plan,
                input_ids=input_ids,
                positions=positions,
                out_cache_loc=out_cache_loc,
                enable_write_input_assert=False,
                expected_input_tokens=None,
                expected_input_positions=None,
            )

        return write

    def store(self, stored: int, new: int) -> None:
        """Plan and write."""
        if new:
            self.make_plan(stored, new)()
            self.make_write(stored, new)()

    def confirm(self) -> None:
        """Verify every position of every request.

        Raises:
            RuntimeError: there are violations, or not every position was looked at.
        """
        before = int(self._context.slot_run_counter)
        self.make_plan(self._length, 0)()
        self.verify()
        seen = int(self._context.slot_run_counter) - before
        if seen != self._capacity:
            raise RuntimeError(f"in-tree verify looked at {seen} of {self._capacity} positions")
        self.require_silence()

    def require_silence(self) -> None:
        """Raise RuntimeError if any launch so far has reported a violation."""
        count = int(self._context.violation_write_index)
        if count:
            reasons = self._context.violation_ring[:count, consts.VIOLATION_FIELD_FAIL_REASON_BITS].unique().tolist()
            raise RuntimeError(f"in-tree kernels report {count} violations on sound data, reason bits {reasons}")
