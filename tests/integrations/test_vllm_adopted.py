"""Landed memory is taken for a buffer only if it holds all of it as it lies, and whoever keeps it is found out."""

from __future__ import annotations

import pytest
import torch

from reshard.integrations.traced import Buffer, Region, TracedPiece
from reshard.integrations.vllm.adopted import Adopted, adoptable
from reshard.layouts.box import Box
from reshard.layouts.piece import Piece

GATE, UP = Piece("gate", Box((0, 0), (2, 4))), Piece("up", Box((0, 0), (3, 4)))
FUSED = Buffer("gate_up", (5, 4), (4, 1), "float32")
PLACES = [
    TracedPiece(GATE, Region("gate_up", 0, (2, 4), (4, 1))),
    TracedPiece(UP, Region("gate_up", 8, (3, 4), (4, 1))),
]


def room(gate=0, up=8, dtype=torch.float32):
    """Where the two have landed, by their first elements in one room."""
    memory = torch.arange(40).to(dtype)
    return {
        (GATE.name, GATE.box): memory[gate : gate + 8].view(2, 4),
        (UP.name, UP.box): memory[up : up + 12].view(3, 4),
    }


def test_pieces_that_lie_one_after_the_other_are_the_buffer_where_they_are():
    landed = room(gate=16, up=24)
    found = adoptable(reversed(PLACES), landed, {"gate_up": FUSED})
    assert torch.equal(found["gate_up"], torch.cat([landed[GATE.name, GATE.box], landed[UP.name, UP.box]]))
    assert found["gate_up"].data_ptr() == landed[GATE.name, GATE.box].data_ptr()


TRANSPOSED = Buffer("gate_up", (5, 4), (1, 5), "float32")
CASES = {
    "a gap": (PLACES, room(up=12), FUSED),
    "the other order": (PLACES, room(gate=12, up=0), FUSED),
    "another dtype": (PLACES, room(dtype=torch.float64), FUSED),
    "a part from elsewhere": (PLACES[:1], room(), FUSED),
    "not from the beginning": (PLACES[1:], room(), FUSED),
    "memory of their own": (PLACES, {key: tensor.clone() for key, tensor in room().items()}, FUSED),
    "a transposed buffer": (PLACES, room(), TRANSPOSED),
    "a transposed piece": (
        [TracedPiece(GATE, Region("gate_up", 0, (2, 4), (1, 2)))],
        room(),
        Buffer("gate_up", (2, 4), (4, 1), "float32"),
    ),
}


@pytest.mark.parametrize(("places", "landed", "buffer"), CASES.values(), ids=CASES)
def test_what_does_not_lie_as_the_buffer_does_is_to_be_copied(places, landed, buffer):
    assert adoptable(places, landed, {"gate_up": buffer}) == {}


def test_a_buffer_of_one_piece_is_where_that_landed():
    whole = Buffer("down", (2, 4), (4, 1), "float32")
    landed = room()
    found = adoptable([TracedPiece(GATE, Region("down", 0, (2, 4), (4, 1)))], landed, {"down": whole})
    assert found["down"].data_ptr() == landed[GATE.name, GATE.box].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_a_view_that_somebody_keeps_is_found_out_until_it_is_gone(dtype):
    landed = torch.arange(24).view(2, 3, 4).to(dtype)
    adopted = Adopted(landed[1:])
    assert not adopted.is_kept
    kept = adopted.take()
    assert (kept.data_ptr(), kept.shape, kept.dtype) == (landed[1:].data_ptr(), landed[1:].shape, dtype)
    kept = kept[0, 1:].T
    assert adopted.is_kept
    del kept
    assert not adopted.is_kept
