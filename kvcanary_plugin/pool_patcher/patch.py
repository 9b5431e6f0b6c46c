"""A declared patch is one record, and a patch set installs all of them or none and undoes them from the same list.

Undoing puts back exactly what ``vars(owner)`` held: an inherited method is deleted from the subclass again, a static or
class method comes back as the descriptor it was.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import wrapt
from packaging.version import Version

from ..errors import SeamError

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
Kind = Literal["method", "staticmethod", "classmethod"]

_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of one class of SGLang that is wrapped.

    Attributes:
        module, owner, attribute: what is wrapped.
        wrapper: wrapt wrapper ``(wrapped, instance, args, kwargs)``; translates the call and holds no logic.
        parameters: the leading parameters the wrapper relies on, as declared, ``self`` included. More may follow.
        why: one clause, for ``kvcanary doctor``.
        since, until: SGLang releases it applies to; ``until`` is the first release it does not, None for none yet.
        kind: how the attribute is bound.
    """

    module: str
    owner: str
    attribute: str
    wrapper: Wrapper
    parameters: tuple[str, ...]
    why: str
    since: str
    until: str | None = None
    kind: Kind = "method"

    @property
    def target(self) -> str:
        """``module:Owner.attribute``."""
        return f"{self.module}:{self.owner}.{self.attribute}"

    def applies_to(self, version: str) -> bool:
        """Whether this patch is meant for that SGLang release."""
        release = Version(version)
        return Version(self.since) <= release and (self.until is None or release < Version(self.until))


@dataclass(frozen=True, slots=True)
class Seam:
    """A patch resolved against the SGLang that is installed."""

    patch: Patch
    owner: type
    own: Any  # what vars(owner) holds, _MISSING where the attribute is inherited
    raw: Any  # the descriptor that is in force, own or inherited


def resolve(patch: Patch) -> Seam:
    """Find the target of ``patch`` and check that it looks as declared.

    Raises:
        SeamError: the module, owner or attribute is missing, bound in another way, or its parameters have changed.
    """
    try:
        owner = getattr(importlib.import_module(patch.module), patch.owner)
    except (ImportError, AttributeError) as error:
        raise SeamError(f"{patch.target} is missing: {error}") from error
    own = vars(owner).get(patch.attribute, _MISSING)
    raw = next((vars(base)[patch.attribute] for base in owner.__mro__ if patch.attribute in vars(base)), _MISSING)
    if raw is _MISSING:
        raise SeamError(f"{patch.target} is missing: {patch.owner} has no attribute {patch.attribute!r}")
    kind = next((k.__name__ for k in (staticmethod, classmethod) if isinstance(_unwrap(raw), k)), "method")
    if kind != patch.kind:
        raise SeamError(f"{patch.target} is a {kind}; expected a {patch.kind}")
    function = _unwrap(raw).__func__ if kind != "method" else _unwrap(raw)
    found = tuple(inspect.signature(function).parameters)
    if found[: len(patch.parameters)] != patch.parameters:
        raise SeamError(
            f"{patch.target} takes ({', '.join(found)}); expected it to begin ({', '.join(patch.parameters)})"
        )
    return Seam(patch, owner, own, raw)


def _unwrap(raw: Any) -> Any:
    return raw.__wrapped__ if isinstance(raw, wrapt.FunctionWrapper) else raw


class PatchSet:
    """Installs a list of patches, all or none, and undoes them in reverse."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self.patches = tuple(patches)
        self._installed: list[tuple[Seam, Any]] = []

    @property
    def is_installed(self) -> bool:
        """Whether the patches are in force."""
        return bool(self._installed)

    def install(self, version: str) -> None:
        """Wrap the target of every patch that applies to SGLang ``version``. Does nothing the second time.

        Raises:
            SeamError: a seam has drifted; names every one that has, and nothing is wrapped.
        """
        if self.is_installed:
            return
        seams, drifted = [], []
        for patch in self.patches:
            if patch.applies_to(version):
                try:
                    seams.append(resolve(patch))
                except SeamError as error:
                    drifted.append(str(error))
        if drifted:
            raise SeamError(f"SGLang {version} does not look as kvcanary expects: " + "; ".join(drifted))
        try:
            for seam in seams:
                wrapper = wrapt.FunctionWrapper(seam.raw, seam.patch.wrapper)
                setattr(seam.owner, seam.patch.attribute, wrapper)
                self._installed.append((seam, wrapper))
        except Exception:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Put back what was there, in reverse order.

        Raises:
            SeamError: somebody wrapped a target again after us; nothing is undone, because that would undo theirs too.
        """
        for seam, wrapper in self._installed:
            if vars(seam.owner).get(seam.patch.attribute) is not wrapper:
                raise SeamError(f"{seam.patch.target} was replaced after kvcanary wrapped it; undo that first")
        while self._installed:
            seam, _ = self._installed.pop()
            if seam.own is _MISSING:
                delattr(seam.owner, seam.patch.attribute)
            else:
                setattr(seam.owner, seam.patch.attribute, seam.own)
