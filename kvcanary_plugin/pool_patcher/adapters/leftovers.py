"""Buffers of a pool that no source reads: what makes the difference between covered and believed to be covered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...errors import UncoveredError
from .draft import PoolDraft

# Tables of numbers that say where things are, not what they are; and scratch that is written before it is read in
# every forward. Matched against the last attribute of a path.
_TABLES = re.compile(r"(data_ptrs|data_strides|mapping|write_pos|req_to_token|valid_from|req_generation|free_slots)$")
_SCRATCH = re.compile(r"(dq_[kv]_buffer|hicache_write_back_staging|intermediate_\w+|pending_seq_lens|global_scale)$")
_OPAQUE = ("torch", "builtins", "threading", "collections", "logging", "enum")
_SMALL_BYTES = 4096
_DEPTH = 6


def refuse_leftovers(roots: Iterable[tuple[str, Any]], draft: PoolDraft) -> None:
    """Look through everything that hangs on a pool for tensors that could hold something for every slot.

    Args:
        roots: what it is called in the message, and SGLang's object: the pool, and the request table where states are
            covered.
        draft: what the adapter found.

    Raises:
        UncoveredError: there is such a tensor outside all sources.
    """
    read = {_address(part.rows) for part in draft.parts()}
    limit = min(draft.main.slot_count, _SMALL_BYTES)
    for what, root in roots:
        for path, tensor in find_tensors(root):
            name = path.split(".")[-1].split("[")[0]
            if tensor.nbytes < limit or _address(tensor) in read or _TABLES.search(name) or _SCRATCH.search(name):
                continue
            if any(step.split("[")[0] in draft.unchecked for step in path.split(".")):
                continue
            raise UncoveredError(
                f"{what} {type(root).__name__} has buffer {path} of shape {tuple(tensor.shape)} that is not covered"
            )


def find_tensors(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Paths and tensors of all attributes of ``root``, through containers and through objects of the same packages."""
    packages = {"sglang", type(root).__module__.split(".")[0]}
    yield from _walk(root, "", packages, {id(root)}, _DEPTH)


def _walk(value: Any, path: str, packages: set[str], seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    for step, child in _children(value, packages):
        where = f"{path}{step}" if step.startswith("[") or not path else f"{path}.{step}"
        if isinstance(child, torch.Tensor):
            yield where, child
        elif depth and id(child) not in seen:
            seen.add(id(child))
            yield from _walk(child, where, packages, seen, depth - 1)


def _children(value: Any, packages: set[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif type(value).__module__.split(".")[0] in packages - set(_OPAQUE) and not isinstance(value, type):
        yield from vars(value).items() if hasattr(value, "__dict__") else ()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
