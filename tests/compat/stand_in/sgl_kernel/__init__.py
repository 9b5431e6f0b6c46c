"""Stands in for SGLang's compiled kernels where they cannot be imported: every name exists, none can be called.

The published kernels of the newer releases load a CUDA driver when they are imported, and SGLang imports them on a CPU
too, where a plain server calls none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Absent:
    """A kernel, or a constant of one, that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(f"{self._name} is a stand-in and has no {name}")
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} was called, and this environment has no compiled kernels")


class AbsentModule(ModuleType):
    """A submodule in which every name is absent."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class AbsentFinder(MetaPathFinder, Loader):
    """Finds every submodule of this package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(AbsentFinder())
sys.modules[__name__].__class__ = AbsentModule
