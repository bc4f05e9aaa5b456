from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from reshard import Layout, Manifest, Mesh, plan_refit
from reshard.cli.main import main
from reshard.layouts.box import Box
from reshard.report.drawing import Label, draw_boxes

ROWS_TO_COLUMNS = ("--shape", "8x8", "--source", "fsdp=2 [fsdp, -]", "--destination", "tp=4 [-, tp]")


def run(*args, **options):
    return CliRunner().invoke(main, ["explain", *map(str, args)], **options)


def text_of(*args):
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def save(folder, plan):
    path = folder / "plan.json"
    path.write_text(json.dumps(plan.to_json()), "utf-8")
    return path


@pytest.fixture
def saved(tmp_path):
    """Two worlds that count apart, two tensors."""

    def side(world, mesh, placements):
        shapes = {"w": (8, 8), "v": (6,)}
        layouts = {n: Layout(shapes[n], "bfloat16", mesh, p, "ceil") for n, p in placements.items()}
        return Manifest.from_layouts(layouts, world=world)

    held = side("trainer", Mesh({"fsdp": 2}), {"w": ("fsdp",), "v": ()})
    wanted = side("engine", Mesh({"dp": 2, "tp": 2}), {"w": (None, "tp"), "v": ("tp",)})
    return save(tmp_path, plan_refit(held, wanted))


# The example that the field uses: each destination gets one 4 x 2 box from each source.
def test_rows_to_columns_is_two_boxes_a_destination():
    assert (
        text_of(*ROWS_TO_COLUMNS)
        == """\
tensor: bfloat16 [8, 8], 128 B; reshard sends 8 boxes, 128 B

  0       2       4       6       8
0 ┌───────┬───────┬───────┬───────┐
  │ 0 → 2 │ 0 → 3 │ 0 → 4 │ 0 → 5 │
4 ├───────┼───────┼───────┼───────┤
  │ 1 → 2 │ 1 → 3 │ 1 → 4 │ 1 → 5 │
8 └───────┴───────┴───────┴───────┘
source rank → destination rank

rank 2 wants [0:8, 0:2), 32 B
  from rank 0  4 x 2 box [0:4, 0:2)  16 B  the only holder
  from rank 1  4 x 2 box [4:8, 0:2)  16 B  the only holder
rank 3 wants [0:8, 2:4), 32 B
  from rank 0  4 x 2 box [0:4, 2:4)  16 B  the only holder
  from rank 1  4 x 2 box [4:8, 2:4)  16 B  the only holder
rank 4 wants [0:8, 4:6), 32 B
  from rank 0  4 x 2 box [0:4, 4:6)  16 B  the only holder
  from rank 1  4 x 2 box [4:8, 4:6)  16 B  the only holder
rank 5 wants [0:8, 6:8), 32 B
  from rank 0  4 x 2 box [0:4, 6:8)  16 B  the only holder
  from rank 1  4 x 2 box [4:8, 6:8)  16 B  the only holder
"""
    )


def test_json_names_each_box_its_ranks_and_the_reason():
    answer = json.loads(text_of(*ROWS_TO_COLUMNS, "--json"))
    assert answer["tensor"] == {"name": "tensor", "shape": [8, 8], "dtype": "bfloat16", "nbytes": 128}
    assert len(answer["transfers"]) == 8
    assert answer["transfers"][0] == {
        "tensor": "tensor",
        "box": {"start": [0, 0], "stop": [4, 2]},
        "source": 0,
        "destination": 2,
        "nbytes": 16,
        "rule": "direct",
        "holders": [0],
        "wanted": True,
    }


def test_one_rank_of_one_tensor_is_drawn_alone():
    text = text_of("tensor", *ROWS_TO_COLUMNS, "--rank", 3)
    assert "0 → 3" in text
    assert "1 → 3" in text
    assert "→ 2" not in text
    assert [line for line in text.splitlines() if "wants" in line] == ["rank 3 wants [0:8, 2:4), 32 B"]


def test_a_tensor_of_one_dim_is_one_row_and_what_stays_is_said():
    text = text_of("--shape", "12", "--source", "a=2 [a]", "--destination", "b=3 [b]", "--same-ranks")
    assert text.splitlines()[2:6] == [
        "0       4       6       8       12",
        "┌───────┬───────┬───────┬───────┐",
        "│ 0 → 0 │ 0 → 1 │ 1 → 1 │ 1 → 2 │",
        "└───────┴───────┴───────┴───────┘",
    ]
    assert "and 12 B stay in their rank" in text
    assert "kept         [6:8)  4 B  it holds this already" in text


def test_replicas_are_named_in_one_cell_and_a_choice_of_senders_is_explained():
    text = text_of("--shape", "4x4", "--source", "dp=2 []", "--destination", "dp=4 []")
    assert "│ 0 → 2,3 │" in text or "0 → 2,3" in text
    assert "one of 2 holders (rank 0, rank 1), dealt so that the busiest sends least" in text


def test_the_usual_way_is_shown_to_send_what_nobody_wants():
    text = text_of(*ROWS_TO_COLUMNS, "--strategy", "gather-broadcast")
    assert "gather-broadcast sends 32 boxes, 512 B" in text
    assert "│ 0 → 2-5 │" in text
    assert text.count("not wanted there: gather-broadcast sends whole tensors") == 24


def test_a_tensor_of_three_dims_is_listed_and_not_drawn():
    text = text_of("--shape", "2x4x6", "--source", "a=2 [a]", "--destination", "b=2 [-, b]")
    assert "┌" not in text
    assert "1 x 2 x 6 box [0:1, 0:2, 0:6)" in text


