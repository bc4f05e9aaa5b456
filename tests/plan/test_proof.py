"""Proofs: a right plan passes, and every way of breaking its routes is caught."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reshard.errors import ProofError, ReshardError
from reshard.layouts.box import Box
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.plan.cells import Cell, ranks_of
from reshard.plan.plan import STRATEGIES, Plan, plan_refit
from reshard.plan.routes import Route
from reshard.testing.strategies import cases

PURE_CASES = cases(odd_memory=False, max_tensors=2)


@settings(max_examples=150)
@given(PURE_CASES, st.sampled_from(STRATEGIES), st.sampled_from((1, 64, 1 << 16)))
def test_a_plan_as_it_was_made_is_proven(case, strategy, cut_nbytes):
    plan = plan_refit(case.src, case.dst, strategy=strategy, cut_nbytes=cut_nbytes)
    proof = plan.proof()
    assert proof.delivered_nbytes == proof.needed_nbytes == plan.needed_nbytes
    assert str(proof).startswith("proven: ")


# -- broken routes -------------------------------------------------------------------------------------------------
#
# Each way takes one edge of one route on which something needed travels, and returns the routes that carry it instead;
# None where this route cannot be broken so (all ranks hold the bytes, say).


def drop(plan, route, edge, _):
    return [replace(route, edges=tuple(e for e in route.edges if e != edge))]


def repeat(plan, route, edge, _):
    return [route, replace(route, edges=(edge,))]


def shift_by_an_element(plan, route, edge, dice):
    step = dice.choice((-1, 1)) * plan.specs[plan.route_items(route)[0][0]].itemsize
    return [replace(route, start=route.start + step, stop=route.stop + step)]


def stop_an_element_early(plan, route, edge, _):
    size = plan.specs[plan.route_items(route)[-1][0]].itemsize
    return [replace(route, stop=route.stop - size)] if route.nbytes > size else None


def wrong_sender(plan, route, edge, dice):
    cls = plan.classes[route.route_class]
    others = [rank for rank in range(plan.size) if not (cls.holders | cls.audience) >> rank & 1]
    return [_with_edge(route, edge, (dice.choice(others), edge[1]))] if others else None


def wrong_receiver(plan, route, edge, dice):
    others = [rank for rank in range(plan.size) if rank != edge[1]]
    return [_with_edge(route, edge, (edge[0], dice.choice(others)))] if others else None


def swap_ends(plan, route, edge, _):
    holders, needers = plan.classes[route.route_class].holders, plan.classes[route.route_class].needers
    if edge[0] == edge[1] or (holders >> edge[1] & 1 and needers >> edge[0] & 1):
        return None
    return [_with_edge(route, edge, edge[::-1])]


def other_class(plan, route, edge, _):
    others = [at for at in range(len(plan.classes)) if at != route.route_class]
    return [replace(route, route_class=others[0])] if others else None


def _with_edge(route, old, new):
    return replace(route, edges=tuple(new if edge == old else edge for edge in route.edges))


WAYS = (drop, repeat, shift_by_an_element, stop_an_element_early, wrong_sender, wrong_receiver, swap_ends, other_class)


@pytest.mark.parametrize("break_it", WAYS, ids=lambda way: way.__name__)
@settings(max_examples=50)
@given(PURE_CASES, st.sampled_from(STRATEGIES), st.randoms(use_true_random=False))
def test_a_broken_route_is_caught(break_it, case, strategy, dice):
    plan = plan_refit(case.src, case.dst, strategy=strategy, cut_nbytes=16)
    needed = [
        (at, edge)
        for at, route in enumerate(plan.routes)
        for edge in route.edges
        if plan.classes[route.route_class].needers >> edge[1] & 1
    ]
    assume(needed)
    at, edge = dice.choice(needed)
    broken = break_it(plan, plan.routes[at], edge, dice)
    assume(broken is not None)
    with pytest.raises(ProofError):
        replace(plan, routes=(*plan.routes[:at], *broken, *plan.routes[at + 1 :])).proof()


def one_to_two():
    """One source, two replicas, and a plan in which the second gets its bytes from the first."""
    src = Layout((8,), "float32", Mesh({"x": 1}))
    plan = plan_refit(src, Layout((8,), "float32", Mesh({"dp": 2}, [1, 2])))
    return replace(plan, routes=(Route(0, 0, 32, ((0, 1), (1, 2)), "direct"),))


def test_a_rank_may_send_on_what_it_has_received():
    assert one_to_two().proof().delivered_nbytes == 64


@pytest.mark.parametrize(
    "routes",
    [
        (Route(0, 0, 32, ((1, 2), (0, 1)), "direct"),),  # the order of the edges of one route
        (Route(0, 0, 32, ((1, 2),), "direct"), Route(0, 0, 32, ((0, 1),), "direct")),  # the order of routes
        (  # half of it has not come yet
            Route(0, 0, 16, ((0, 1),), "direct"),
            Route(0, 0, 32, ((1, 2),), "direct"),
            Route(0, 16, 32, ((0, 1),), "direct"),
        ),
    ],
)
def test_a_rank_may_not_send_on_what_has_not_come_yet(routes):
    with pytest.raises(ProofError, match=r"'tensor': rank 1 sends bytes .* that it does not hold at that moment"):
        replace(one_to_two(), routes=routes).proof()


def test_a_rank_that_gets_bytes_twice_is_named():
    plan = one_to_two()
    twice = (*plan.routes, Route(0, 8, 16, ((0, 2),), "direct"))
    with pytest.raises(ProofError, match=r"'tensor': rank 2 gets bytes \[8, 32\) of its class twice"):
        replace(plan, routes=twice).proof()


def test_a_rank_that_gets_what_it_did_not_ask_for_is_named():
    plan = plan_refit(
        Layout((8,), "float32", Mesh({"x": 2}), ("x",)), Layout((8,), "float32", Mesh({"x": 2}, [2, 3]), ("x",))
    )
    stray = (*plan.routes, replace(plan.routes[0], edges=((0, 3),)))
    with pytest.raises(ProofError, match="'tensor': rank 3 receives what it never asked for"):
        replace(plan, routes=stray).proof()


@pytest.mark.parametrize("cut", [1, 2, 3, 30])
def test_a_cut_inside_an_element_is_caught(cut):
    plan = one_to_two()
    halves = (Route(0, 0, cut, ((0, 1), (0, 2)), "direct"), Route(0, cut, 32, ((0, 1), (0, 2)), "direct"))
    with pytest.raises(ProofError, match="'tensor'"):
        replace(plan, routes=halves).proof()


def test_a_cut_inside_a_block_is_caught():
    src, dst = (Layout((8,), "uint8", Mesh({"x": 1}, [rank]), granule=(4,)) for rank in (0, 1))
    plan = plan_refit(src, dst)
    halves = (Route(0, 0, 2, ((0, 1),), "direct"), Route(0, 2, 8, ((0, 1),), "direct"))
    with pytest.raises(ProofError, match="'tensor'"):
        replace(plan, routes=halves).proof()


@pytest.mark.parametrize(
    "route",
    [
        Route(7, 0, 32, ((0, 1),), "direct"),  # no such class
        Route(-1, 0, 32, ((0, 1), (0, 2)), "direct"),
        Route(0, 0, 32, ((-1, 1), (0, 2)), "direct"),  # no such rank
        Route(0, 0, 32, ((0, 1), (0, 99)), "direct"),
        Route(0, -8, 32, ((0, 1), (0, 2)), "direct"),  # outside the string
        Route(0, 0, 40, ((0, 1), (0, 2)), "direct"),
    ],
)
def test_a_route_that_names_what_does_not_exist_is_caught(route):
    with pytest.raises(ProofError):
        replace(one_to_two(), routes=(route,)).proof()


# -- broken cells --------------------------------------------------------------------------------------------------


def change_cell(plan, index, **changes):
    """The plan with one cell of its first pattern changed, and the classes as they were."""
    pattern = plan.patterns[0]
    cells = list(pattern.cells)
    cells[index] = replace(cells[index], **changes)
    return replace(plan, patterns=(replace(pattern, cells=tuple(cells)), *plan.patterns[1:]))


def rows_to_columns():
    src = Layout((8, 8), "uint8", Mesh({"x": 2}), ("x",))
    return plan_refit(src, Layout((8, 8), "uint8", Mesh({"x": 4}, [2, 3, 4, 5]), (None, "x")))


@pytest.mark.parametrize(
    "changes",
    [
        {"holders": 0b10},  # a holder that does not hold it
        {"holders": 0b11},  # one that does, and one that does not
        {"needers": 0b1000},  # a needer that did not ask
        {"needers": 0b1100},  # one more needer
        {"needers": 0},  # a needer forgotten
        {"box": Box((0, 0), (4, 3))},  # grown into its neighbour
        {"box": Box((0, 0), (4, 1))},  # too small
    ],
)
def test_a_cell_that_does_not_agree_with_the_boxes_is_caught(changes):
    plan = rows_to_columns()
    assert plan.patterns[0].cells[0] == Cell(Box((0, 0), (4, 2)), 0b1, 0b100)
    with pytest.raises(ProofError):
        change_cell(plan, 0, **changes).proof()


def test_a_class_that_does_not_consist_of_its_cells_is_caught():
    plan = rows_to_columns()
    first, second = plan.classes[:2]
    with pytest.raises(ProofError):
        replace(plan, classes=(replace(first, parts=second.parts), *plan.classes[1:])).proof()
    with pytest.raises(ProofError):
        replace(plan, classes=plan.classes[1:], routes=()).proof()


# -- tampered files ------------------------------------------------------------------------------------------------


def leaves(data, at=()):
    """The path of every number in a nested list or dict, and of every text with numbers in it (ranks, edges)."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        is_text = isinstance(value, str) and re.fullmatch(r"[-0-9>.,+/ ]*[0-9][-0-9>.,+/ ]*", value)
        if is_text or (isinstance(value, int) and not isinstance(value, bool)):
            yield (*at, key)
        else:
            yield from leaves(value, (*at, key))


