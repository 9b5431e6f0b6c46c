"""The entry point that SGLang's plugin loader calls in every process, before the command line is parsed.

The loader logs an exception of a plugin and starts the server without it. A canary that silently is not there looks
like a clean fleet, so anything that keeps us from doing what was asked ends the process, with one clear message.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from .pool_patcher.patch import PatchSet
    from .runtime.session import Session

EXIT_CODE = 2

parser_patches: PatchSet | None = None
engine_patches: PatchSet | None = None
session: Session | None = None


def activate() -> None:
    """Wrap the argument parser; if the mode is not ``off``, also everything else that ``patches/`` declares.

    In the main process the flags are not parsed yet and the mode is that of the environment. Children inherit the
    environment, into which the main process writes what the flags said.
    """
    try:
        _install()
    except Exception as error:
        refuse(error)


def deactivate() -> None:
    """Undo :func:`activate`: every target holds again exactly what it held before."""
    global parser_patches, engine_patches, session
    for patches in (engine_patches, parser_patches):
        if patches is not None:
            patches.uninstall()
    parser_patches = engine_patches = session = None


def refuse(error: Exception) -> NoReturn:
    """End this process with a message that an operator can act on. ``SystemExit`` passes the plugin loader."""
    text = str(error)
    if not text.startswith("kvcanary"):
        text = f"kvcanary: cannot start: {type(error).__name__}: {text}"
    print(text, file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE) from error


def _install() -> None:
    global parser_patches, engine_patches, session
    from .config import read_config
    from .patches import declare_engine_patches, declare_parser_patches
    from .pool_patcher.patch import PatchSet
    from .versions import installed_sglang

    version = installed_sglang()
    if parser_patches is None:
        patches = PatchSet(declare_parser_patches())
        patches.install(version)
        parser_patches = patches
    config = read_config()
    if config.is_on and engine_patches is None:
        from .runtime.session import Session

        new_session = Session(config)
        patches = PatchSet(declare_engine_patches(new_session))
        patches.install(version)
        session, engine_patches = new_session, patches
