"""The entry point that SGLang's plugin loader calls in every process, before the command line is parsed.

The loader logs an exception of a plugin and starts the server without it. A canary that silently is not there looks
like a clean fleet, so anything that keeps us from doing what was asked ends the process, with one clear message.
"""

from __future__ import annotations

import functools
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import wrapt

if TYPE_CHECKING:
    from .pool_patcher.patch import Patch, PatchSet
    from .runtime.session import Session

logger = logging.getLogger("kvcanary")

EXIT_CODE = 2
# A process that never imports this runs no scheduler, and nothing of ours has to make it do so.
SCHEDULER = "sglang.srt.managers.scheduler"

parser_patches: PatchSet | None = None
engine_patches: PatchSet | None = None
session: Session | None = None
_is_waiting = False


def activate() -> None:
    """Wrap the argument parser; if the mode is not ``off``, also everything else that ``patches/`` declares.

    The latter happens once this process has imported the scheduler: detokenizers and the like load plugins too, and
    must not load half of SGLang for it. In the main process the flags are not parsed yet and the mode is that of the
    environment. Children inherit the environment, into which the main process writes what the flags said.
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


@functools.cache
def check_release(version: str) -> None:
    """Compare the seams of a release that nobody has looked at, before anything is loaded. Others pass at once.

    Raises:
        SeamError: a seam has drifted.
    """
    from .errors import SeamError
    from .pool_patcher.seams import SourceTree, check_seams
    from .versions import warn_of_unknown

    warning = warn_of_unknown(version)
    if warning is None:
        return
    logger.warning(warning)
    drifted = check_seams(SourceTree.installed(), [patch for _, patch in list_patches()], version)
    if drifted:
        raise SeamError(f"kvcanary: SGLang {version} does not look as kvcanary expects: " + "; ".join(drifted))


def list_patches() -> list[tuple[str, Patch]]:
    """Every declared patch, with the modes in which it is installed."""
    from .config import MODES, Config
    from .patches import declare_engine_patches, declare_parser_patches
    from .runtime.session import Session

    listed = [("every mode", patch) for patch in declare_parser_patches()]
    known: set[tuple[str, str, str]] = set()
    for mode in MODES[1:]:
        patches = declare_engine_patches(Session(Config(mode=mode)))
        when = mode if known else "unless off"
        listed += [(when, patch) for patch in patches if (patch.target, patch.since, patch.why) not in known]
        known |= {(patch.target, patch.since, patch.why) for patch in patches}
    return listed


def _install() -> None:
    global parser_patches, _is_waiting
    from .config import read_config
    from .patches import declare_parser_patches
    from .pool_patcher.patch import PatchSet
    from .versions import installed_sglang

    if parser_patches is None:
        patches = PatchSet(declare_parser_patches())
        patches.install(installed_sglang())
        parser_patches = patches
    if not read_config().is_on:
        return
    if SCHEDULER in sys.modules:
        _install_engine()
    elif not _is_waiting:
        _is_waiting = True
        wrapt.register_post_import_hook(_on_scheduler, SCHEDULER)


def _on_scheduler(_: ModuleType) -> None:
    try:
        _install_engine()
    except Exception as error:
        refuse(error)


def _install_engine() -> None:
    global engine_patches, session
    from .config import read_config
    from .patches import declare_engine_patches
    from .pool_patcher.patch import PatchSet
    from .runtime.session import Session
    from .versions import installed_sglang

    config = read_config()
    if parser_patches is None or engine_patches is not None or not config.is_on:
        return  # undone, done already, or switched off since
    version = installed_sglang()
    check_release(version)
    new_session = Session(config)
    patches = PatchSet(declare_engine_patches(new_session))
    patches.install(version)
    session, engine_patches = new_session, patches
