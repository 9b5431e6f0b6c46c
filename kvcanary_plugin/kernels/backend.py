"""The one place that picks the implementation of the kernels, by device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import (
    fold_numpy,
    fold_reference,
    plan_numpy,
    plan_reference,
    scatter_reference,
    scrub_numpy,
    scrub_reference,
    verify_numpy,
    verify_reference,
    write_numpy,
    write_reference,
)

TRITON_DEVICES = ("cuda", "xpu")  # HIP devices call themselves cuda, too


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations the guard launches. Their references document arguments and shapes."""

    name: str
    plan_offsets: Callable[..., None]
    plan_batch: Callable[..., None]
    scatter_req_token_ids: Callable[..., None]
    verify_prefixes: Callable[..., None]
    write_chain: Callable[..., None]
    fold_slots: Callable[..., None]
    seal_slots: Callable[..., None]
    check_slots: Callable[..., None]
    scrub_range: Callable[..., None]
    seal_and_scrub: Callable[..., None]


REFERENCE = Backend(
    "torch",
    plan_offsets=plan_reference.plan_offsets,
    plan_batch=plan_reference.plan_batch,
    scatter_req_token_ids=scatter_reference.scatter_req_token_ids,
    verify_prefixes=verify_reference.verify_prefixes,
    write_chain=write_reference.write_chain,
    fold_slots=fold_reference.fold_slots,
    seal_slots=fold_reference.seal_slots,
    check_slots=scrub_reference.check_slots,
    scrub_range=scrub_reference.scrub_range,
    seal_and_scrub=scrub_reference.seal_and_scrub,
)


# On a CPU numpy does the work of a decode step; what is rare stays with the references.
NUMPY = dataclasses.replace(
    REFERENCE,
    name="numpy",
    plan_offsets=plan_numpy.plan_offsets,
    verify_prefixes=verify_numpy.verify_prefixes,
    write_chain=write_numpy.write_chain,
    fold_slots=fold_numpy.fold_slots,
    seal_slots=fold_numpy.seal_slots,
    check_slots=scrub_numpy.check_slots,
    scrub_range=scrub_numpy.scrub_range,
    seal_and_scrub=scrub_numpy.seal_and_scrub,
)


@functools.cache
def load_triton() -> Backend:
    """The Triton backend. Imported on demand: a host without a GPU may have no Triton, and needs none."""
    from . import fold_triton, plan_triton, scatter_triton, scrub_triton, verify_triton, write_triton

    return Backend(
        "triton",
        plan_offsets=plan_triton.plan_offsets,
        plan_batch=plan_triton.plan_batch,
        scatter_req_token_ids=scatter_triton.scatter_req_token_ids,
        verify_prefixes=verify_triton.verify_prefixes,
        write_chain=write_triton.write_chain,
        fold_slots=fold_triton.fold_slots,
        seal_slots=fold_triton.seal_slots,
        check_slots=scrub_triton.check_slots,
        scrub_range=scrub_triton.scrub_range,
        seal_and_scrub=scrub_triton.seal_and_scrub,
    )


def pick_backend(device: torch.device | str) -> Backend:
    """The backend for tensors on ``device``: Triton where it compiles for it, numpy on a CPU, torch everywhere else."""
    kind = torch.device(device).type
    if kind in TRITON_DEVICES:
        return load_triton()
    return NUMPY if kind == "cpu" else REFERENCE
