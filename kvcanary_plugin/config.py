"""What the operator asked for: one frozen record, read from flags and environment in one place.

Every setting has one flag and one variable of the same name (``--kvcanary-log`` and ``KVCANARY_LOG``). A flag beats the
environment. The main process writes the outcome back to the environment, which is how it reaches every child process.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .display import mask_secrets
from .errors import ConfigError
from .tiers.hf3fs.options import to_extra_config

MODES = ("off", "log", "raise", "quarantine")
CHECKS = ("chain", "content", "presence", "ownership", "identity", "order")
BYTE_CHECKS = ("content", "presence")  # they look at the rows themselves
CONTENT_LEVELS = ("none", "partial", "all")
ALLOW_INJECT_VARIABLE = "KVCANARY_ALLOW_INJECT"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def _one_of(choices: tuple[str, ...]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text == "false" and "off" in choices:
            return "off"  # what YAML makes of an unquoted off
        if text not in choices:
            raise ConfigError(f"kvcanary: {name}={text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _parse_checks(name: str, text: str) -> tuple[str, ...]:
    chosen = tuple(part.strip() for part in text.split(",") if part.strip())
    for check in chosen:
        if check not in CHECKS:
            raise ConfigError(f"kvcanary: {name} names {check!r}; this version has {', '.join(CHECKS)}")
    if not chosen:
        raise ConfigError(f"kvcanary: {name} is empty; name at least one of {', '.join(CHECKS)}, or use mode off")
    return tuple(check for check in CHECKS if check in chosen)


def _parse_share(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"kvcanary: {name}={text!r} must be a share of time above 0 and at most 1, such as 0.005")
    return share


def _parse_switch(name: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError(f"kvcanary: {name}={text!r} is neither 1 nor 0")


def _parse_text(_: str, text: str) -> str | None:
    return text or None


def _parse_storage(name: str, text: str) -> str:
    try:
        to_extra_config(text)
    except ConfigError as error:
        raise ConfigError(f"{error} (in {name}={mask_secrets(text)!r})") from error
    return text


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its field in :class:`Config`, its parser, its ``--help`` text, and how argparse is to offer it."""

    field: str
    parse: Callable[[str, str], Any]
    help: str
    metavar: str | None = None
    is_switch: bool = False

    @property
    def variable(self) -> str:
        """Environment variable."""
        return "KVCANARY" if self.field == "mode" else f"KVCANARY_{self.field.upper()}"

    @property
    def flag(self) -> str:
        """Command-line flag."""
        return "--kvcanary" if self.field == "mode" else f"--kvcanary-{self.field.replace('_', '-')}"

    @property
    def dest(self) -> str:
        """Attribute of the parsed namespace."""
        return self.flag.lstrip("-").replace("-", "_")


