from __future__ import annotations

import pytest
import torch
from kernel_cases import poisoned_violations, rows_of

from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.kernels.plan import launch_plan_offsets_kernel

SIZES = [0, 1, 2, 63, 64, 65, 1021, 1025]


@pytest.mark.parametrize("bs", SIZES)
def test_offsets(triton_backend: Backend, device: torch.device, bs: int):
    prefix, writes = (torch.randint(-2, 2**40, (bs,), generator=torch.Generator().manual_seed(bs)) for _ in range(2))
    results = []
    for backend in (REFERENCE, triton_backend):
        offsets = torch.full((2, bs + 1), -7, dtype=torch.int64, device=device)
        backend.plan_offsets(prefix.to(device), writes.to(device), verify_offsets=offsets[0], write_offsets=offsets[1])
        results.append(offsets)
    assert torch.equal(*results)


def make_arguments(bs: int, device: torch.device, capacity: int | None = None, window: int = 0) -> dict:
    generator = torch.Generator().manual_seed(bs)
    capacity = bs if capacity is None else capacity

    def out(length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((length,), -7, dtype=dtype, device=device)

    rows = torch.randint(0, 12, (bs,), generator=generator)
    for index, row in enumerate((-1, 12, 2**31 + 1, -(2**62))):
        if 3 * index < bs:
            rows[3 * index] = row
    return {
        "req_pool_indices": rows.to(device),
        "prefix_lens": torch.randint(-3, 40, (bs,), generator=generator).to(device),
        "extend_seq_lens": torch.randint(-3, 9, (bs,), generator=generator).to(device),
        "req_to_token": torch.randint(0, 99, (12, 32), generator=generator, dtype=torch.int32).to(device),
        "full_to_swa_index_mapping": torch.arange(50, device=device) * 3 if window else None,
        "out_verify_offsets_scratch": out(bs + 5),
        "out_write_offsets": out(capacity + 1),
        "out_write_seed_slot_indices": out(capacity),
        "out_verify_num_valid": out(1, torch.int32),
        "out_verify_enable": out(1, torch.int32),
        "out_write_num_valid_reqs": out(1, torch.int32),
        "swa_window_size": window,
        "verify_capacity": 10 * bs,
    }


@pytest.mark.parametrize("bs", SIZES)
@pytest.mark.parametrize(("spare", "window"), [(0, 0), (70, 9)])
def test_batches(triton_backend: Backend, device: torch.device, bs: int, spare: int, window: int):
    results = []
    for backend in (REFERENCE, triton_backend):
        arguments = make_arguments(bs, device, bs + spare, window)
        violations = poisoned_violations(4, device)
        backend.plan_batch(**arguments, violations=violations)
        results.append((arguments, violations))
    (expected, expected_rows), (found, found_rows) = results
    for name, tensor in expected.items():
        assert tensor is None or isinstance(tensor, int) or torch.equal(found[name], tensor), name
    assert rows_of(found_rows) == rows_of(expected_rows)
    assert int(found_rows.count) == min(4, -(-bs // 3))
    assert found["out_write_offsets"][0] == 0


def test_a_batch_by_hand():
    arguments = make_arguments(4, torch.device("cpu"), capacity=6)
    arguments["req_pool_indices"][:] = torch.tensor([3, 0, 7, 99])
    arguments["prefix_lens"][:] = torch.tensor([2, 5, 0, 4])
    arguments["extend_seq_lens"][:] = torch.tensor([1, 1, 6, 1])
    arguments["verify_capacity"] = 1
    launch_plan_offsets_kernel(**arguments)
    assert arguments["out_verify_offsets_scratch"].tolist() == [0, 2, 2, 2, 2, -7, -7, -7, -7]
    assert arguments["out_write_offsets"].tolist() == [0, 1, 1, 7, 7, 7, 7]
    assert arguments["out_write_seed_slot_indices"].tolist() == [int(arguments["req_to_token"][3, 1]), *[-1] * 5]
    assert [
        int(arguments[f"out_{name}"]) for name in ("verify_num_valid", "verify_enable", "write_num_valid_reqs")
    ] == [1, 0, 4]


REFUSALS = [
    ({"out_write_offsets": torch.zeros(0, dtype=torch.int64)}, "kv-canary: write_offsets_len must be positive, got 0"),
    (
        {"out_write_offsets": torch.zeros(4, dtype=torch.int64)},
        "kv-canary: write_offsets_len must equal write_req_capacity + 1, got 4 and 4",
    ),
    (
        {
            "out_write_offsets": torch.zeros(3, dtype=torch.int64),
            "out_write_seed_slot_indices": torch.zeros(2, dtype=torch.int64),
        },
        "kv-canary: bs=4 exceeds write_req_capacity=2",
    ),
    (
        {"req_to_token_stride0": 31},
        "kv-canary: req_to_token_stride0=31 does not match req_to_token.stride(0)=32",
    ),
    ({"req_to_token_stride0": 0}, "kv-canary: req_to_token_stride0 must be positive, got 0"),
    ({"verify_capacity": -1}, "kv-canary: verify_capacity must be non-negative, got -1"),
    ({"swa_window_size": 4}, "kv-canary: full_to_swa_index_mapping is required when swa_window_size > 0"),
    ({"bs": 3}, "kv-canary: req_pool_indices length must be 3, got 4"),
    ({"prefix_lens": torch.zeros(5, dtype=torch.int64)}, "kv-canary: prefix_lens length must be 4, got 5"),
    ({"prefix_lens": torch.zeros(4, 1, dtype=torch.int64)}, "kv-canary: prefix_lens must be 1-D, got shape (4, 1)"),
    (
        {"prefix_lens": torch.zeros(8, dtype=torch.int64)[::2]},
        "kv-canary: prefix_lens must be contiguous, got strides (2,)",
    ),
    (
        {"extend_seq_lens": torch.zeros(4, dtype=torch.int32)},
        "kv-canary: extend_seq_lens must have dtype torch.int64, got torch.int32",
    ),
    ({"req_to_token": torch.zeros(4, dtype=torch.int32)}, "kv-canary: req_to_token must be 2-D, got shape (4,)"),
    (
        {"out_verify_offsets_scratch": torch.zeros(4, dtype=torch.int64)},
        "kv-canary: out_verify_offsets_scratch length must be >= 5, got 4",
    ),
    ({"out_verify_enable": torch.zeros(2, dtype=torch.int32)}, "kv-canary: out_verify_enable length must be 1, got 2"),
    (
        {"prefix_lens": torch.zeros(4, dtype=torch.int64, device="meta")},
        "kv-canary: prefix_lens must be on out_verify_offsets_scratch's device cpu, got meta",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message[11:50] for _, message in REFUSALS])
def test_refusals(change: dict, message: str):
    arguments = make_arguments(4, torch.device("cpu"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        launch_plan_offsets_kernel(**{**arguments, **change})
    assert str(caught.value) == message


def test_a_capacity_that_is_no_int():
    with pytest.raises(TypeError, match="verify_capacity must be an int, got float"):
        launch_plan_offsets_kernel(**{**make_arguments(4, torch.device("cpu")), "verify_capacity": 1.5})


@pytest.mark.gpu
def test_launch_on_a_gpu():
    arguments = make_arguments(5000, torch.device("cuda"))
    expected = make_arguments(5000, torch.device("cpu"))
    launch_plan_offsets_kernel(**arguments)
    launch_plan_offsets_kernel(**expected)
    assert torch.equal(arguments["out_write_offsets"].cpu(), expected["out_write_offsets"])
    assert torch.equal(arguments["out_write_seed_slot_indices"].cpu(), expected["out_write_seed_slot_indices"])
