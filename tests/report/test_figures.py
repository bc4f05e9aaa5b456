import re
from itertools import pairwise

import pytest
from tests.report.plans import many_experts, on_leaves, rows_to_columns, two_engines

from reshard import Layout, Manifest, Mesh, plan_refit
from reshard.report.families import find_families
from reshard.report.leaf_loads import leaf_loads, spine_nbytes
from reshard.report.pair_matrix import LEVELS, MOST_CELLS, pair_matrix
from reshard.report.port_loads import port_loads
from reshard.report.ranks import named_ranks
from reshard.report.tensor_figure import draw_tensor
from reshard.report.timeline import MOST_BARS, draw_timeline
from reshard.schedule.trace import Trace, TraceEvent

UP = "layers.0.up.weight"


# -- the two layouts -----------------------------------------------------------------------------------------------


def test_both_sides_are_drawn_with_equal_colours_for_equal_origins():
    figure = draw_tensor(rows_to_columns(), UP)
    assert [box.text for box in figure.held.boxes] == ["trainer 0", "trainer 1"]
    assert [box.text for box in figure.wanted.boxes] == ["gen0 0", "gen0 1", "gen0 2", "gen0 3"]
    upper = {part.tone for part in figure.wanted.parts if part.y == figure.held.boxes[0].y}
    lower = {part.tone for part in figure.wanted.parts if part.y == figure.held.boxes[1].y}
    assert (upper, lower) == ({0}, {1})
    assert figure.legend == ((0, "trainer rank 0"), (1, "trainer rank 1"))


def test_a_destination_box_feeds_on_the_source_parts_that_it_covers():
    figure = draw_tensor(rows_to_columns(), UP)
    for row, box in zip(figure.rows, figure.wanted.boxes, strict=True):
        parts = [figure.held.parts[at] for at in row.feeds]
        assert [(part.x, part.width) for part in parts] == [(box.x, box.width)] * 2
        assert [part.tone for part in parts] == [0, 1]
    assert figure.rows[1].sources == ("16 B from trainer 0: [0:4, 2:4)", "16 B from trainer 1: [4:8, 2:4)")


# A vector is one row; a scalar has no dims at all; of a stack of matrices the two dims that are cut most are drawn.
@pytest.mark.parametrize(
    ("shape", "held", "wanted", "boxes", "note"),
    [
        ((8,), ("f",), (), 2, ""),
        ((), (), (), 1, ""),
        ((4, 6, 8), ("f",), (None, None, "t"), 2, "Drawn: dims 0 and 2; nothing cuts the others."),
        ((4, 6, 8), ("f", "g"), (None, None, "t"), 2, "Drawn: dims 1 and 2, with dim 0 at index 0."),
    ],
)
def test_tensors_of_any_number_of_dims_are_drawn(shape, held, wanted, boxes, note):
    source = Layout(shape, "float32", Mesh({"f": 2, "g": 2}, range(4)), held)
    figure = draw_tensor(plan_refit(source, Layout(shape, "float32", Mesh({"t": 2}, [4, 5]), wanted)), "tensor")
    assert len(figure.held.boxes) in (boxes, 2 * boxes)
    assert note in figure.note
    assert all(r.width > 0 and r.height > 0 for r in (*figure.held.parts, *figure.wanted.boxes))


def test_parts_that_are_too_many_are_left_out_and_the_figure_says_so():
    rows = Layout((40, 40), "float32", Mesh({"f": 40}), ("f",))
    columns = Layout((40, 40), "float32", Mesh({"t": 40}, range(40, 80)), (None, "t"))
    figure = draw_tensor(plan_refit(rows, columns), "tensor")
    assert (figure.held.parts, figure.wanted.parts) == ((), ())
    assert "1600 parts are too many to colour" in figure.note
    assert len(figure.wanted.boxes) == 40


def test_cut_points_that_would_overlap_are_left_out_but_never_the_last():
    rows = Layout((512, 8), "float32", Mesh({"f": 128}), ("f",))
    whole = Layout((512, 8), "float32", Mesh({"t": 1}, [128]))
    marks = draw_tensor(plan_refit(rows, whole), "tensor").down
    assert marks[-1].text == "512"
    assert all(b.at - a.at >= 13 for a, b in pairwise(marks))
    assert 5 < len(marks) < 129


# -- who sends to whom ---------------------------------------------------------------------------------------------


def cells_of(path):
    """The cells that a path of rectangles covers."""
    found = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path)
    return [(int(y), int(x) + k) for x, y, width in found for k in range(int(width))]


