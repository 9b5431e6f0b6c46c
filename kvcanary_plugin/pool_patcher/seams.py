"""Compares declared seams with the source text of an SGLang, without importing it.

So ``kvcanary doctor`` sees attributes that only exist once a server runs, a test sees every release in its published
wheel, and a server of a release nobody has looked at is refused before it loads a model.
"""

from __future__ import annotations

import ast
import importlib.util
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from ..errors import SeamError
from .patch import Field, Patch

Folder = Path | zipfile.Path
Class = tuple[str, ast.ClassDef]  # the module it is defined in, and its definition


class SourceTree:
    """The modules of one SGLang as syntax trees. ``root`` is the folder that holds ``sglang``."""

    def __init__(self, root: Folder) -> None:
        self._root = root
        self._modules: dict[str, ast.Module | None] = {}

    @classmethod
    def installed(cls) -> SourceTree:
        """The SGLang of this environment.

        Raises:
            SeamError: there is none.
        """
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise SeamError("kvcanary: sglang is not installed in this environment; kvcanary is a plugin of it")
        return cls(Path(spec.submodule_search_locations[0]).parent)

    def find_module(self, module: str) -> ast.Module | None:
        """The syntax tree of a module, None if there is no such file."""
        if module not in self._modules:
            path = module.replace(".", "/")
            files = [file for file in (self._root / f"{path}.py", self._root / f"{path}/__init__.py") if file.is_file()]
            self._modules[module] = ast.parse(files[0].read_text("utf-8")) if files else None
        return self._modules[module]

    def find_class(self, module: str, name: str) -> Class | None:
        """A class of that name in ``module``, or where ``module`` imports it from."""
        tree = self.find_module(module)
        statements = list(_top_level(tree)) if tree is not None else []
        for node in statements:  # ahead of imports: a module may import its own class for the type checker
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
        for node in statements:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find_class(str(node.module), alias.name)
        return None

    def lineage(self, found: Class) -> Iterator[Class]:
        """The class and its bases as far as they are SGLang's own, nearest first."""
        yield found
        module, definition = found
        for base in definition.bases:
            if isinstance(base, ast.Name) and (parent := self.find_class(module, base.id)):
                yield from self.lineage(parent)

    def check_patch(self, patch: Patch) -> list[str]:
        """Everything about ``patch`` that is not as declared, one line each; empty if it holds."""
        try:
            self._check_target(patch)
            drifted = []
        except SeamError as error:
            drifted = [str(error)]
        return drifted + self.list_missing(patch)

    def list_missing(self, patch: Patch) -> list[str]:
        """What the wrapper of ``patch`` reads and is not there, one line each."""
        return [
            f"{field.target} is missing, which the wrapper of {patch.owner}.{patch.attribute} reads"
            for field in patch.reads
            if not self.has(field)
        ]

    def _check_target(self, patch: Patch) -> None:
        found = self.find_class(patch.module, patch.owner)
        if found is None:
            what = "no such module" if self.find_module(patch.module) is None else f"no class {patch.owner}"
            raise SeamError(f"{patch.target} is missing: {what}")
        for _, definition in self.lineage(found):
            for node in definition.body:
                if isinstance(node, ast.FunctionDef) and node.name == patch.attribute:
                    return patch.check(_kind_of(node), _parameters_of(node))
        raise SeamError(f"{patch.target} is missing: {patch.owner} has no method {patch.attribute!r}")

    def has(self, field: Field) -> bool:
        """Whether the field is defined, annotated, or assigned in a method of the class or of one of its bases."""
        if field.owner is None:
            tree = self.find_module(field.module)
            return tree is not None and field.name in _names_bound_by(_top_level(tree))
        found = self.find_class(field.module, field.owner)
        if found is None:
            return False
        return any(
            field.name in _names_bound_by(definition.body) or field.name in _assigned_to_self(definition)
            for _, definition in self.lineage(found)
        )

    def list_subclasses(self, package: str, base: tuple[str, str]) -> list[str]:
        """Names of the classes in the modules of ``package`` that descend from ``base``, a module and a class."""
        names = set()
        for module in self._modules_in(package):
            for node in _top_level(cast(ast.Module, self.find_module(module))):
                if isinstance(node, ast.ClassDef) and (module, node.name) != base:
                    lineage = self.lineage((module, node))
                    if any((where, ancestor.name) == base for where, ancestor in lineage):
                        names.add(node.name)
        return sorted(names)

    def _modules_in(self, package: str) -> Iterator[str]:
        for entry in (self._root / package.replace(".", "/")).iterdir():
            if entry.name.endswith(".py") and entry.name != "__init__.py":
                yield f"{package}.{entry.name.removesuffix('.py')}"

    def methods_of(self, module: str, owner: str) -> set[str]:
        """Names of all methods of a class, inherited ones included."""
        found = self.find_class(module, owner)
        return {
            node.name
            for _, definition in (self.lineage(found) if found is not None else ())
            for node in definition.body
            if isinstance(node, ast.FunctionDef)
        }


def check_seams(tree: SourceTree, patches: Iterable[Patch], version: str) -> list[str]:
    """Everything that is not as declared among the patches for SGLang ``version``."""
    return [line for patch in patches if patch.applies_to(version) for line in tree.check_patch(patch)]


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module, those under ``if`` and ``try`` included."""
    pending = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            pending = [*node.body, *(s for h in getattr(node, "handlers", ()) for s in h.body), *node.orelse, *pending]


def _kind_of(node: ast.FunctionDef) -> str:
    names = {d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in node.decorator_list}
    return next((kind for kind in ("staticmethod", "classmethod", "property") if kind in names), "method")


def _parameters_of(node: ast.FunctionDef) -> tuple[str, ...]:
    arguments = node.args
    variadic = [arguments.vararg] if arguments.vararg is not None else []
    return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *variadic, *arguments.kwonlyargs))


def _names_bound_by(body: Iterable[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names.update(alias.asname or alias.name for alias in node.names)
        else:
            names.update(target.id for target in _targets_of(node) if isinstance(target, ast.Name))
    return names


def _assigned_to_self(definition: ast.ClassDef) -> set[str]:
    return {
        target.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.stmt)
        for target in _targets_of(node)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def _targets_of(node: ast.stmt) -> Iterator[ast.expr]:
    pending: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        pending = list(node.targets)
    elif isinstance(node, ast.AnnAssign):
        pending = [node.target]
    while pending:
        target = pending.pop()
        if isinstance(target, ast.Tuple | ast.List):
            pending += target.elts
        else:
            yield target
