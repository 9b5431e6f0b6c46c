"""Server arguments: our flags on SGLang's own parser, and what becomes of them.

Wrapped in every mode, so that ``--kvcanary`` can be parsed at all.
"""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser
from typing import Any

from packaging.version import Version

from kvcanary_plugin.activate import check_release, refuse
from kvcanary_plugin.config import OPTIONS, Config, read_config, to_environment
from kvcanary_plugin.errors import ConfigError, SeamError, UncoveredError
from kvcanary_plugin.faults.injector import Injector
from kvcanary_plugin.pool_patcher.patch import Patch
from kvcanary_plugin.report.jsonl import EventLog
from kvcanary_plugin.versions import installed_sglang

from .hf3fs import choose_storage
from .modes import GROUPS_SINCE, IN_TREE, MODE_GAPS, MODULE, list_mode_gaps

logger = logging.getLogger("kvcanary")


def declare_patches() -> list[Patch]:
    """The parser and what becomes of its result."""
    settings = (*MODE_GAPS, IN_TREE)
    # What a setting is called has to be known in each release: one that was renamed would read as not set.
    starts = sorted({gap.since for gap in settings} | {GROUPS_SINCE}, key=Version)
    ends: list[str | None] = [*starts[1:], None]
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
        *(
            Patch(
                MODULE,
                "ServerArgs",
                "from_cli_args",
                _from_cli_args,
                parameters=("cls", "args"),
                kind="classmethod",
                since=since,
                until=until,
                why="reads our flags and hands them to the scheduler processes through the environment",
                reads=tuple(
                    gap.home(Version(since) >= Version(GROUPS_SINCE))
                    for gap in settings
                    if Version(gap.since) <= Version(since)
                ),
            )
            for since, until in zip(starts, ends, strict=True)
        ),
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
        choose_storage(config.hf3fs, namespace)
        if not config.is_on and any(value for field, value in flags.items() if field not in ("mode", "hf3fs")):
            logger.warning("kvcanary: --kvcanary is off, so the other --kvcanary flags have no effect")
        _refuse_what_is_not_covered(config, namespace)
        if config.is_on or any(flags.values()) or "KVCANARY" in os.environ:
            os.environ.update(to_environment(config))
        server_args = wrapped(*args, **kwargs)
        _refuse_what_is_not_covered(config, server_args)  # SGLang settles some of them itself
    except (ConfigError, SeamError, UncoveredError) as error:
        refuse(error)
    return server_args


def _refuse_what_cannot_work(config: Config) -> None:
    """What would otherwise be noticed once the model is loaded."""
    if config.is_on:
        check_release(installed_sglang())
    if config.inject:
        Injector.parse(config.inject)
    if config.is_on and config.log:
        EventLog(config.log).close()


def _refuse_what_is_not_covered(config: Config, server_args: Any) -> None:
    if not config.is_on:
        return
    in_tree = getattr(server_args, IN_TREE.field, None) or IN_TREE.harmless
    if in_tree != IN_TREE.harmless:
        raise ConfigError(
            f"kvcanary: --kvcanary {config.mode} and SGLang's own --kv-canary {in_tree} exclude each other; "
            "drop one of them"
        )
    gaps = [] if config.allow_uncovered else list_mode_gaps(server_args, config.mode)
    if gaps:
        raise UncoveredError(
            f"kvcanary: refusing to start: {'; '.join(gaps)}. Drop that setting or --kvcanary, or pass "
            "--kvcanary-allow-uncovered to start without a guard"
        )
