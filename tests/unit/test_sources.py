import sys

import pytest
import torch

from kvcanary_plugin.pool_patcher.sources import clip_read_bytes, make_packed_source, make_row_source


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (-16, r"kv-canary: read_bytes must be non-negative, got -16"),
        (128, r"kv-canary: read_bytes must be <= num_bytes_per_token \(64\), got 128"),
        (24, r"kv-canary: read_bytes must be a multiple of 16, got 24"),
    ],
)
def test_read_bytes_out_of_bounds_are_refused_in_words_sglang_uses(requested, message):
    with pytest.raises(ValueError, match=message):
        make_row_source(layer_buffer=torch.zeros(4, 64, dtype=torch.uint8), read_bytes=requested)
    with pytest.raises(ValueError, match=message):
        make_packed_source(
            page_buffer=torch.zeros(2, 256, dtype=torch.uint8), page_size=4, bytes_per_token=64, read_bytes=requested
        )


def test_whole_slot_may_have_any_width():
    assert clip_read_bytes(requested=sys.maxsize, num_bytes_per_token=584) == 584
    assert clip_read_bytes(requested=13, num_bytes_per_token=13) == 13


def test_zero_means_no_source():
    assert make_row_source(layer_buffer=torch.zeros(4, 64), read_bytes=0) == ()


def test_row_source_is_a_view_of_the_live_bytes():
    buffer = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    (source,) = make_row_source(layer_buffer=buffer, read_bytes=sys.maxsize)
    buffer[3, 1, 7] = 1.0
    words = torch.empty(1, source.word_count, dtype=torch.int64)
    source.gather_words(torch.tensor([3]), out=words)

    assert torch.equal(words.view(torch.bfloat16), buffer[3].view(1, -1))


def test_rows_that_are_not_contiguous_are_refused_not_copied():
    with pytest.raises(ValueError, match="must be a view of the live bytes"):
        make_row_source(layer_buffer=torch.zeros(4, 8, 6).transpose(1, 2), read_bytes=sys.maxsize)


def test_rows_apart_from_each_other_are_fine():
    wide = torch.randint(0, 255, (6, 40), dtype=torch.uint8)
    (source,) = make_row_source(layer_buffer=wide[:, 8:24], read_bytes=sys.maxsize)
    words = torch.empty(2, 2, dtype=torch.int64)
    source.gather_words(torch.tensor([5, 0]), out=words)

    assert torch.equal(words.view(torch.uint8), wide[[5, 0], 8:24])


@pytest.mark.parametrize("width", [1, 7, 8, 13, 584])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_packed_source_reads_the_slot_and_nothing_else(width, page_size):
    pages = torch.randint(0, 255, (3, page_size * width + 5), dtype=torch.uint8)
    (source,) = make_packed_source(
        page_buffer=pages, page_size=page_size, bytes_per_token=width, read_bytes=sys.maxsize
    )
    for slot in range(3 * page_size):
        words = torch.full((1, source.word_count), -1, dtype=torch.int64)
        source.gather_words(torch.tensor([slot]), out=words)
        start = slot % page_size * width
        expected = torch.zeros(source.word_count * 8, dtype=torch.uint8)
        expected[:width] = pages[slot // page_size, start : start + width]

        assert torch.equal(words.view(torch.uint8)[0], expected)


def test_page_too_small_for_its_slots_is_refused():
    with pytest.raises(ValueError, match="cannot hold page_size=4"):
        make_packed_source(
            page_buffer=torch.zeros(2, 100, dtype=torch.uint8), page_size=4, bytes_per_token=32, read_bytes=sys.maxsize
        )


def test_page_size_must_be_positive():
    with pytest.raises(ValueError, match="page_size must be positive, got 0"):
        make_packed_source(
            page_buffer=torch.zeros(2, 100, dtype=torch.uint8), page_size=0, bytes_per_token=32, read_bytes=sys.maxsize
        )
