"""Views of the bytes of a slot, whatever order they lie in."""

import pytest
import torch

from kvcanary_plugin.pool_patcher.sources import view_slots


def test_rows_are_one_piece():
    (piece,) = view_slots(torch.zeros(5, 2, 3, dtype=torch.bfloat16))

    assert (piece.shape, piece.stride()) == ((5, 1, 12), (12, 12, 1))


def test_slots_of_a_page_that_lie_apart_are_a_piece_for_each_head():
    buffer = torch.randn(3, 2, 4, 8).to(torch.bfloat16)  # page, head, slot, element
    pieces = view_slots(buffer, slot_axes=(2,))

    assert len(pieces) == 2
    for head, piece in enumerate(pieces):
        assert torch.equal(piece.view(torch.bfloat16), buffer[:, head])


def test_slots_in_groups_are_counted_group_by_group():
    buffer = torch.arange(3 * 2 * 5 * 4 * 2, dtype=torch.int16).view(3, 2, 5, 4, 2)  # page, head, lane, group, element
    pieces = view_slots(buffer, slot_axes=(3, 2))

    assert [piece.shape for piece in pieces] == [(3, 4, 5, 4)] * 2
    for head, piece in enumerate(pieces):
        assert torch.equal(piece.view(torch.int16), buffer[:, head].transpose(1, 2))


def test_pieces_are_views_of_the_live_bytes():
    buffer = torch.zeros(3, 2, 4, 8)
    pieces = view_slots(buffer, slot_axes=(2,))
    buffer[2, 1, 3, 7] = 1.0

    assert not pieces[0].any()
    assert pieces[1][2, 3].any()


def test_a_view_into_a_larger_buffer_keeps_to_its_part():
    whole = torch.arange(60, dtype=torch.uint8).view(5, 12)
    (piece,) = view_slots(whole[1:, 2:7])

    assert torch.equal(piece[:, 0], whole[1:, 2:7])


def test_elements_in_another_order_are_read_in_the_order_of_memory():
    buffer = torch.arange(24, dtype=torch.uint8).view(4, 3, 2).transpose(1, 2)
    (piece,) = view_slots(buffer)

    assert torch.equal(piece.flatten(), torch.arange(24, dtype=torch.uint8))


def test_an_empty_buffer_has_no_pieces():
    assert view_slots(torch.zeros(0, 2, 3)) == ()


def test_elements_that_share_memory_are_refused():
    with pytest.raises(ValueError, match="share one place in memory"):
        view_slots(torch.zeros(4, 1).expand(4, 3))
