"""Launch Triton kernels for less host time than ``kernel[grid](...)`` takes.

That call binds, specialises and looks up anew each time. Here the compiled kernel is kept per set of constants and
dtypes. That is sound because no run-time argument is specialised: integers are declared 64-bit and pointers are not
assumed aligned.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

_CONSTANT = "tl.constexpr"

_compiled: dict[tuple[Any, ...], Any] = {}
_compiling = threading.Lock()
_compiling_thread = 0  # whose launches are compiled only; no thread has this number


def jit(function: Callable[..., None]) -> Any:
    """``triton.jit`` that specialises nothing but the parameters declared ``tl.constexpr``."""
    parameters = inspect.signature(function).parameters.values()
    runtime = [parameter.name for parameter in parameters if parameter.annotation != _CONSTANT]
    return triton.jit(do_not_specialize=runtime)(function)


def launch(
    kernel: Any,
    programs: int,
    arguments: Sequence[Any],
    constants: tuple[Any, ...],
    *,
    device: torch.device,
    warps: int = 4,
) -> None:
    """Run ``programs`` instances of a kernel on the current stream of ``device``, which must be the current device.

    Args:
        kernel: function under :func:`jit`, its integers declared ``tl.int64``.
        programs: size of the one-dimensional grid.
        arguments: run-time arguments, in order.
        constants: the constexpr parameters that follow them, in order.
        warps: per program.
    """
    if not isinstance(kernel, JITFunction):  # interpreted, or wrapped by a tool
        kernel[(programs,)](*arguments, *constants, num_warps=warps)
        return
    if is_compiling_only():
        kernel.warmup(*arguments, *constants, grid=(programs,), num_warps=warps)
        return
    key = (kernel, constants, device.index, warps, *[a.dtype for a in arguments if type(a) is not int])
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*arguments, *constants, num_warps=warps)
        return
    # Addresses rather than tensors: the launcher would ask the driver about each tensor's memory.
    compiled[programs, 1, 1](*[a if type(a) is int else a.data_ptr() for a in arguments], *constants)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within it, what this thread launches is compiled and not run: nothing on the device changes."""
    global _compiling_thread
    with _compiling:
        _compiling_thread = threading.get_ident()
        try:
            yield
        finally:
            _compiling_thread = 0


def is_compiling_only() -> bool:
    """Whether this thread's launches are compiled and not run."""
    return _compiling_thread != 0 and threading.get_ident() == _compiling_thread


def block_of(count: int, least: int, most: int) -> int:
    """The power of two that holds ``count``, within bounds that are powers of two."""
    return min(most, max(least, 1 << (count - 1).bit_length())) if count > 0 else least
