from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.worlds import random_refit
from tests.report.plans import many_experts, two_engines

from reshard.errors import PlanError
from reshard.layouts.box import Box
from reshard.layouts.holding import Entry, Pieces, Rule
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.layouts.piece import TensorSpec
from reshard.plan.plan import Plan, plan_refit
from reshard.plan.ranges import ranges_text, read_ranges
from reshard.plan.saved import edges_text, manifest_from_json, manifest_to_json, read_edges

ON = tuple(Rule(Mesh({"dp": 2}, [first, first + 4]), ((), ()), "even") for first in range(4))


def again(manifest):
    return manifest_from_json(json.loads(json.dumps(manifest_to_json(manifest))), {})


def entry(name, holding=ON[0], shape=(8, 8), **spec):
    return Entry(TensorSpec(name, shape, "bfloat16", **spec), (holding,))


@given(st.lists(st.integers(-50, 50)))
def test_numbers_survive_as_ranges_in_their_order(numbers):
    assert read_ranges(ranges_text(numbers)) == numbers


@pytest.mark.parametrize("text", ["1..", "a", "1..2/", "1-3", "1..3/x", ",", "٣"])
def test_what_is_not_a_range_is_refused(text):
    with pytest.raises(ValueError, match="is not a number, and not a range"):
        read_ranges(text)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_edges_survive_as_text_in_their_order(edges):
    assert read_edges(edges_text(edges)) == tuple(edges)


def test_a_tree_over_alike_domains_is_a_few_characters():
    domains = [range(first, first + 8) for first in range(16, 1040, 8)]
    edges = [e for d in domains for e in ((3, d[0]), *((d[0], rank) for rank in d[1:]))]
    assert edges_text(edges) == "3>16..1032/8+1..7"


NAMES = [
    "w",
    "layers.0.w2",  # the 2 is no number of its own
    "layers.00.w",  # would come back as another name
    "layers.1000000000000.w",
    "a{}b.3",  # braces, as str.format has them
    "{0}.4",
    "}{",
    "experts_7_of_9",
    "٣.1",
]


def test_every_name_comes_back_as_it_was():
    manifest = Manifest(tuple(entry(name, ON[at % 4]) for at, name in enumerate(NAMES)), "trainer", 9)
    assert again(manifest) == manifest


@settings(max_examples=100)
@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 2))), st.randoms(use_true_random=False))
def test_any_set_of_numbers_on_any_ranks_comes_back(numbers, dice):
    manifest = Manifest(
        tuple(
            entry(f"l.{a}.e.{b}.p.{c}", dice.choice(ON), (8, dice.choice((8, 9))), group=f"l.{dice.choice((a, b, 7))}")
            for a, b, c in numbers
        )
    )
    assert again(manifest) == manifest


def test_all_that_a_manifest_says_comes_back():
    boxes = (Box((0, 0), (4, 8)), Box((6, 0), (8, 8)))
    explicit = Pieces(((0, boxes), (2, boxes), (3, boxes[:1]), (4, ()), (6, boxes)))
    one = replace(entry("a.1", explicit, granule=(2, 4), group="block 1"), alternatives=(ON[1],), fits=(False, True))
    both = replace(entry("a.2"), holdings=(ON[0], explicit))
    manifest = Manifest((one, both, entry("b.2.3", group="{block} 3")), "gen0", 12, (("a.2", "a.1"),))
    assert again(manifest) == manifest
    assert again(manifest).digest == manifest.digest


def test_explicit_pieces_that_are_not_in_the_order_of_ranks_stay_so():
    boxes = (Box((0, 0), (4, 8)),)
    manifest = Manifest((entry("a", Pieces(((3, boxes), (1, boxes)))),))
    assert again(manifest) == manifest


@pytest.mark.parametrize("name", ["w.{!r}", "w.{0.real}", "w.{:9}", "w.{", "w.{1000}"])
def test_a_template_from_a_file_holds_nothing_but_places(name):
    data = manifest_to_json(Manifest((entry("w.1"),)))
    data["tensors"][0]["name"] = name
    with pytest.raises(ValueError, match="is not a name with places for numbers"):
        manifest_from_json(data, {})


@pytest.mark.parametrize("seed", range(12))
def test_plans_over_clusters_survive_json(seed):
    src, dst, topology = random_refit(seed)
    plan = plan_refit(src, dst, topology, cut_nbytes=16)
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert read == plan
    assert read.digest == plan.digest
    assert read.proof() == plan.proof()


def test_a_plan_does_not_grow_with_the_number_of_names():
    few, many = (len(json.dumps(many_experts(layers=layers).to_json())) for layers in (4, 12))
    assert many < 1.2 * few


def in_first_format(plan):
    """As plans were saved before: manifests as they are published, a list for each edge."""
    return {
        **plan.to_json(),
        "format": "reshard-plan-1",
        "src": plan.src.to_json(),
        "dst": [manifest.to_json() for manifest in plan.dst],
        "routes": [[r.route_class, r.start, r.stop, [list(e) for e in r.edges], r.rule] for r in plan.routes],
    }


@pytest.mark.parametrize("plan", [two_engines(hosts=True), many_experts(layers=1)], ids=["engines", "experts"])
def test_a_plan_in_the_first_format_is_read_to_the_same_plan(plan):
    read = Plan.from_json(json.loads(json.dumps(in_first_format(plan))))
    assert read == plan
    assert read.digest == in_first_format(plan)["digest"]


def test_a_plan_in_a_format_to_come_is_refused_with_what_can_be_done():
    later = two_engines().to_json() | {"format": "reshard-plan-3"}
    with pytest.raises(PlanError, match=r"'reshard-plan-3', not .*'reshard-plan-1'\. A plan that a newer"):
        Plan.from_json(later)