def test_the_matrix_has_every_pair_with_its_bytes():
    matrix = pair_matrix(rows_to_columns())
    assert (matrix.senders, matrix.receivers[:2]) == (("trainer 0", "trainer 1"), ("gen0 0", "gen0 1"))
    assert matrix.cells == tuple((row, column, 16) for row in range(2) for column in range(4))
    assert matrix.texts[0] == (0, 0, "16 B")


@pytest.mark.parametrize("plan", [rows_to_columns(), two_engines(hosts=True), many_experts(layers=2)])
def test_the_shades_cover_every_cell_once_and_no_other(plan):
    matrix = pair_matrix(plan)
    drawn = [cell for shade in matrix.shades for cell in cells_of(shade.path)]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {(row, column) for row, column, _ in matrix.cells}
    assert {shade.level for shade in matrix.shades} <= set(range(LEVELS))


def test_pairs_between_domains_have_a_scale_of_their_own():
    plan = two_engines(hosts=True)
    home = plan.topology.domain_of
    most = dict(pair_matrix(plan).most)
    assert most[True] == max(n for (a, b), n in plan.pair_nbytes().items() if home(a) != home(b))
    assert most[False] == max(n for (a, b), n in plan.pair_nbytes().items() if home(a) == home(b))


def test_a_matrix_of_very_many_pairs_is_summed_up():
    rows = Layout((160, 160), "float32", Mesh({"f": 160}), ("f",))
    columns = Layout((160, 160), "float32", Mesh({"t": 160}, range(160, 320)), (None, "t"))
    plan = plan_refit(rows, columns)
    matrix = pair_matrix(plan)
    assert len(matrix.cells) <= MOST_CELLS < len(plan.pair_nbytes())
    assert sum(nbytes for *_, nbytes in matrix.cells) == plan.wire_nbytes
    assert matrix.senders[0] == "ranks 0, 1"


def test_a_plan_in_which_nothing_moves_has_no_matrix_and_no_loads():
    layout = Layout((8, 8), "float32", Mesh({"f": 2}), ("f",))
    plan = plan_refit(layout, layout)
    assert (pair_matrix(plan), port_loads(plan)) == (None, None)


# -- ports ---------------------------------------------------------------------------------------------------------


def test_ports_are_measured_by_the_seconds_that_they_need():
    plan = two_engines(hosts=True)
    loads = port_loads(plan)
    busiest = max(max(load.out_share, load.in_share) for load in loads.loads)
    assert busiest == 1.0
    assert loads.bound_share == pytest.approx(float(plan.bound.seconds / plan.reach.busiest_seconds))
    busiest_seconds = float(plan.reach.busiest_seconds)
    for load in loads.loads:  # every port takes in and sends 10**9 bytes a second
        assert load.in_share == pytest.approx(load.in_nbytes / 10**9 / busiest_seconds)
        assert load.out_share == pytest.approx(load.out_nbytes / 10**9 / busiest_seconds)
    assert any(load.in_nbytes != load.out_nbytes for load in loads.loads)
    assert sum(load.out_nbytes for load in loads.loads) == plan.reach.crossing_nbytes
    assert [load.name for load in loads.loads] == ["host0", "host1", "host2", "host3", "host4"]
    assert loads.spans == (), "a host of one port is not named twice"


def test_domains_of_several_ports_are_named_below_them():
    loads = port_loads(many_experts(layers=1))
    assert loads.prefix == "gb200-nvl72/", "said once, since it does not fit below each on a small screen"
    assert [(span.name, span.first, span.last) for span in loads.spans][:2] == [("0", 0, 63), ("1", 64, 127)]


def test_in_one_domain_the_ranks_stand_in_for_ports_and_no_bound_is_drawn():
    loads = port_loads(rows_to_columns())
    assert [(load.name, load.out_nbytes, load.in_nbytes) for load in loads.loads][:3] == [
        ("0", 64, 0),
        ("1", 64, 0),
        ("0", 0, 32),
    ]
    assert (loads.bound_share, loads.unit) == (0.0, "rank")
    assert [(span.name, span.first, span.last) for span in loads.spans] == [("trainer", 0, 1), ("gen0", 2, 5)]