OPTIONS = (
    Option(
        "mode",
        _one_of(MODES),
        "Watch the KV cache. 'log' reports damaged KV and keeps serving, 'raise' stops the server at the first "
        "violation, 'quarantine' ends the requests that read damaged KV and serves on without the damaged slots, "
        "'off' wraps nothing but the argument parser. Default: off.",
        metavar="{" + ",".join(MODES) + "}",
    ),
    Option(
        "checks",
        _parse_checks,
        f"Comma-separated checks to run, of {', '.join(CHECKS)}. Default: all.",
        metavar="CHECK[,CHECK]",
    ),
    Option(
        "content",
        _one_of(CONTENT_LEVELS),
        "How many bytes of each row are fingerprinted: none, the first 16 (partial) or all. Default: all.",
        metavar="{" + ",".join(CONTENT_LEVELS) + "}",
    ),
    Option(
        "scrub_budget",
        _parse_share,
        "Share of the time of a forward that the rotating content pass may add, above 0, at most 1. Default: 0.0025.",
        metavar="SHARE",
    ),
    Option("log", _parse_text, "Append violations to this file as JSON lines. Default: none.", metavar="FILE"),
    Option(
        "allow_uncovered",
        _parse_switch,
        "Start, unguarded and with a warning, where this version does not cover the KV pool or the server mode. "
        "Default: refuse to start.",
        is_switch=True,
    ),
    Option(
        "strict_weights",
        _parse_switch,
        "Treat requests that go on running while the weights are updated in place as damaged. Default: they are "
        "reported once.",
        is_switch=True,
    ),
    Option(
        "inject",
        _parse_text,
        "Faults to inject, for tests and drills: FAULT@FORWARD[:key=value,...][;...]. Refused unless "
        f"{ALLOW_INJECT_VARIABLE}=1.",
        metavar="SPEC",
    ),
    Option(
        "hf3fs",
        _parse_storage,
        "Store KV pages behind the hierarchical cache in verified page files in this folder, on a 3FS mount or on any "
        "disk; ?capacity=200GiB&client=usrbio&index=redis://... and the like may follow. Also with --kvcanary off.",
        metavar="PATH",
    ),
)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the operator can set. Read it with :func:`read_config`."""

    mode: str = "off"
    checks: tuple[str, ...] = CHECKS
    content: str = "all"
    scrub_budget: float = 0.0025
    log: str | None = None
    allow_uncovered: bool = False
    strict_weights: bool = False
    inject: str | None = None
    hf3fs: str | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything but the argument parser is to be wrapped."""
        return self.mode != "off"

    @property
    def has_content(self) -> bool:
        """Whether bytes are fingerprinted at all."""
        return "content" in self.checks and self.content != "none"

    @property
    def has_strict_weights(self) -> bool:
        """Whether requests that run through an update of the weights are violations."""
        return self.strict_weights and "identity" in self.checks

    @property
    def reads_rows(self) -> bool:
        """Whether any check looks at the rows of KV themselves."""
        return self.content != "none" and any(check in self.checks for check in BYTE_CHECKS)


def read_config(environment: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None) -> Config:
    """The configuration that flags and environment give.

    Args:
        environment: variables, by default those of this process.
        flags: values by field name; None means the flag was not given.

    Raises:
        ConfigError: a value cannot be used, or faults are to be injected without permission.
    """
    environment = os.environ if environment is None else environment
    flags = flags or {}
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = flags.get(option.field)
        if given is not None:
            values[option.field] = option.parse(option.flag, str(given))
        elif text := environment.get(option.variable, "").strip():
            values[option.field] = option.parse(option.variable, text)
    config = Config(**values)
    if config.content == "none":
        left = tuple(check for check in config.checks if check not in BYTE_CHECKS)
        if config.is_on and not left:
            raise ConfigError(
                f"kvcanary: --kvcanary-checks {','.join(config.checks)} with --kvcanary-content none checks nothing; "
                "use partial or all, add the check chain, or use mode off"
            )
        config = dataclasses.replace(config, checks=left)
    if config.is_on and "identity" in config.checks and "chain" not in config.checks:
        raise ConfigError(
            f"kvcanary: --kvcanary-checks {','.join(config.checks)} has identity without chain, which finds it; "
            "add chain or leave identity out"
        )
    if config.inject and environment.get(ALLOW_INJECT_VARIABLE) != "1":
        raise ConfigError(
            f"kvcanary: --kvcanary-inject {config.inject!r} damages live KV on purpose and is refused; "
            f"set {ALLOW_INJECT_VARIABLE}=1 in the environment of a test or drill server"
        )
    return config


def to_environment(config: Config) -> dict[str, str]:
    """The variables that make :func:`read_config` give ``config`` again."""
    texts: dict[str, str] = {}
    for option in OPTIONS:
        value = getattr(config, option.field)
        if value is None:
            text = ""
        elif isinstance(value, tuple):
            text = ",".join(value)
        elif isinstance(value, bool):
            text = "1" if value else "0"
        else:
            text = str(value)
        texts[option.variable] = text
    return texts


assert tuple(field.name for field in fields(Config)) == tuple(option.field for option in OPTIONS)
