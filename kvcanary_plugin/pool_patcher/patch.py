"""A declared patch is one record, and a patch set installs all of them or none and undoes them from the same list.

Undoing puts back exactly what ``vars(owner)`` held: an inherited method is deleted from the subclass again, a static or
class method comes back as the descriptor it was.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from packaging.version import Version

from ..errors import SeamError

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
Kind = Literal["method", "staticmethod", "classmethod"]

_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Field:
    """A name a wrapper reads: an attribute of ``owner``, or a name of the module where that is None."""

    module: str
    owner: str | None
    name: str

    @property
    def target(self) -> str:
        """``module:Owner.name``."""
        return f"{self.module}:{self.owner}.{self.name}" if self.owner else f"{self.module}:{self.name}"


def fields_of(module: str, owner: str | None, *names: str) -> tuple[Field, ...]:
    """One :class:`Field` for each of ``names``."""
    return tuple(Field(module, owner, name) for name in names)


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of one class of SGLang that is wrapped.

    A seam that has moved is several patches, one for each range of releases.

    Attributes:
        module, owner, attribute: what is wrapped.
        wrapper: ``(wrapped, instance, args, kwargs)``; translates the call and holds no logic. ``wrapped`` is bound,
            and ``args`` are without ``self`` or ``cls``, which is ``instance``.
        parameters: the leading parameters the wrapper relies on, as declared, ``self`` included. More may follow.
        why: one clause, for ``kvcanary doctor``.
        since, until: SGLang releases it applies to; ``until`` is the first release it does not, None for none yet.
        kind: how the attribute is bound.
        reads: what else the wrapper relies on.
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
    reads: tuple[Field, ...] = ()

    @property
    def target(self) -> str:
        """``module:Owner.attribute``."""
        return f"{self.module}:{self.owner}.{self.attribute}"

    def applies_to(self, version: str) -> bool:
        """Whether this patch is meant for that SGLang release."""
        release = Version(version)
        return Version(self.since) <= release and (self.until is None or release < Version(self.until))

    def check(self, kind: str, parameters: tuple[str, ...]) -> None:
        """Compare what was found with what is expected.

        Raises:
            SeamError: it is bound in another way, or its parameters have changed.
        """
        if kind != self.kind:
            raise SeamError(f"{self.target} is a {kind}; expected a {self.kind}")
        if parameters[: len(self.parameters)] != self.parameters:
            raise SeamError(
                f"{self.target} takes ({', '.join(parameters)}); expected it to begin ({', '.join(self.parameters)})"
            )


@dataclass(frozen=True, slots=True)
class Seam:
    """A patch resolved against the SGLang that is installed."""

    patch: Patch
    owner: type
    own: Any  # what vars(owner) holds, _MISSING where the attribute is inherited
    raw: Any  # the descriptor that is in force, own or inherited

    def make_wrapper(self) -> Any:
        """The descriptor that goes in its place.

        It is of the plain kind it replaces, a function, staticmethod or classmethod, and reaches what it replaces by
        the descriptor protocol alone. SGLang's own hooks and other plugins take such a descriptor apart and wrap what
        is within; of anything cleverer they would keep the inside and lose the wrapper.
        """
        raw, owner, wrapper, kind = self.raw, self.owner, self.patch.wrapper, self.patch.kind
        call: Any
        if kind == "staticmethod":
            wrapped = raw.__get__(None, owner)

            def call(*args: Any, **kwargs: Any) -> Any:
                return wrapper(wrapped, None, args, kwargs)

        elif kind == "classmethod":

            def call(cls: type, /, *args: Any, **kwargs: Any) -> Any:
                return wrapper(raw.__get__(None, cls), cls, args, kwargs)

        else:

            def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
                return wrapper(raw.__get__(self, type(self)), self, args, kwargs)

        call = functools.update_wrapper(call, raw.__func__ if kind != "method" else raw)
        return {"staticmethod": staticmethod, "classmethod": classmethod}.get(kind, lambda function: function)(call)


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
    raw: Any = next((vars(base)[patch.attribute] for base in owner.__mro__ if patch.attribute in vars(base)), _MISSING)
    if raw is _MISSING:
        raise SeamError(f"{patch.target} is missing: {patch.owner} has no attribute {patch.attribute!r}")
    kind = next((k.__name__ for k in (staticmethod, classmethod, property) if isinstance(raw, k)), "method")
    function = raw.__func__ if kind in ("staticmethod", "classmethod") else raw
    patch.check(kind, tuple(inspect.signature(function).parameters) if kind != "property" else ())
    return Seam(patch, owner, own, raw)


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
                # Two patches may wrap one attribute: what the first has put there is what the second has to wrap.
                seam = resolve(seam.patch)
                wrapper = seam.make_wrapper()
                setattr(seam.owner, seam.patch.attribute, wrapper)
                self._installed.append((seam, wrapper))
        except Exception:
            self._undo()
            raise

    def uninstall(self) -> None:
        """Put back what was there, in reverse order.

        Raises:
            SeamError: somebody wrapped a target again after us; nothing is undone, because that would undo theirs too.
        """
        outermost = {(seam.owner, seam.patch.attribute): (seam, wrapper) for seam, wrapper in self._installed}
        for seam, wrapper in outermost.values():
            if vars(seam.owner).get(seam.patch.attribute) is not wrapper:
                raise SeamError(f"{seam.patch.target} was replaced after kvcanary wrapped it; undo that first")
        self._undo()

    def _undo(self) -> None:
        while self._installed:
            seam, _ = self._installed.pop()
            if seam.own is _MISSING:
                delattr(seam.owner, seam.patch.attribute)
            else:
                setattr(seam.owner, seam.patch.attribute, seam.own)
