"""Fixed vectors, computed with plain Python integers: the arithmetic may never change, stored digests depend on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcanary_plugin.kernels import mixing
from kvcanary_plugin.kernels import record as r
from kvcanary_plugin.kernels.backend import REFERENCE, Backend
from kvcanary_plugin.kernels.mixing import as_int64
from kvcanary_plugin.kernels.violations import ViolationBuffer
from kvcanary_plugin.pool_patcher.sources import SourceTable, make_row_source

MIX = {
    0x0000000000000000: 0x0000000000000000,
    0x0000000000000001: 0x5692161D100B05E5,
    0x0000000000000002: 0xDBD238973A2B148A,
    0x0000000000000080: 0xAF26563F2EC4C8E6,
    0x8000000000000000: 0x25C26EA579CEA98A,
    0xFFFFFFFFFFFFFFFF: 0xB4D055FCF2CBBD7B,
    0x0123456789ABCDEF: 0xB2C058E4EBB5112C,
}
KEYS = {
    (0, 0): 0x693D55F63D77813C,
    (0, 1): 0x8D17856AC411F788,
    (1, 0): 0x7605814DEB6C746B,
    (63, 255): 0xC3C5D48FE7F53702,
}
ANCHOR = 0xFEEDFACE12345678
TOKENS = [1, 128000, 0, 4294967295, 77]
CHAIN = [0x558010EB223F5C5D, 0xA4565AAC0EE08759, 0x5497CA7C304279D7, 0xAB036E1ABC6AE885, 0xFAC866AD031F47C0]
# Rows of each source, digest, locator.
FOLDS = [
    ([bytes(32)], 0xDEFE701FD71DED30, 0xDEFE701FD71DED30),
    ([b"\xff" * 32], 0x3D5981EEFEA8637A, 0x3D5981EEFEA8637A),
    ([b"\x80" * 32], 0xD16702AA3FF87E7F, 0xD16702AA3FF87E7F),
    ([b"\x01" * 32], 0x3D1E96BFA5B5A180, 0x3D1E96BFA5B5A180),
    ([(1).to_bytes(8, "little") * 4], 0x2D9A89C9871DA3F3, 0x2D9A89C9871DA3F3),
    ([(0x80).to_bytes(8, "little") * 4], 0x785F27D9DA5219E4, 0x785F27D9DA5219E4),
    ([b"\x01\x02\x03\x04"], 0xAF12C18879CF1088, 0xAF12C18879CF1088),
    ([bytes(range(13)), bytes(range(100, 113))], 0x154A1960B1AEC47B, 0x5089335F579CBA47),
    (
        [bytes((i * factor + more) % 256 for i in range(584)) for factor, more in ((7, 3), (5, 1), (3, 2))],
        0x57B74FD3DE7617B9,
        0x0DAE4885E9230E49,
    ),
]


def signed(values: list[int]) -> list[int]:
    return [as_int64(value) for value in values]


def make_constant_table(rows: list[bytes], device: torch.device) -> SourceTable:
    """Slot 1 holds the given rows, slots 0 and 2 something else."""
    named = []
    for row in rows:
        buffer = torch.stack(
            [torch.tensor(list(content), dtype=torch.uint8) for content in (row[::-1], row, row[::-1])]
        )
        named.append(((0, "K"), make_row_source(layer_buffer=buffer.to(device), read_bytes=len(row))[0]))
    return SourceTable(named, 3, device)


def test_mix():
    words = np.array(list(MIX), dtype=np.uint64)
    assert [mixing.mix_int(word) for word in MIX] == list(MIX.values())
    assert mixing.mix_array(words).tolist() == list(MIX.values())
    assert mixing.mix(torch.from_numpy(words.view(np.int64))).tolist() == signed(list(MIX.values()))


def test_keys():
    keys = mixing.make_keys(64, 256, "cpu")
    assert {place: int(keys[place]) for place in KEYS} == dict(zip(KEYS, signed(list(KEYS.values())), strict=True))


def test_constant_rows_differ():
    assert len({digest for _, digest, _ in FOLDS}) == len(FOLDS)


@pytest.mark.parametrize("case", range(len(FOLDS)))
def test_reference_fold(case: int):
    check_fold(REFERENCE, torch.device("cpu"), case)


@pytest.mark.parametrize("case", range(len(FOLDS)))
def test_triton_fold(triton_backend: Backend, device: torch.device, case: int):
    check_fold(triton_backend, device, case)


def check_fold(backend: Backend, device: torch.device, case: int) -> None:
    rows, digest, locator = FOLDS[case]
    sums = torch.full((2, 1), -1, dtype=torch.int64, device=device)
    slots = torch.tensor([1], device=device)
    backend.fold_slots(make_constant_table(rows, device), slots, digest=sums[0], locator=sums[1])
    assert sums.flatten().tolist() == signed([digest, locator])


def test_reference_chain():
    check_chain(REFERENCE, torch.device("cpu"))


def test_triton_chain(triton_backend: Backend, device: torch.device):
    check_chain(triton_backend, device)


def check_chain(backend: Backend, device: torch.device) -> None:
    records = torch.full((8, r.RECORD_WORDS), -1, dtype=torch.int64, device=device)
    writers = torch.full((8,), -1, dtype=torch.int64, device=device)

    def row(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots = [3, 1, 7, 2, 5]
    backend.write_chain(
        records=records,
        writers=writers,
        slots=row(*slots),
        tokens=row(*TOKENS),
        rows=row(9),
        prefix_lens=row(0),
        offsets=row(0, 5),
        seeds=row(as_int64(ANCHOR)),
        step=3,
        first_slot=1,
        violations=ViolationBuffer(4, device),
    )
    assert records[slots, r.CHAIN].tolist() == signed(CHAIN)
    assert records[slots, r.IDENTITY].tolist() == [
        token | position << 32 | 1 << 60 for position, token in enumerate(TOKENS)
    ]
    assert writers[slots].tolist() == [3 << 24 | 9] * 5
    assert records[[0, 4, 6]].tolist() == [[-1] * 4] * 3
