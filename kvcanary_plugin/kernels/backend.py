"""The one place that picks the implementation of the kernels, by device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import (
    agree_reference,
    drain_numpy,
    drain_reference,
    fold_numpy,
    fold_reference,
    ledger_numpy,
    ledger_reference,
    map_reference,
    move_reference,
    order_reference,
    plan_numpy,
    plan_reference,
    poison_numpy,
    poison_reference,
    scatter_reference,
    scrub_numpy,
    scrub_reference,
    stage_numpy,
    stage_reference,
    tree_reference,
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
    stage_batch: Callable[..., None]
    drain: Callable[..., None]
    apply_delta: Callable[..., None]
    claim_writes: Callable[..., None]
    check_reads: Callable[..., None]
    scatter_req_token_ids: Callable[..., None]
    verify_prefixes: Callable[..., None]
    verify_groups: Callable[..., None]
    write_chain: Callable[..., None]
    fold_slots: Callable[..., None]
    seal_slots: Callable[..., None]
    check_slots: Callable[..., None]
    scrub_range: Callable[..., None]
    seal_and_scrub: Callable[..., None]
    poison_slots: Callable[..., None]
    map_slots: Callable[..., None]
    group_slots: Callable[..., None]
    check_order: Callable[..., None]
    stamp_tree: Callable[..., None]
    commit_path: Callable[..., None]
    move_records: Callable[..., None]


REFERENCE = Backend(
    "torch",
    plan_offsets=plan_reference.plan_offsets,
    plan_batch=plan_reference.plan_batch,
    stage_batch=stage_reference.stage_batch,
    drain=drain_reference.drain,
    apply_delta=ledger_reference.apply_delta,
    claim_writes=ledger_reference.claim_writes,
    check_reads=ledger_reference.check_reads,
    scatter_req_token_ids=scatter_reference.scatter_req_token_ids,
    verify_prefixes=verify_reference.verify_prefixes,
    verify_groups=agree_reference.verify_groups,
    write_chain=write_reference.write_chain,
    fold_slots=fold_reference.fold_slots,
    seal_slots=fold_reference.seal_slots,
    check_slots=scrub_reference.check_slots,
    scrub_range=scrub_reference.scrub_range,
    seal_and_scrub=scrub_reference.seal_and_scrub,
    poison_slots=poison_reference.poison_slots,
    map_slots=map_reference.map_slots,
    group_slots=map_reference.group_slots,
    check_order=order_reference.check_order,
    stamp_tree=tree_reference.stamp_tree,
    commit_path=tree_reference.commit_path,
    move_records=move_reference.move_records,
)


# On a CPU numpy does the work of a decode step; what is rare stays with the references.
NUMPY = dataclasses.replace(
    REFERENCE,
    name="numpy",
    plan_offsets=plan_numpy.plan_offsets,
    stage_batch=stage_numpy.stage_batch,
    drain=drain_numpy.drain,
    apply_delta=ledger_numpy.apply_delta,
    claim_writes=ledger_numpy.claim_writes,
    check_reads=ledger_numpy.check_reads,
    verify_prefixes=verify_numpy.verify_prefixes,
    write_chain=write_numpy.write_chain,
    fold_slots=fold_numpy.fold_slots,
    seal_slots=fold_numpy.seal_slots,
    check_slots=scrub_numpy.check_slots,
    scrub_range=scrub_numpy.scrub_range,
    seal_and_scrub=scrub_numpy.seal_and_scrub,
    poison_slots=poison_numpy.poison_slots,
)


@functools.cache
def load_triton() -> Backend:
    """The Triton backend. Imported on demand: a host without a GPU may have no Triton, and needs none."""
    from . import (
        agree_triton,
        claim_triton,
        drain_triton,
        fold_triton,
        ledger_triton,
        map_triton,
        move_triton,
        order_triton,
        plan_triton,
        poison_triton,
        scatter_triton,
        scrub_triton,
        stage_triton,
        tree_triton,
        verify_triton,
        write_triton,
    )

    return Backend(
        "triton",
        plan_offsets=plan_triton.plan_offsets,
        plan_batch=plan_triton.plan_batch,
        stage_batch=stage_triton.stage_batch,
        drain=drain_triton.drain,
        apply_delta=ledger_triton.apply_delta,
        claim_writes=claim_triton.claim_writes,
        check_reads=claim_triton.check_reads,
        scatter_req_token_ids=scatter_triton.scatter_req_token_ids,
        verify_prefixes=verify_triton.verify_prefixes,
        verify_groups=agree_triton.verify_groups,
        write_chain=write_triton.write_chain,
        fold_slots=fold_triton.fold_slots,
        seal_slots=fold_triton.seal_slots,
        check_slots=scrub_triton.check_slots,
        scrub_range=scrub_triton.scrub_range,
        seal_and_scrub=scrub_triton.seal_and_scrub,
        poison_slots=poison_triton.poison_slots,
        map_slots=map_triton.map_slots,
        group_slots=map_triton.group_slots,
        check_order=order_triton.check_order,
        stamp_tree=tree_triton.stamp_tree,
        commit_path=tree_triton.commit_path,
        move_records=move_triton.move_records,
    )


def pick_backend(device: torch.device | str) -> Backend:
    """The backend for tensors on ``device``: Triton where it compiles for it, numpy on a CPU, torch everywhere else."""
    kind = torch.device(device).type
    if kind in TRITON_DEVICES:
        return load_triton()
    return NUMPY if kind == "cpu" else REFERENCE