def moved(value, by, dice):
    """The number, or one of the numbers in the text, with ``by`` added."""
    if isinstance(value, int):
        return value + by
    number = dice.choice(list(re.finditer("[0-9]+", value)))
    return f"{value[: number.start()]}{int(number[0]) + by}{value[number.end() :]}"


@settings(max_examples=200)
@given(PURE_CASES, st.randoms(use_true_random=False))
def test_a_changed_number_in_a_saved_plan_shows_in_its_proof_or_its_digest(case, dice):
    original = plan_refit(case.src, case.dst, cut_nbytes=16)
    saved = json.loads(json.dumps(original.to_json()))
    path = dice.choice(sorted(leaves(saved), key=str))
    inner = saved
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = moved(inner[path[-1]], dice.choice((-1, 1, 7)), dice)
    try:
        plan = Plan.from_json(saved)
        plan.proof()
    except (ReshardError, ValueError, LookupError):
        return
    assert plan.digest != saved["digest"] or plan == original


def test_a_plan_whose_routes_were_swapped_in_the_file_has_another_digest():
    saved = rows_to_columns().to_json()
    saved["routes"] = saved["routes"][::-1]
    assert Plan.from_json(saved).digest != saved["digest"]


def test_masks_list_each_rank_of_the_example():
    assert ranks_of(rows_to_columns().classes[0].holders) == (0,)
