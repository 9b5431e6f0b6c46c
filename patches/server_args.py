"""Server arguments: our flags on SGLang's own parser, and which server modes are covered.

Wrapped in every mode, so that ``--kvcanary`` can be parsed at all.
"""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser
from dataclasses import dataclass
from typing import Any

from kvcanary_plugin.activate import refuse
from kvcanary_plugin.config import OPTIONS, Config, read_config, to_environment
from kvcanary_plugin.errors import ConfigError, UncoveredError
from kvcanary_plugin.faults.injector import Injector
from kvcanary_plugin.pool_patcher.patch import Patch
from kvcanary_plugin.report.jsonl import EventLog

MODULE = "sglang.srt.server_args"

logger = logging.getLogger("kvcanary")


def declare_patches() -> list[Patch]:
    """The parser and what becomes of its result."""
    return [
        Patch(
            MODULE,
            "ServerArgs",
            "add_cli_args",
            _add_cli_args,
            parameters=("parser",),
            kind="staticmethod",
            since="0.5.11",
            why="adds the --kvcanary flags to SGLang's parser, which also serves its YAML --config",
        ),
        Patch(
            MODULE,
            "ServerArgs",
            "from_cli_args",
            _from_cli_args,
            parameters=("cls", "args"),
            kind="classmethod",
            since="0.5.11",
            why="reads our flags and hands them to the scheduler processes through the environment",
        ),
    ]


@dataclass(frozen=True, slots=True)
class ModeGap:
    """A server setting under which KV appears or lives where no forward of ours passes: refused until covered."""

    field: str
    setting: str
    why: str
    harmless: Any = None  # a value other than None, False, 0 and "" that means not set


MODE_GAPS = (
    ModeGap(
        "enable_hierarchical_cache", "--enable-hierarchical-cache", "KV comes back from host memory without a forward"
    ),
    ModeGap("disaggregation_mode", "--disaggregation-mode", "KV arrives from another server without a forward", "null"),
    ModeGap("speculative_algorithm", "--speculative-algorithm", "draft tokens are stored out of order and rejected"),
    ModeGap("enable_pdmux", "--enable-pdmux", "a batch runs in several interleaved forwards"),
    ModeGap("dllm_algorithm", "--dllm-algorithm", "blocks are stored several times"),
    ModeGap("pp_size", "--pp-size above 1", "results of a stage arrive several steps late", 1),
    ModeGap("enable_dp_attention", "--enable-dp-attention", "ranks run padded batches of their own"),
    ModeGap("attn_cp_size", "--attn-cp-size above 1", "a prefix is spread over ranks", 1),
    ModeGap("dcp_size", "--dcp-size above 1", "a prefix is spread over ranks", 1),
    ModeGap("enable_unified_memory", "--enable-unified-memory", "KV moves between slots"),
    ModeGap("enable_hisparse", "--enable-hisparse", "KV moves to host memory"),
    ModeGap("enable_lmcache", "--enable-lmcache", "KV comes back from another store without a forward"),
    ModeGap("use_ray", "--use-ray", "plugins are not loaded in the actors"),
    ModeGap("prefill_only_disable_kv_cache", "--prefill-only-disable-kv-cache", "there is no KV to guard"),
    ModeGap("enable_memory_saver", "--enable-memory-saver", "KV is dropped and comes back empty"),
)


def list_mode_gaps(server_args: Any) -> list[str]:
    """Why this server's KV cannot be followed, one line per setting; empty if it can.

    Works on unresolved arguments too. A setting this release does not have reads as not set.
    """
    return [
        f"{gap.setting} is not covered yet ({gap.why})"
        for gap in MODE_GAPS
        if getattr(server_args, gap.field, None) not in (None, False, 0, "", gap.harmless)
    ]


def _add_cli_args(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    parser: ArgumentParser = args[0] if args else kwargs["parser"]
    group = parser.add_argument_group("kvcanary", "AddressSanitizer for the KV cache (kvcanary plugin)")
    for option in OPTIONS:
        if option.is_switch:
            group.add_argument(option.flag, dest=option.dest, action="store_true", help=option.help)
        else:
            # Values are checked by read_config, so that flag, variable and YAML give the same message.
            group.add_argument(option.flag, dest=option.dest, default=None, metavar=option.metavar, help=option.help)
    return result


def _from_cli_args(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    namespace = args[0] if args else kwargs["args"]
    # A switch that is not given reads False; that must not beat the environment.
    flags = {option.field: getattr(namespace, option.dest, None) or None for option in OPTIONS}
    try:
        config = read_config(flags=flags)
        _refuse_what_cannot_work(config)
        if not config.is_on and any(value for field, value in flags.items() if field != "mode"):
            logger.warning("kvcanary: --kvcanary is off, so the other --kvcanary flags have no effect")
        _refuse_what_is_not_covered(config, namespace)
        if config.is_on or any(flags.values()) or "KVCANARY" in os.environ:
            os.environ.update(to_environment(config))
        server_args = wrapped(*args, **kwargs)
        _refuse_what_is_not_covered(config, server_args)  # SGLang settles some of them itself
    except (ConfigError, UncoveredError) as error:
        refuse(error)
    return server_args


def _refuse_what_cannot_work(config: Config) -> None:
    """What would otherwise be noticed once the model is loaded."""
    if config.inject:
        Injector.parse(config.inject)
    if config.is_on and config.log:
        EventLog(config.log).close()


def _refuse_what_is_not_covered(config: Config, server_args: Any) -> None:
    if not config.is_on:
        return
    in_tree = getattr(server_args, "kv_canary", None) or "none"
    if in_tree != "none":
        raise ConfigError(
            f"kvcanary: --kvcanary {config.mode} and SGLang's own --kv-canary {in_tree} exclude each other; "
            "drop one of them"
        )
    gaps = [] if config.allow_uncovered else list_mode_gaps(server_args)
    if gaps:
        raise UncoveredError(
            f"kvcanary: refusing to start: {'; '.join(gaps)}. Drop that setting or --kvcanary, or pass "
            "--kvcanary-allow-uncovered to start without a guard"
        )
