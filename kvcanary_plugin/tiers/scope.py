"""What SGLang's storage keys leave out: they hash tokens only.

Two requests with the same tokens and another LoRA adapter, cache salt or weight version have the same key. So the extra
key of the radix tree and the version of the weights are taken down when a storage operation is created, and are in
force on the I/O thread while it runs. Storage code mixes :func:`current` into its keys.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..pool_patcher.patch import PatchSet

_ATTRIBUTE = "_kvcanary_scope"
_local = threading.local()
_weights = ""
_patches: PatchSet | None = None


def install() -> None:
    """Have SGLang's storage operations carry their scope, unless the session has seen to it already.

    Raises:
        SeamError: this SGLang does not look as expected.
    """
    global _patches
    from .. import activate
    from ..patches.hf3fs import declare_scope_patches
    from ..pool_patcher.patch import PatchSet
    from ..versions import installed_sglang

    if activate.engine_patches is None and _patches is None:
        patches = PatchSet(declare_scope_patches())
        patches.install(installed_sglang())
        _patches = patches


def uninstall() -> None:
    """Undo :func:`install`."""
    global _patches
    if _patches is not None:
        _patches.uninstall()
        _patches = None


def current() -> str:
    """The scope of the storage operation that this thread runs; empty outside of one and for ordinary requests."""
    return getattr(_local, "scope", "")


def note_operation(operation: Any, token_ids: Any) -> None:
    """``operation`` was just created for ``token_ids``, SGLang's radix key or a plain list of tokens."""
    extra_key = getattr(token_ids, "extra_key", None)
    parts = [part for part in (_weights and f"weights={_weights}", extra_key and f"extra={extra_key}") if part]
    setattr(operation, _ATTRIBUTE, "\0".join(parts))


@contextlib.contextmanager
def running(operation: Any) -> Iterator[None]:
    """The calling thread works on ``operation``."""
    outer = current()
    _local.scope = getattr(operation, _ATTRIBUTE, "")
    try:
        yield
    finally:
        _local.scope = outer


def note_weights_changed(version: str | None) -> None:
    """The weights were replaced while serving. Without a ``version``, nothing stored before or by others fits."""
    global _weights
    _weights = version or secrets.token_hex(8)
