"""Meshes: any ranks on named axes, the last axis fastest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from reshard.errors import LayoutError
from reshard.layouts.mesh import Mesh
from reshard.testing.strategies import meshes


@given(meshes())
def test_coordinates_are_those_of_a_c_ordered_array_of_the_ranks(mesh):
    grid = np.array(mesh.ranks).reshape(mesh.shape)
    for rank in mesh.ranks:
        assert grid[mesh.coordinate(rank)] == rank


def test_ranks_may_be_any_numbers_in_any_order():
    mesh = Mesh({"dp": 2, "tp": 2}, ranks=[9, 1, 5, 3])
    assert [mesh.coordinate(rank) for rank in (9, 1, 5, 3)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_without_ranks_a_mesh_counts_from_zero():
    assert Mesh({"tp": 3}).ranks == (0, 1, 2)


def test_a_mesh_without_axes_is_one_place():
    assert Mesh({}, [7]).coordinate(7) == ()


def test_shifting_keeps_the_places():
    mesh = Mesh({"dp": 2, "tp": 2}, [3, 2, 1, 0]).shifted(10)
    assert mesh.ranks == (13, 12, 11, 10)
    assert mesh.coordinate(12) == (0, 1)


@pytest.mark.parametrize(
    ("axes", "ranks", "why"),
    [
        ({"tp": 0}, None, "a size of at least 1"),
        ((("tp", 2), ("tp", 2)), None, "its own name"),  # a name twice
        ({"tp": 4}, [0, 1, 2], "make 4 places, but 3 ranks were given"),
        ({"tp": 3}, [0, 1, 1], r"\[1\] are listed more than once"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_the_reason(axes, ranks, why):
    with pytest.raises(LayoutError, match=why):
        Mesh(axes, ranks)


def test_a_rank_outside_the_mesh_has_no_coordinate():
    with pytest.raises(ValueError, match="not in tuple"):
        Mesh({"tp": 2}).coordinate(2)
