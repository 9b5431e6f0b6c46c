"""Every kernel compiles for NVIDIA and for AMD GPUs, on a host that has neither. The interpreter does not show that."""

from __future__ import annotations

import pytest
from conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvcanary_plugin.kernels import (  # noqa: E402
    agree_triton,
    claim_triton,
    drain_triton,
    fold_triton,
    ledger_triton,
    map_triton,
    move_triton,
    plan_triton,
    poison_triton,
    scatter_triton,
    stage_triton,
    tree_triton,
    verify_triton,
    write_triton,
)

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
INT32_POINTERS = {
    "arrivals_ptr",
    "out_ptr",
    "req_to_token_ptr",
    "verify_count_ptr",
    "verify_enable_ptr",
    "write_count_ptr",
}
KERNELS = {
    "plan": (plan_triton._plan_offsets, (64,)),
    "plan of rows": (plan_triton._plan_batch, (64, True, True, True)),
    "scatter": (scatter_triton._scatter, (512, 64)),
    "write": (write_triton._write_chain, (False, True, 128, 1024, 64, 0)),
    "write, long": (write_triton._write_chain, (False, False, 1024, 1024, 64, 8192)),
    "sums of tiles": (write_triton._sum_tiles, (8192, 1024, 64)),
    "write to a companion": (write_triton._write_chain, (True, False, 32, 32, 64, 0)),
    "verify": (verify_triton._verify_prefixes, (False, 128, 64)),
    "verify a companion": (verify_triton._verify_prefixes, (True, 256, 64)),
    "verify groups": (agree_triton._verify_groups, (128, 64, 16)),
    "map": (map_triton._map, (256,)),
    "group": (map_triton._group, (256,)),
    "stage": (stage_triton._stage, (triton.language.int64, triton.language.int32, triton.language.int64, 1024)),
    "drain": (drain_triton._drain, (256,)),
    "poison": (poison_triton._poison, (256, 1, 1, 0, 16, 64)),
    "poison of bytes": (poison_triton._poison, (3, 16, 16, 0, 1, 4)),
    "fold": (fold_triton._fold, (fold_triton.OUTPUT, False, False, False, 2048, 256, 1, 1, 0, 16, 1, 128)),
    "seal, shared": (fold_triton._fold, (fold_triton.SEAL, True, True, True, 584, 73, 4, 4, 0, 4, 4, 128)),
    "delta, alloc": (ledger_triton._apply_delta, (1, 128)),
    "delta, free": (ledger_triton._apply_delta, (2, 128)),
    "delta, insert": (ledger_triton._apply_delta, (3, 256)),
    "delta, sweep": (ledger_triton._apply_delta, (9, 32)),
    "claim": (claim_triton._claim_writes, (True, 32, 64)),
    "reads": (claim_triton._check_reads, (256, 64)),
    "move, read": (move_triton._move, (False, 128)),
    "move, write": (move_triton._move, (True, 128)),
    "stamp a tree": (tree_triton._stamp_tree, (16,)),
    "stamp a wide tree": (tree_triton._stamp_tree, (128,)),
    "commit a path": (tree_triton._commit_path, (16,)),
    "scrub of bytes": (fold_triton._fold, (fold_triton.COMPARE, False, True, False, 13, 2, 3, 3, 0, 1, 2, 2)),
    "scrub of groups": (fold_triton._fold, (fold_triton.COMPARE, False, True, False, 4, 1, 128, 32, 4, 4, 64, 2)),
    "poison of groups": (poison_triton._poison, (2, 128, 32, 16, 8, 4)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name: str, target: str):
    kernel, constants = KERNELS[name]
    signature, places = {}, []
    for place, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            places.append(place)
        elif parameter.name.endswith("_ptr"):
            signature[parameter.name] = "*i32" if parameter.name in INT32_POINTERS else "*i64"
        else:
            signature[parameter.name] = "i64"
    constexprs = {(place,): value for place, value in zip(places, constants, strict=True)}
    compiled = triton.compile(ASTSource(kernel, signature, constexprs), target=TARGETS[target])
    assert compiled.metadata.target == TARGETS[target]
