from __future__ import annotations

import pytest
import torch
from kernel_cases import random_words

from kvcanary_plugin.kernels.backend import NUMPY, REFERENCE, Backend
from kvcanary_plugin.kernels.record import HEADER_WORDS, Header

kept = []  # tensors that only an address refers to
POISON = -0x5A5A5A5A5A5A5A5B


def stage(backend: Backend, device: torch.device, bs: int, written: int, room: int, dtype: torch.dtype):
    words = HEADER_WORDS + 6 * room + 2
    block, tokens, slots, rows = (
        torch.full((n,), POISON, device=device) for n in (words, max(written, room), max(written, room), max(bs, room))
    )
    source = random_words(words, device=torch.device("cpu"), seed=1)
    generator = torch.Generator().manual_seed(written)
    ids, places, indices = (
        torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator).to(device, dtype) for n in (written, written, bs)
    )
    source[Header.REQUESTS], source[Header.WRITTEN] = bs, written
    source[Header.INPUT_IDS], source[Header.OUT_CACHE_LOC] = ids.data_ptr(), places.data_ptr()
    source[Header.REQ_POOL_INDICES] = indices.data_ptr()
    kept.append((ids, places, indices))
    backend.stage_batch(
        source=source.pin_memory() if device.type == "cuda" else source,
        block=block,
        input_ids=ids,
        out_cache_loc=places,
        req_pool_indices=indices,
        tokens=tokens,
        slots=slots,
        rows=rows,
    )
    return block, tokens, slots, rows


CASES = [(0, 0, 0), (1, 1, 1), (3, 3, 4), (5, 4099, 5), (64, 64, 64), (65, 65, 128), (1, 1023, 1), (300, 2049, 300)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(triton_backend: Backend, device: torch.device, case, dtype):
    found, expected = stage(triton_backend, device, *case, dtype), stage(REFERENCE, device, *case, dtype)
    assert torch.equal(found[0][HEADER_WORDS:], expected[0][HEADER_WORDS:])
    for mine, reference in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", CASES)
def test_numpy_equals_the_reference(case, dtype):
    device = torch.device("cpu")
    found, expected = stage(NUMPY, device, *case, dtype), stage(REFERENCE, device, *case, dtype)
    assert torch.equal(found[0][HEADER_WORDS:], expected[0][HEADER_WORDS:])
    for mine, reference in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("backend", [NUMPY, REFERENCE], ids=["numpy", "torch"])
def test_on_a_cpu_the_block_is_its_own_source(backend: Backend):
    block = random_words(10, device=torch.device("cpu"), seed=3)
    before, ids = block.clone(), torch.tensor([7])
    tokens, slots, rows = (torch.full((1,), POISON) for _ in range(3))
    backend.stage_batch(
        source=block,
        block=block,
        input_ids=ids,
        out_cache_loc=ids + 1,
        req_pool_indices=ids + 2,
        tokens=tokens,
        slots=slots,
        rows=rows,
    )
    assert torch.equal(block, before)
    assert (tokens.item(), slots.item(), rows.item()) == (7, 8, 9)


@pytest.mark.parametrize("backend", [NUMPY, REFERENCE], ids=["numpy", "torch"])
def test_padding_is_no_slot_and_no_row(backend: Backend):
    _, tokens, slots, rows = stage(backend, torch.device("cpu"), 3, 3, 8, torch.int64)
    assert tokens[3:].tolist() == [0] * 5
    assert slots[3:].tolist() == [-1] * 5
    assert rows[3:].tolist() == [0] * 5
