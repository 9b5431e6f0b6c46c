"""What is installed, whether SGLang finds the plugin, and which variables are in force."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import __version__
from ..config import ALLOW_INJECT_VARIABLE, OPTIONS, read_config
from ..display import MASK, mask_secrets
from ..errors import ConfigError
from ..remote import KEY_VARIABLE
from ..tiers.hf3fs.options import REDIS_PASSWORD_VARIABLE
from .checkup import Fact, Problem, Section

DISTRIBUTION = "kvcanary"
GROUP, NAME = "sglang.srt.plugins", "kvcanary"  # SGLang's entry point group, and ours in it
CHOSEN_VARIABLE = "SGLANG_PLUGINS"  # names those that SGLang is to load; all if it is empty
SECRET_VARIABLES = (KEY_VARIABLE, REDIS_PASSWORD_VARIABLE)
PACKAGES = ("sglang", "torch", "triton", "wrapt", "prometheus_client", "numpy", "xxhash")
INSTALL = "install kvcanary into the environment that runs SGLang: pip install kvcanary's folder or wheel there"


def examine_environment(environment: Mapping[str, str], *, check_settings: bool = True) -> Section:
    """Look at this Python's environment, and at ``environment`` as the variables a server would have.

    Without ``check_settings`` it is left open whether the values of our variables can be used.
    """
    problems: list[Problem] = []
    facts = [
        Fact("python", f"{platform.python_version()} ({sys.executable})"),
        Fact("os", platform.platform()),
        _describe_installation(problems),
        *(_look_for(package, problems) for package in PACKAGES),
        _look_for_plugin(environment, problems),
    ]
    if CHOSEN_VARIABLE in environment:
        facts.append(Fact(CHOSEN_VARIABLE, environment[CHOSEN_VARIABLE]))
    facts += _list_variables(environment, problems)
    if check_settings:
        try:
            read_config(environment)
        except ConfigError as error:
            text = mask_secrets(str(error).removeprefix("kvcanary: "))
            problems.append(Problem("error", text, "correct or unset that variable: no server starts with it"))
    return Section("environment", tuple(facts), problems=tuple(problems))


def find_entry_point() -> importlib.metadata.EntryPoint | None:
    """Ours, as a server finds it."""
    for distribution in _distributions():
        for entry in distribution.entry_points:
            if (entry.group, entry.name) == (GROUP, NAME):
                return entry
    return None


def is_chosen(environment: Mapping[str, str]) -> bool:
    """Whether SGLang's choice of plugins admits ours."""
    chosen = environment.get(CHOSEN_VARIABLE, "")
    return not chosen or NAME in (name.strip() for name in chosen.split(","))


def _describe_installation(problems: list[Problem]) -> Fact:
    running = Path(__file__).resolve().parents[1]
    for distribution in _distributions():
        if distribution.name == DISTRIBUTION:
            installed = Path(str(distribution.locate_file(running.name))).resolve()
            if installed == running:
                return Fact("kvcanary", f"{__version__}, installed in {running.parent}")
            if not installed.exists():
                return Fact("kvcanary", f"{__version__}, editable from {running.parent}")
            problems.append(
                Problem(
                    "warning",
                    f"this doctor is run from {running.parent}, but a server has the kvcanary in {installed.parent}",
                    "run the kvcanary command of the environment, from another folder",
                )
            )
            return Fact("kvcanary", f"{__version__}, run from {running.parent}", "warning")
    return Fact("kvcanary", f"{__version__}, not installed, run from {running.parent}", "warning")


def _distributions() -> Iterable[importlib.metadata.Distribution]:
    """Those a server finds: not by the folder that doctor itself happens to be run from."""
    places = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
    return importlib.metadata.distributions(path=list(places))


def _look_for(package: str, problems: list[Problem]) -> Fact:
    try:
        return Fact(package, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        if package == "sglang":
            problems.append(
                Problem(
                    "error",
                    f"sglang is not installed for {sys.executable}",
                    "run doctor with the Python that runs the server; kvcanary has to be installed there",
                )
            )
        return Fact(package, None, "error" if package == "sglang" else "ok")


def _look_for_plugin(environment: Mapping[str, str], problems: list[Problem]) -> Fact:
    entry = find_entry_point()
    if entry is None:
        problems.append(Problem("error", f"SGLang does not find the plugin: no entry point {NAME} in {GROUP}", INSTALL))
        return Fact("plugin", "not found by SGLang", "error")
    if not is_chosen(environment):
        chosen = environment[CHOSEN_VARIABLE]
        problems.append(
            Problem(
                "error",
                f"SGLang does not load the plugin: {CHOSEN_VARIABLE}={chosen} names others only",
                f"add {NAME} to {CHOSEN_VARIABLE}, or unset it",
            )
        )
        return Fact("plugin", f"found, but left out by {CHOSEN_VARIABLE}", "error")
    try:
        entry.load()
    except Exception as error:  # SGLang logs it and starts without the plugin
        problems.append(
            Problem("error", f"the plugin cannot be loaded: {type(error).__name__}: {error}", f"repair it: {INSTALL}")
        )
        return Fact("plugin", "found, but cannot be loaded", "error")
    return Fact("plugin", "found and loaded by SGLang")


def _list_variables(environment: Mapping[str, str], problems: list[Problem]) -> list[Fact]:
    known = {option.variable for option in OPTIONS} | {ALLOW_INJECT_VARIABLE, *SECRET_VARIABLES}
    names = sorted(name for name in environment if name == "KVCANARY" or name.startswith("KVCANARY_"))
    for name in names:
        if name not in known:
            problems.append(
                Problem(
                    "warning",
                    f"{name} is no variable of this version and has no effect on a server",
                    f"there are {', '.join(sorted(known))}",
                )
            )
    if environment.get(ALLOW_INJECT_VARIABLE) == "1":
        problems.append(
            Problem(
                "warning",
                f"{ALLOW_INJECT_VARIABLE}=1 lets a server damage its KV on purpose",
                f"unset {ALLOW_INJECT_VARIABLE} outside of tests and drills",
            )
        )
    return [
        Fact(
            name,
            MASK if name in SECRET_VARIABLES else mask_secrets(environment[name]),
            "ok" if name in known else "warning",
        )
        for name in names
    ]


def current_environment() -> dict[str, str]:
    """The variables of this process."""
    return dict(os.environ)
