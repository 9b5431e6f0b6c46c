from __future__ import annotations

import pytest
import torch
from kernel_cases import make_offsets

from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.kernels.scatter import scatter_req_token_ids


def make_case(lengths: list[int], device: torch.device, *, apart: int = 0):
    generator = torch.Generator().manual_seed(len(lengths))
    rows, width = len(lengths) + 3, max([*lengths, 1]) + 2
    out = torch.full((rows, width + apart), -9, dtype=torch.int32, device=device)[:, :width]
    flat = torch.randint(-(2**62), 2**62, (sum(lengths),), generator=generator).to(device)
    targets = torch.randperm(rows, generator=generator)[: len(lengths)].to(device)
    return flat, make_offsets(lengths, device), targets, out


@pytest.mark.parametrize("apart", [0, 5])
@pytest.mark.parametrize("lengths", [[1], [511], [512], [513], [0, 4, 0, 700, 1], [1] * 600, [0, 0]], ids=len)
def test_equals_the_reference(triton_backend: Backend, device: torch.device, lengths: list[int], apart: int):
    results = []
    for backend in (REFERENCE, triton_backend):
        flat, offsets, rows, out = make_case(lengths, device, apart=apart)
        backend.scatter_req_token_ids(flat, offsets, rows, out)
        results.append(out)
    assert torch.equal(*results)


def test_what_may_not_be_followed_is_left_out(triton_backend: Backend, device: torch.device):
    """On a GPU nobody waits for values: a span that is out of bounds is left out as a whole."""
    flat = torch.arange(12, device=device)

    def scatter(offsets: list[int], rows: list[int]) -> torch.Tensor:
        out = torch.full((3, 4), -9, dtype=torch.int32, device=device)
        triton_backend.scatter_req_token_ids(
            flat, torch.tensor(offsets, device=device), torch.tensor(rows, device=device), out
        )
        return out

    assert scatter([0, 2, 4, 6], [-1, 1, 3])[[0, 2]].eq(-9).all()
    assert scatter([0, 2, 4, 6], [2**40, 1, -(2**63)])[1].tolist() == [2, 3, -9, -9]
    assert scatter([0, 5, 7], [0, 1]).tolist()[:2] == [[-9] * 4, [5, 6, -9, -9]]
    for offsets in ([0, 2**62, 7], [-(2**40), 3, 4], [6, 2, 12], [0, 4, 2**40]):
        scatter(offsets, [0, 1])  # must not touch anything outside: a memory checker watches


def test_entry_point_by_hand():
    flat, offsets, rows, out = make_case([2, 0, 3], torch.device("cpu"))
    scatter_req_token_ids(flat, offsets, rows, out)
    assert out[rows[0], :3].tolist() == [*flat[:2].to(torch.int32).tolist(), -9]
    assert out[rows[2], :3].tolist() == flat[2:].to(torch.int32).tolist()


WRONG_DTYPES = [("flat_in", 0, torch.int32, "int64"), ("offsets", 1, torch.int32, "int64"),
                ("req_pool_indices", 2, torch.int32, "int64"), ("pool_out", 3, torch.int64, "int32")]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "dtype", "wanted"), WRONG_DTYPES)
def test_wrong_dtypes(name: str, place: int, dtype: torch.dtype, wanted: str):
    arguments = list(make_case([2, 3], torch.device("cpu")))
    arguments[place] = arguments[place].to(dtype)
    with pytest.raises(TypeError, match=f"kv-canary: scatter_req_token_ids {name} must be {wanted}, got {dtype}"):
        scatter_req_token_ids(*arguments)


REFUSALS = [
    (1, [0, 2], r"offsets length 2 != bs\+1 \(3\)"),
    (1, [0, 3, 2], "offsets must be non-decreasing, got"),
    (1, [1, 2, 5], "offsets must run from 0 to the length of flat_in"),
    (1, [0, 2, 4], "offsets must run from 0 to the length of flat_in"),
    (2, [0, 5], r"req_pool_indices must lie within \[0, 5\)"),
    (2, [-1, 0], r"req_pool_indices must lie within \[0, 5\)"),
    (3, None, r"a span of 3 ids is longer than a row of pool_out \(2\)"),
]


@pytest.mark.parametrize(("place", "values", "message"), REFUSALS)
def test_refusals(place: int, values: list[int] | None, message: str):
    arguments = list(make_case([2, 3], torch.device("cpu")))
    arguments[place] = arguments[3][:, :2] if values is None else torch.tensor(values)
    before = arguments[3].clone()
    with pytest.raises(ValueError, match=message):
        scatter_req_token_ids(*arguments)
    assert torch.equal(arguments[3], before)


def test_wrong_dimensions_and_strides():
    flat, offsets, rows, out = make_case([2, 3], torch.device("cpu"))
    with pytest.raises(ValueError, match="flat_in must be 1-D"):
        scatter_req_token_ids(flat[None], offsets, rows, out)
    with pytest.raises(ValueError, match="pool_out must be 2-D"):
        scatter_req_token_ids(flat, offsets, rows, out[0])
    with pytest.raises(ValueError, match="pool_out must be contiguous in its last dimension"):
        scatter_req_token_ids(flat, offsets, rows, out.t())


def test_no_limit_on_the_batch():
    bs = 5000
    flat, offsets, rows, out = make_case([1] * bs, torch.device("cpu"))
    scatter_req_token_ids(flat, offsets, rows, out)
    assert torch.equal(out[rows, 0], flat.to(torch.int32))