@pytest.mark.parametrize(("shape", "said"), [("scalar", "the scalar"), ("0x5", "sends 0 boxes, 0 B")])
def test_scalars_and_empty_tensors_are_explained_too(shape, said):
    assert said in text_of("--shape", shape, "--source", "a=1 []", "--destination", "b=1 []")


def test_too_many_boxes_are_listed_and_not_drawn():
    text = text_of("--shape", "64x64", "--source", "a=8 [a]", "--destination", "b=32 [-, b]")
    assert "(too many boxes to draw in 80 columns; --rank draws one rank's part)" in text
    assert text.splitlines()[-1].endswith("more lines; --limit 0 shows all")
    assert "more lines" not in text_of(
        "--shape", "64x64", "--source", "a=8 [a]", "--destination", "b=32 [-, b]", "--limit", 0
    )


def test_a_plan_of_many_tensors_needs_a_name_or_a_rank(saved):
    result = run("--plan", saved)
    assert result.exit_code == 2
    assert "The plan has 2 tensors (v, w, ...); name one, or a --rank." in result.stderr
    assert text_of("w", "--plan", saved).startswith("w: bfloat16 [8, 8]")


def test_worlds_that_count_apart_are_named(saved):
    text = text_of("w", "--plan", saved)
    assert "rank of trainer → rank of engine" in text
    assert "│ 1 → 0,2 │ 1 → 1,3 │" in text
    assert "engine rank 3 wants [0:8, 4:8), 64 B" in text
    assert "from trainer rank 1" in text


def test_a_rank_is_what_it_sends_receives_and_keeps(saved):
    text = text_of("--plan", saved, "--rank", "engine:1")
    assert text.startswith("engine rank 1: sends 0 B, receives 70 B, keeps 0 B of its own\n")
    assert "from trainer rank 1  w  4 x 4 box [4:8, 4:8)  32 B" in text
    sender = json.loads(text_of("--plan", saved, "--rank", "trainer:1", "--json"))
    assert {row["way"] for row in sender["boxes"]} == {"to"}


def test_a_rank_without_work_says_so():
    assert "it has nothing to do" in text_of(*ROWS_TO_COLUMNS[:4], "--destination", "tp=2 [-, tp] @4", "--rank", 3)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--rank", "engine:4"], "It has trainer:0 to trainer:1, engine:0 to engine:3."),
        (["--rank", "3"], "the plan has no such rank"),  # of which world?
        (["--rank", "engine:x"], "the plan has no such rank"),
        (["w.weight"], "The plan has no tensor 'w.weight'."),
        (["w.weight", "--json"], "The plan has no tensor 'w.weight'."),
    ],
)
def test_what_the_plan_does_not_have_is_a_wrong_question(saved, args, said):
    result = run("--plan", saved, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_colours_are_for_terminals_and_not_with_no_color():
    plain = text_of(*ROWS_TO_COLUMNS)
    coloured = run(*ROWS_TO_COLUMNS, color=True).stdout
    assert "\x1b[36m0 → 2\x1b[0m" in coloured
    assert "\x1b[33m1 → 2\x1b[0m" in coloured
    assert run(*ROWS_TO_COLUMNS, color=True, env={"NO_COLOR": "1"}).stdout == plain


# -- the drawing ---------------------------------------------------------------------------------------------------


def boxes(**where):
    """Boxes by the letter that is written into them: ``a=((0, 0), (2, 4))``."""
    return {Box(*corners): [Label(letter, 0)] for letter, corners in where.items()}


@pytest.mark.parametrize(
    ("shape", "drawn", "lines"),
    [
        ((4, 4), boxes(a=((0, 0), (4, 4))), ["  0   4", "0 ┌───┐", "  │ a │", "4 └───┘"]),
        (  # a box beside two: the label is in the middle, on the border between them
            (4, 4),
            boxes(a=((0, 0), (4, 2)), b=((0, 2), (2, 4)), c=((2, 2), (4, 4))),
            ["  0   2   4", "0 ┌───┬───┐", "  │   │ b │", "2 │ a ├───┤", "  │   │ c │", "4 └───┴───┘"],
        ),
        (  # what no box covers stays empty
            (4, 4),
            boxes(a=((2, 2), (4, 4))),
            ["  0   2   4", "0 ┌───────┐", "  │       │", "2 │   ┌───┤", "  │   │ a │", "4 └───┴───┘"],
        ),
        (  # numbers are wider than labels
            (1000,),
            boxes(a=((0,), (999,)), b=((999,), (1000,))),
            ["0   999 1000", "┌───┬───┐", "│ a │ b │", "└───┴───┘"],
        ),
    ],
)
def test_a_drawing_has_a_line_where_boxes_end(shape, drawn, lines):
    assert draw_boxes(shape, drawn).splitlines() == lines


@pytest.mark.parametrize(
    ("shape", "drawn"),
    [
        ((2, 2, 2), boxes(a=((0, 0, 0), (2, 2, 2)))),  # three dims
        ((), boxes(a=((), ()))),
        ((4,), {}),
        ((400,), {Box((i,), (i + 1,)): [Label("x", 0)] for i in range(400)}),  # too wide
        ((400, 1), {Box((i, 0), (i + 1, 1)): [Label("x", 0)] for i in range(400)}),  # too high
    ],
)
def test_what_cannot_be_drawn_is_not(shape, drawn):
    assert draw_boxes(shape, drawn) is None
