"""What SGLang makes of a command line, without starting a server: for ``kvcanary doctor``.

Run as a program it reads the arguments as JSON from its input and answers in JSON, so that whatever SGLang does while
it settles its arguments (environment, logging, libraries of an accelerator) stays in a process that ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kvcanary_plugin import activate
from kvcanary_plugin.config import OPTIONS, Config, read_config
from kvcanary_plugin.errors import ConfigError, KvcanaryError, SeamError
from kvcanary_plugin.faults.injector import Injector
from kvcanary_plugin.pool_patcher.patch import PatchSet
from kvcanary_plugin.versions import installed_sglang

from . import declare_parser_patches
from .hf3fs import choose_storage
from .modes import IN_TREE, list_mode_gaps, settle

# Where the parser of the YAML --config is: until 0.5.22, and since.
CONFIG_PARSERS = ("sglang.srt.server_args_config_parser", "sglang.srt.utils.server_args_config_parser")
# A model that is not on this machine would be fetched to settle the arguments.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A command line as SGLang and the plugin understand it.

    Attributes:
        refused: why SGLang's parser does not take it; all else is empty then.
        wrong: what is wrong with our own settings, a line each; ``config`` holds what is left of them.
        config: our settings, from flags and environment.
        gaps: why KV could not be followed, a line each, as parsed and once settled.
        in_tree: SGLang's own ``--kv-canary``, where it is on.
        unsettled: why the arguments are as parsed, and not as SGLang would settle them; None where they are settled.
        metrics: ``--enable-metrics``.
        sessions: ``--enable-streaming-session``, whose turns hand slots on to each other.
        device: what the server would run on, as SGLang names it; None where only SGLang would choose it.
    """

    refused: str | None = None
    wrong: tuple[str, ...] = ()
    config: Config = field(default_factory=Config)
    gaps: tuple[str, ...] = ()
    in_tree: str | None = None
    unsettled: str | None = None
    metrics: bool = False
    sessions: bool = False
    device: str | None = None

    @classmethod
    def from_json(cls, text: str) -> ServerPlan:
        """What the program has answered."""
        fields = json.loads(text)
        config = fields.pop("config")
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**fields | lists, config=Config(**config | {"checks": tuple(config["checks"])}))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def plan_server(arguments: Sequence[str]) -> ServerPlan:
    """Parse the arguments of a server, by SGLang's own parser with our flags in it.

    Raises:
        SeamError: SGLang's parser is not where the plugin expects it.
    """
    try:
        with _parser_patches():
            namespace = _parse(list(arguments))
    except SeamError:
        raise
    except Exception as error:  # of argparse, of a YAML parser, of types of SGLang's own
        return ServerPlan(refused=str(error) or type(error).__name__)
    flags = {option.field: getattr(namespace, option.dest, None) or None for option in OPTIONS}
    config, wrong = _read_config(flags)
    try:
        if config.inject:
            Injector.parse(config.inject)
    except ConfigError as error:
        wrong.append(str(error))
    try:
        choose_storage(config.hf3fs, namespace)
    except ConfigError as error:
        wrong.append(str(error))
    gaps = list_mode_gaps(namespace, config.mode)
    settings, unsettled = _settle(namespace)
    if unsettled is None:
        gaps += [gap for gap in list_mode_gaps(settings, config.mode) if gap not in gaps]
    in_tree = getattr(settings, IN_TREE.field, None) or IN_TREE.harmless
    return ServerPlan(
        wrong=tuple(wrong),
        config=config,
        gaps=tuple(gaps),
        in_tree=None if in_tree == IN_TREE.harmless else str(in_tree),
        unsettled=unsettled,
        metrics=bool(getattr(settings, "enable_metrics", False)),
        sessions=bool(getattr(settings, "enable_streaming_session", False)),
        device=getattr(settings, "device", None),
    )


@contextmanager
def _parser_patches() -> Iterator[None]:
    if activate.parser_patches is not None:
        yield
        return
    patches = PatchSet(declare_parser_patches())
    patches.install(installed_sglang())
    try:
        yield
    finally:
        patches.uninstall()


def _parse(arguments: list[str]) -> argparse.Namespace:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="sglang serve", add_help=False)
    ServerArgs.add_cli_args(parser)
    if "--config" in arguments:
        arguments = _config_merger()(parser).merge_config_with_args(arguments)
    return parser.parse_args(arguments)


def _config_merger() -> Any:
    for module in CONFIG_PARSERS:
        try:
            return importlib.import_module(module).ConfigArgumentMerger
        except ImportError:
            continue
    raise ConfigError("--config cannot be read here: this SGLang keeps its parser elsewhere; give the flags themselves")


def _read_config(flags: dict[str, Any]) -> tuple[Config, list[str]]:
    """The settings, those that cannot be used left out, and what is wrong, a line each."""
    try:
        return read_config(flags=flags), []
    except ConfigError as error:
        whole = str(error)
    usable: dict[str, Any] = {}
    wrong: list[str] = []
    for option in OPTIONS:
        flag, text = flags[option.field], os.environ.get(option.variable, "").strip()
        try:
            if flag is not None:
                usable[option.field] = option.parse(option.flag, str(flag))
            elif text:
                usable[option.field] = option.parse(option.variable, text)
        except ConfigError as error:
            wrong.append(str(error))
    return Config(**usable), wrong or [whole]


def _settle(namespace: argparse.Namespace) -> tuple[Any, str | None]:
    """SGLang's settled arguments, or as they were parsed and why: nothing is fetched, and no code of a model is run."""
    from sglang.srt.server_args import ServerArgs

    for name in ("model_path", "tokenizer_path", "speculative_draft_model_path"):
        path = getattr(namespace, name, None)
        if path and not Path(path).is_dir() and ("://" in path or os.environ.get("SGLANG_USE_MODELSCOPE")):
            return namespace, f"{path} is not on this machine"
    if namespace.trust_remote_code:
        return namespace, "--trust-remote-code would run the model's own code"
    try:
        server_args = ServerArgs.from_cli_args(namespace)
        resolve = getattr(server_args, "resolve_once", None)
        if resolve is not None:
            resolve()
        return settle(server_args), None
    except (Exception, SystemExit) as error:  # whatever SGLang meets here that a server's machine may have
        text = (str(error).strip() or "no reason given").splitlines()[0]
        return namespace, f"{type(error).__name__}: {text}"


def main() -> int:
    """Answer on what was the output; whatever SGLang prints goes to the error output."""
    answer = os.dup(1)
    os.dup2(2, 1)
    os.environ.update(OFFLINE)
    try:
        plan = plan_server(json.loads(sys.stdin.read()))
    except KvcanaryError as error:
        plan = ServerPlan(refused=str(error))
    os.write(answer, json.dumps(dataclasses.asdict(plan)).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
