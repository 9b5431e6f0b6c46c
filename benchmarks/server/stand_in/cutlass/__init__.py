"""Stands in for the DSL of nvidia-cutlass-dsl on a host that lacks it, so that SGLang's model of DeepSeek V2 imports.

SGLang imports kernels for sparse attention with it, which the shape that is measured here never calls. Any name of any
module below ``cutlass`` is there; as a decorator it leaves a function or class as it was, and otherwise it is nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any


class Nothing:
    """What every name is: can be called, looked into, and stand in an annotation."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], FunctionType | type):
            return args[0]
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__


NOTHING = Nothing()
# What those kernels import beside; this finder is the last one, so that it stands in only for what is not installed.
BESIDE = ("cuda", "cuda.bindings", "cuda.bindings.driver")


class _Module(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NOTHING


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}.") and fullname not in BESIDE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return NOTHING


sys.meta_path.append(_Finder())
