"""Server arguments: our flags on SGLang's own parser, and which server modes are covered.

Wrapped in every mode, so that ``--kvcanary`` can be parsed at all.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from typing import Any

from kvcanary_plugin.activate import refuse
from kvcanary_plugin.config import OPTIONS, read_config, to_environment
from kvcanary_plugin.errors import ConfigError, UncoveredError
from kvcanary_plugin.pool_patcher.patch import Patch

MODULE = "sglang.srt.server_args"


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


def list_mode_gaps(server_args: Any) -> list[str]:
    """Why KV would appear or live where no forward of ours passes, one line per setting; empty if it would not.

    Works on unresolved arguments too. A setting this release does not have reads as not set.
    """

    def given(name: str, *harmless: Any) -> bool:
        return getattr(server_args, name, None) not in (None, False, 0, "", *harmless)

    reasons = {
        "KV comes back from host memory without a forward": given("enable_hierarchical_cache"),
        "KV arrives from another server without a forward": given("disaggregation_mode", "null"),
        "draft tokens are stored out of order and rejected": given("speculative_algorithm"),
        "a batch runs in several interleaved forwards": given("enable_pdmux"),
        "blocks are stored several times": given("dllm_algorithm"),
        "results of a stage arrive several steps late": given("pp_size", 1),
        "ranks run batches of their own with padding": given("enable_dp_attention"),
        "a prefix is spread over ranks": given("attn_cp_size", 1) or given("dcp_size", 1),
        "KV moves between slots": given("enable_unified_memory"),
        "KV moves to host memory": given("enable_hisparse") or given("cpu_offload_gb"),
    }
    settings = {
        "KV comes back from host memory without a forward": "--enable-hierarchical-cache",
        "KV arrives from another server without a forward": "--disaggregation-mode",
        "draft tokens are stored out of order and rejected": "--speculative-algorithm",
        "a batch runs in several interleaved forwards": "--enable-pdmux",
        "blocks are stored several times": "--dllm-algorithm",
        "results of a stage arrive several steps late": "--pp-size above 1",
        "ranks run batches of their own with padding": "--enable-dp-attention",
        "a prefix is spread over ranks": "context parallelism",
        "KV moves between slots": "--enable-unified-memory",
        "KV moves to host memory": "--enable-hisparse",
    }
    return [f"{settings[why]} is not covered yet ({why})" for why, is_set in reasons.items() if is_set]


def _add_cli_args(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    parser: ArgumentParser = args[0] if args else kwargs["parser"]
    group = parser.add_argument_group("kvcanary", "AddressSanitizer for the KV cache (kvcanary plugin)")
    for option in OPTIONS:
        if option.is_switch:
            group.add_argument(option.flag, dest=option.dest, action="store_const", const="1", help=option.help)
        else:
            # Values are checked by read_config, so that flag, variable and YAML give the same message.
            group.add_argument(option.flag, dest=option.dest, default=None, metavar=option.metavar, help=option.help)
    return result


def _from_cli_args(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    namespace = args[0] if args else kwargs["args"]
    flags = {option.field: getattr(namespace, option.dest, None) for option in OPTIONS}
    try:
        config = read_config(flags=flags)
        os.environ.update(to_environment(config))
        server_args = wrapped(*args, **kwargs)
        if config.is_on and getattr(server_args, "kv_canary", "none") != "none":
            raise ConfigError(
                f"kvcanary: --kvcanary {config.mode} and SGLang's own --kv-canary {server_args.kv_canary} exclude each other; "
                "drop one of them"
            )
        gaps = list_mode_gaps(server_args) if config.is_on and not config.allow_uncovered else []
        if gaps:
            raise UncoveredError(
                f"kvcanary: refusing to start: {'; '.join(gaps)}. Drop that setting or --kvcanary, or pass "
                "--kvcanary-allow-uncovered to start without a guard"
            )
    except (ConfigError, UncoveredError) as error:
        refuse(error)
    return server_args