# -- leaves and spine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("oversubscription", [1, 4])
def test_leaves_are_measured_by_what_crosses_the_spine(oversubscription):
    plan = on_leaves(oversubscription)
    leaves = leaf_loads(plan)
    up, down = [0] * 4, [0] * 4  # group 0 has ranks 0 to 3, and every other rank is on rail 1
    for (a, b), nbytes in plan.pair_nbytes().items():
        if (a // 4, a % 2) != (b // 4, b % 2) and a // 2 != b // 2:
            up[a // 4 * 2 + a % 2] += nbytes
            down[b // 4 * 2 + b % 2] += nbytes
    assert [(load.out_nbytes, load.in_nbytes) for load in leaves.chart.loads] == list(zip(up, down, strict=True))
    assert leaves.crossing_nbytes == spine_nbytes(plan) == sum(up) == 64 * 64 * 2
    rate = 2 * 10**9 / oversubscription  # two ports of 10**9 a leaf
    busiest = max(*up, *down) / rate
    bound = float(plan.bound.spine_seconds if oversubscription > 1 else plan.bound.seconds)
    assert leaves.chart.bound_share == pytest.approx(bound / max(bound, busiest))
    assert max(load.out_share for load in leaves.chart.loads) == pytest.approx(max(up) / rate / max(bound, busiest))
    assert leaves.is_blocking == (oversubscription > 1)


def test_leaves_are_named_by_rail_and_below_it_by_group():
    chart = leaf_loads(on_leaves()).chart
    assert [load.name for load in chart.loads] == ["rail0", "rail1", "rail0", "rail1"]
    assert [(span.name, span.first, span.last) for span in chart.spans] == [("group0", 0, 1), ("group1", 2, 3)]
    assert chart.loads[0].title.startswith("group0/rail0 (2 ports)\nup to the spine ")


def test_without_leaves_there_is_no_chart_and_over_the_fast_link_first_nothing_crosses():
    assert leaf_loads(two_engines(hosts=True)) is None
    assert spine_nbytes(two_engines(hosts=True)) == 0
    leaves = leaf_loads(on_leaves(4, domains=4, cross_rail="local"))
    assert (leaves.chart, leaves.crossing_nbytes) == (None, 0)
    assert leaf_loads(on_leaves(4, domains=4)).crossing_nbytes > 0


def test_a_port_is_charged_for_what_others_send_over_it():
    plan = on_leaves(domains=4, cross_rail="local")
    out = [0] * 8
    for (a, b), nbytes in plan.pair_nbytes().items():
        if a // 2 != b // 2:
            out[a // 2 * 2 + b % 2] += nbytes  # the port of the sender's host that is on the receiver's rail
    assert [load.out_nbytes for load in port_loads(plan).loads] == out


# -- time ----------------------------------------------------------------------------------------------------------


def test_few_events_are_bars_in_the_lane_of_their_kind():
    plan = rows_to_columns()
    events = (TraceEvent(0, "send", 2, 3, 0.0, 1.0, 16), TraceEvent(2, "recv", 0, 3, 1.0, 4.0, 16))
    line = draw_timeline(plan, Trace((*events, TraceEvent(2, "wait", 0, None, 0.0, 1.0, 0))))
    assert line.rows == ("trainer 0", "gen0 0")
    assert [(bar.row, bar.lane, bar.left, bar.width) for bar in line.bars] == [(0, 0, 0.0, 0.25), (1, 1, 0.25, 0.75)]
    assert line.bars[1].title == "gen0 rank 0: recv 16 B from trainer rank 0, round 3\n1 s to 4 s"
    assert line.busy == (("send", "12%"), ("recv", "38%"), ("memory", "0%"))


def test_many_events_are_a_picture_of_bounded_size():
    events = tuple(TraceEvent(0, "send", 2, at, at, at + 0.5, 16) for at in range(MOST_BARS + 1))
    line = draw_timeline(rows_to_columns(), Trace(events))
    assert line.bars == ()
    assert line.picture.startswith("data:image/png;base64,iVBORw0KGgo")
    assert len(line.picture) < 10_000
    assert line.busy[0] == ("send", "50%")


def test_a_trace_without_time_has_no_timeline():
    assert draw_timeline(rows_to_columns(), Trace(())) is None


# -- names ---------------------------------------------------------------------------------------------------------


def test_names_that_differ_in_numbers_are_one_row():
    (family,) = find_families(many_experts(layers=4, experts=32))
    assert family.name == "model.layers.{0-3}.mlp.experts.{0-31}.up_proj.weight"
    assert (family.count, family.spans) == (128, ((0, 3), (0, 31)))
    assert (family.held_boxes, family.needed_boxes) == ((1, 1), (8, 8))
    assert family.wanted_nbytes == 16 * family.nbytes


def test_a_number_inside_a_word_is_part_of_the_word():
    names = ("mlp.w1.weight", "mlp.w2.weight", "blocks.2.w", "7")
    layouts = {name: Layout((4,), "float32", Mesh({"f": 1})) for name in names}
    manifest = Manifest.from_layouts(layouts)
    assert {family.name for family in find_families(plan_refit(manifest, manifest))} == set(names)


def test_ranks_are_named_by_their_worlds():
    plan = two_engines()
    assert named_ranks(plan, [0, 1, 2, 3, 8]) == "trainer 0-3; gen1 0"
    assert named_ranks(many_experts(layers=1), [128, 136, 144, 152]) == "ranks 128-152 step 8"
