from dataclasses import replace

import pytest
from tests.report.plans import many_experts, rows_to_columns, two_engines

from reshard.errors import PlanError
from reshard.layouts.box import Box
from reshard.report.flows import kinds_of_pattern, tensor_flow


def test_a_destination_box_comes_from_the_ranks_that_held_its_parts():
    flow = tensor_flow(rows_to_columns(), "layers.0.up.weight")
    assert flow.held == ((Box((0, 0), (4, 8)), (0,)), (Box((4, 0), (8, 8)), (1,)))
    assert [wanted.needers for wanted in flow.wanted] == [(2,), (3,), (4,), (5,)]
    (parts,) = flow.wanted[1].parts
    assert [(part.box, part.origin, part.sender, part.nbytes) for part in parts] == [
        (Box((0, 2), (4, 4)), 0, 0, 16),
        (Box((4, 2), (8, 4)), 1, 1, 16),
    ]


def test_what_a_rank_hands_on_is_followed_back_to_a_holder():
    plan = many_experts(layers=1)
    flow = tensor_flow(plan, plan.specs[0].name)
    holders = set(flow.held[0][1])
    parts = [part for wanted in flow.wanted for of_rank in wanted.parts for part in of_rank]
    assert {part.origin for part in parts} <= holders
    assert any(part.sender not in holders for part in parts)


@pytest.mark.parametrize("strategy", ["reshard", "point-to-point", "gather-broadcast"])
def test_the_parts_of_each_rank_fill_its_box_and_no_more(strategy):
    for wanted in tensor_flow(rows_to_columns(strategy), "layers.0.up.weight").wanted:
        for parts in wanted.parts:
            assert sum(part.box.numel for part in parts) == wanted.box.numel
            assert all(wanted.box.contains(part.box) for part in parts)


def test_a_plan_with_a_ring_of_senders_is_still_followed_to_an_end():
    plan = rows_to_columns()
    ring = replace(plan.routes[0], edges=((2, 3), (3, 2)))
    tensor_flow(replace(plan, routes=(ring, *plan.routes[1:])), "layers.0.up.weight")


def test_an_unknown_tensor_is_refused_with_the_nearest_name():
    with pytest.raises(PlanError, match=r"no tensor 'layers.0.upp.weight'.*'layers.0.up.weight'"):
        tensor_flow(rows_to_columns(), "layers.0.upp.weight")


def test_tensors_that_are_cut_alike_are_one_kind_whoever_holds_them():
    assert len(kinds_of_pattern(many_experts(layers=4))) == 1
    assert len(kinds_of_pattern(two_engines())) == 2
