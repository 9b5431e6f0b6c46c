"""Server settings under which KV cannot be followed yet, and what they are called in each release."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcanary_plugin.pool_patcher.patch import Field, fields_of
from kvcanary_plugin.runtime.step import MAX_IN_FLIGHT

from . import disaggregation, stages
from .speculation import FOLLOWED, SINCE, UNTIL, is_followed, list_draft_gaps

MODULE = "sglang.srt.server_args"
# Until then a setting is a field of ServerArgs, from then on of one of its groups.
GROUPS_SINCE = "0.5.20"
OVERRIDES = "sglang.srt.arg_groups.model_override_base"
SETTLED = fields_of(OVERRIDES, None, "resolving_view")


@dataclass(frozen=True, slots=True)
class ModeGap:
    """A server setting under which KV appears or lives where no forward of ours passes: refused until covered.

    Attributes:
        field: its name in SGLang's arguments.
        group: where it is from 0.5.20 on: a module of ``sglang.srt.arg_groups.fields`` and its class.
        setting: what the operator wrote.
        why: one clause.
        since: first release that has it.
        harmless: a value other than None, False, 0 and "" that means not set.
        is_covered: whether a value that is set is covered after all; None if none is.
        covered: which are, and how far, for ``kvcanary doctor``.
    """

    field: str
    group: str
    setting: str
    why: str
    since: str = "0.5.11"
    harmless: Any = None
    is_covered: Callable[[Any], bool] | None = None
    covered: str = ""

    def applies_to(self, value: Any) -> bool:
        """Whether a server with this value is refused."""
        if value in (None, False, 0, "", self.harmless):
            return False
        return self.is_covered is None or not self.is_covered(value)

    def home(self, has_groups: bool) -> Field:
        """The field, before and after the arguments were sorted into groups."""
        if not has_groups:
            return Field(MODULE, "ServerArgs", self.field)
        module, owner = self.group.split(":")
        return Field(f"sglang.srt.arg_groups.fields.{module}", owner, self.field)


MODE_GAPS = (
    ModeGap(
        "hicache_host_memory_mode",
        "memory:Memory",
        "--hicache-host-memory-mode",
        "KV comes back from storage without a host page of its own",
        "0.5.19",
        "cache",
    ),
    ModeGap(
        "disaggregation_mode",
        "disagg:Disagg",
        "--disaggregation-mode",
        "KV arrives from another server without a forward",
        harmless="null",
        is_covered=disaggregation.is_followed,
        covered=f"prefill and decode servers from SGLang {disaggregation.SINCE} until {disaggregation.UNTIL}, backend "
        f"{', '.join(disaggregation.BACKENDS)}, modes log and raise",
    ),
    ModeGap(
        "speculative_algorithm",
        "spec:Spec",
        "--speculative-algorithm",
        "draft tokens are stored out of order and rejected",
        is_covered=is_followed,
        covered=f"{', '.join(FOLLOWED)} from SGLang {SINCE} until {UNTIL}, the target model's pool",
    ),
    ModeGap("speculative_adaptive", "spec:Spec", "--speculative-adaptive", "the number of draft tokens changes"),
    ModeGap(
        "enable_multi_layer_eagle",
        "spec:Spec",
        "--enable-multi-layer-eagle",
        "its worker chooses the accepted path in ways of its own",
    ),
    ModeGap("enable_pdmux", "disagg:Disagg", "--enable-pdmux", "a batch runs in several interleaved forwards"),
    ModeGap("dllm_algorithm", "exec_:ExecDllm", "--dllm-algorithm", "blocks are stored several times"),
    ModeGap(
        "pp_size",
        "parallel:Parallel",
        "--pp-size above 1",
        "results of a stage arrive several steps late",
        harmless=1,
        is_covered=stages.is_followed,
        covered=f"up to {MAX_IN_FLIGHT} stages from SGLang {stages.SINCE} until {stages.UNTIL}, modes log and raise",
    ),
    ModeGap(
        "enable_dp_attention", "parallel:Parallel", "--enable-dp-attention", "ranks run padded batches of their own"
    ),
    ModeGap("attn_cp_size", "parallel:Parallel", "--attn-cp-size above 1", "a prefix is spread over ranks", harmless=1),
    ModeGap("dcp_size", "parallel:Parallel", "--dcp-size above 1", "a prefix is spread over ranks", "0.5.15", 1),
    ModeGap(
        "enable_kv_cache_sharding",
        "parallel:Parallel",
        "--enable-kv-cache-sharding",
        "pages are spread over ranks",
        "0.5.22",
    ),
    ModeGap(
        "enable_unified_memory",
        "memory:Memory",
        "--enable-unified-memory",
        "pages of slots are given to others and moved while a forward runs",
        "0.5.15",
    ),
    ModeGap("enable_hisparse", "memory:Memory", "--enable-hisparse", "KV moves to host memory"),
    ModeGap(
        "enable_lmcache", "memory:Memory", "--enable-lmcache", "KV comes back from another store without a forward"
    ),
    ModeGap(
        "enable_flexkv",
        "memory:Memory",
        "--enable-flexkv",
        "KV comes back from another store without a forward",
        "0.5.16",
    ),
    ModeGap(
        "radix_cache_backend",
        "memory:Memory",
        "--radix-cache-backend",
        "the cache is another plugin's, and may bring KV back without a forward",
        "0.5.13",
    ),
    ModeGap(
        "enable_unified_cache_external_linker",
        "memory:Memory",
        "--enable-unified-cache-external-linker",
        "KV comes back from another store without a forward",
        "0.5.20",
    ),
    ModeGap(
        "enable_encoder_swa_bounded_replay",
        "exec_:ExecFeatures",
        "--enable-encoder-swa-bounded-replay",
        "slots of a prefix are stored again",
        "0.5.21",
    ),
    ModeGap(
        "enable_decoder_swa_bounded_replay",
        "exec_:ExecFeatures",
        "--enable-decoder-swa-bounded-replay",
        "slots of a prefix are stored again",
        "0.5.21",
    ),
    ModeGap("use_ray", "device:Device", "--use-ray", "plugins are not loaded in the actors"),
    ModeGap(
        "prefill_only_disable_kv_cache",
        "schedule:Schedule",
        "--prefill-only-disable-kv-cache",
        "there is no KV to guard",
        "0.5.12",
    ),
)
IN_TREE = ModeGap("kv_canary", "observability:Observability", "--kv-canary", "two canaries", "0.5.13", "none")


def settle(server_args: Any) -> Any:
    """What SGLang has made of its arguments. From 0.5.19 on it keeps that beside them."""
    try:
        overrides = importlib.import_module(OVERRIDES)
    except ImportError:
        return server_args
    view = getattr(overrides, "resolving_view", None)
    return server_args if view is None else view(server_args)


def list_mode_gaps(server_args: Any, mode: str = "log") -> list[str]:
    """Why this server's KV cannot be followed, one line per setting or pair of settings; empty if it can.

    Works on unresolved arguments too. A setting this release does not have reads as not set. ``mode`` is our own.
    """
    gaps = [
        f"{gap.setting} is not covered ({gap.why})"
        for gap in MODE_GAPS
        if gap.applies_to(getattr(server_args, gap.field, None))
    ]
    gaps += list_draft_gaps(server_args) + stages.list_stage_gaps(server_args, mode)
    return gaps + disaggregation.list_transfer_gaps(server_args, mode)
