"""Plans: who sends which box to whom, compared with a count over dense arrays, and refused where nothing fits."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import CoverageError, LayoutError, ManifestError, PlanError
from reshard.layouts.box import Box
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.layouts.piece import Piece, TensorSpec
from reshard.plan.match import nearest
from reshard.plan.plan import STRATEGIES, Plan, plan_refit
from reshard.testing.strategies import cases

PURE_CASES = cases(odd_memory=False, max_tensors=2)

ROWS = Layout((8, 8), "bfloat16", Mesh({"fsdp": 2}, [0, 1]), ("fsdp",))
COLUMNS = Layout((8, 8), "bfloat16", Mesh({"tp": 4}, [2, 3, 4, 5]), (None, "tp"))


def dense_claims(plan, manifest, name, shape):
    """For each rank of the plan, which elements of a tensor a world holds (or wants) there."""
    claims = {}
    entry = next((e for e in manifest.entries if e.spec.name == name), None)
    for holding in entry.holdings if entry else ():
        for box, ranks in holding.boxes(entry.spec):
            for rank in ranks:
                mask = claims.setdefault(plan.rank_of(manifest.world, rank), np.zeros(shape, bool))
                mask[slices(box)] = True
    return claims


def slices(box):
    return tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))


@settings(max_examples=150)
@given(PURE_CASES, st.sampled_from(STRATEGIES), st.sampled_from((1, 64, 1 << 16)))
def test_every_element_is_written_once_where_it_is_wanted_by_a_rank_that_holds_it(case, strategy, cut_nbytes):
    plan = plan_refit(case.src, case.dst, strategy=strategy, cut_nbytes=cut_nbytes)
    for spec in plan.specs:
        held = dense_claims(plan, case.src, spec.name, spec.shape)
        wanted = dense_claims(plan, case.dst, spec.name, spec.shape)
        written = {rank: np.zeros(spec.shape, int) for rank in range(plan.size)}
        for transfer in plan.transfers(spec.name):
            assert held[transfer.src][slices(transfer.box)].all()
            written[transfer.dst][slices(transfer.box)] += 1
        for rank in range(plan.size):
            want = wanted.get(rank, np.zeros(spec.shape, bool))
            assert (written[rank][want] == 1).all()
            if strategy != "gather-broadcast":
                assert (written[rank][~want] == 0).all()


@settings(max_examples=60)
@given(PURE_CASES, st.sampled_from(STRATEGIES))
def test_what_one_rank_sends_is_what_the_other_receives(case, strategy):
    plan = plan_refit(case.src, case.dst, strategy=strategy, cut_nbytes=32)
    parts = {rank: plan.for_rank(rank) for rank in range(plan.size)}
    sent = {(rank, peer, tensor, box) for rank, part in parts.items() for peer, tensor, box in part.sends}
    received = {(peer, rank, tensor, box) for rank, part in parts.items() for peer, tensor, box in part.receives}
    assert sent == received
    nbytes = {}
    for sender, receiver, tensor, box in sent:
        nbytes[sender, receiver] = nbytes.get((sender, receiver), 0) + box.numel * plan.specs[tensor].itemsize
    assert nbytes == plan.pair_nbytes()
    copied = sum(box.numel * plan.specs[t].itemsize for part in parts.values() for t, box in part.copies)
    assert copied == plan.local_nbytes


@settings(max_examples=60)
@given(PURE_CASES)
def test_no_byte_travels_that_nobody_wants(case):
    plan = plan_refit(case.src, case.dst)
    assert plan.wire_nbytes + plan.local_nbytes == plan.needed_nbytes
    wanted = sum(
        mask.sum() * spec.itemsize
        for spec in plan.specs
        for mask in dense_claims(plan, case.dst, spec.name, spec.shape).values()
    )
    assert plan.needed_nbytes == wanted


def test_two_row_shards_reach_four_column_shards_in_exactly_eight_boxes():
    plan = plan_refit(ROWS, COLUMNS)
    transfers = list(plan.transfers("tensor"))
    assert [(t.src, t.dst, t.box) for t in transfers] == [
        (src, dst, Box((4 * src, 2 * (dst - 2)), (4 * src + 4, 2 * (dst - 2) + 2)))
        for dst in (2, 3, 4, 5)
        for src in (0, 1)
    ]
    assert {t.nbytes for t in transfers} == {16}
    assert plan.wire_nbytes == 128


def test_the_usual_way_sends_every_tensor_whole_to_every_rank_that_needs_a_part():
    plan = plan_refit(ROWS, COLUMNS, strategy="gather-broadcast")
    assert plan.wire_nbytes == 4 * 128
    assert plan.needed_nbytes == 128
    assert plan.received_nbytes() == dict.fromkeys((2, 3, 4, 5), 128)
    assert plan.proof().delivered_nbytes == 128


def test_the_usual_way_spares_a_rank_what_it_holds_and_those_that_need_nothing():
    src = Layout((8,), "uint8", Mesh({"x": 2}, [0, 1]), ("x",))
    dst = Manifest.from_pieces(
        [TensorSpec("tensor", (8,), "uint8")], {1: [Piece("tensor", Box((0,), (1,)))], 2: []}, size=3
    )
    plan = plan_refit(Manifest.from_layouts({"tensor": src}), dst, strategy="gather-broadcast")
    assert plan.pair_nbytes() == {(0, 1): 4}


def test_a_rank_that_has_what_it_needs_copies_it_and_receives_nothing():
    layout = Layout((8, 8), "float32", Mesh({"tp": 2}), ("tp",))
    plan = plan_refit(layout, layout)
    assert plan.wire_nbytes == 0
    assert plan.local_nbytes == 256
    assert [part.box for part in plan.transfers("tensor")] == [Box((0, 0), (4, 8)), Box((4, 0), (8, 8))]


def test_eight_replicated_sources_send_every_byte_once_in_two_messages():
    # A small string is not cut among its many holders: 4096 bytes over a mesh of dp4 x tp2 to two ranks (PC-02).
    src = Layout((64, 16), "float32", Mesh({"dp": 4, "tp": 2}), (("tp",),))
    dst = Layout((64, 16), "float32", Mesh({"tp": 2}, [8, 9]), ("tp",))
    plan = plan_refit(src, dst)
    assert plan.wire_nbytes == 4096
    assert len(plan.pair_nbytes()) == 2


def test_a_large_string_is_shared_by_all_its_holders():
    src = Layout((4096, 256), "float32", Mesh({"dp": 4}))
    dst = Layout((4096, 256), "float32", Mesh({"x": 1}, [4]))
    plan = plan_refit(src, dst)
    fair = 4096 * 256 * 4 // 4
    assert set(plan.sent_nbytes()) == {0, 1, 2, 3}
    assert all(abs(nbytes - fair) <= fair // 32 for nbytes in plan.sent_nbytes().values())
    assert all(box.shape[1] == 256 for _, _, box in plan.for_rank(4).receives), "cuts prefer whole rows"


def test_replicas_of_the_destination_are_served_by_different_sources():
    src = Layout((64, 64), "float32", Mesh({"dp": 4}))
    dst = Layout((64, 64), "float32", Mesh({"dp": 4}, [4, 5, 6, 7]))
    assert plan_refit(src, dst).sent_nbytes() == dict.fromkeys(range(4), 64 * 64 * 4)


def test_worlds_of_different_names_are_different_processes():
    layout = Layout((8,), "uint8", Mesh({"tp": 2}), ("tp",))
    src = Manifest.from_layouts({"w": layout}, world="trainer")
    plan = plan_refit(src, Manifest.from_layouts({"w": layout}, world="generator"))
    assert plan.pair_nbytes() == {(0, 2): 4, (1, 3): 4}
    assert [plan.rank_name(rank) for rank in range(4)] == [
        "trainer rank 0",
        "trainer rank 1",
        "generator rank 0",
        "generator rank 1",
    ]


def test_one_source_can_serve_several_destination_worlds():
    layout = Layout((8,), "uint8", Mesh({"x": 1}))
    src = Manifest.from_layouts({"a": layout, "b": layout}, world="trainer")
    dst = [Manifest.from_layouts({name: layout}, world=f"engine {name}") for name in ("a", "b")]
    plan = plan_refit(src, dst)
    assert plan.pair_nbytes() == {(0, 1): 8, (0, 2): 8}
    assert plan.proof().delivered_nbytes == 16


def test_source_tensors_that_nobody_wants_stay_where_they_are():
    layout = Layout((8,), "uint8", Mesh({"x": 1}))
    src = Manifest.from_layouts({"a": layout, "b": layout}, world="trainer")
    plan = plan_refit(src, Manifest.from_layouts({"b": layout}, world="generator"))
    assert [spec.name for spec in plan.specs] == ["b"]


def test_a_tensor_without_elements_needs_no_message():
    src, dst = (Layout((0, 5), "float32", Mesh({"x": 2}, ranks), ("x",)) for ranks in ([0, 1], [2, 3]))
    plan = plan_refit(src, dst)
    assert list(plan.transfers("tensor")) == []
    assert plan.pair_nbytes() == {}
    assert plan.proof().delivered_nbytes == 0


def test_a_scalar_reaches_every_rank():
    plan = plan_refit(Layout((), "float32", Mesh({"x": 2})), Layout((), "float32", Mesh({"x": 3}, [2, 3, 4])))
    assert [(t.dst, t.box) for t in plan.transfers("tensor")] == [(rank, Box((), ())) for rank in (2, 3, 4)]


# -- identity ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(PURE_CASES, st.sampled_from(STRATEGIES))
def test_a_plan_survives_json(case, strategy):
    plan = plan_refit(case.src, case.dst, strategy=strategy, cut_nbytes=16)
    text = json.dumps(plan.to_json())
    again = Plan.from_json(json.loads(text))
    assert again == plan
    assert again.digest == plan.digest == json.loads(text)["digest"]
    assert json.dumps(again.to_json()) == text


def test_what_is_not_a_plan_is_refused():
    with pytest.raises(PlanError, match="its format is 'reshard-manifest-1', not 'reshard-plan-2'"):
        Plan.from_json(Manifest.from_layouts({"w": ROWS}).to_json())


def test_planning_the_same_again_gives_the_same_plan():
    assert plan_refit(ROWS, COLUMNS) == plan_refit(ROWS, COLUMNS)
    assert plan_refit(ROWS, COLUMNS).digest == plan_refit(ROWS, COLUMNS).digest


@pytest.mark.parametrize(
    "other",
    [
        plan_refit(ROWS, COLUMNS.with_mesh(Mesh({"tp": 4}, [3, 2, 4, 5]))),  # two swapped coordinates
        plan_refit(ROWS, COLUMNS.with_mesh(Mesh({"tp": 4}, [6, 7, 8, 9]))),  # other ranks
        plan_refit(*(Layout(side.shape, "float16", side.mesh, side.placement) for side in (ROWS, COLUMNS))),  # dtype
        plan_refit(ROWS, COLUMNS, strategy="gather-broadcast"),
        plan_refit(ROWS, COLUMNS, cut_nbytes=1),
    ],
)
def test_another_refit_has_another_digest(other):
    assert other.digest != plan_refit(ROWS, COLUMNS).digest


def test_the_digest_says_which_routes_were_chosen():
    plan = plan_refit(ROWS, COLUMNS)
    assert replace(plan, routes=plan.routes[1:]).digest != plan.digest


# -- refusals ------------------------------------------------------------------------------------------------------


def manifest(world, **tensors):
    layouts = {name: Layout(shape, dtype, Mesh({"x": 1})) for name, (shape, dtype) in tensors.items()}
    return Manifest.from_layouts(layouts, world=world)


def test_one_error_lists_all_tensors_that_do_not_fit():
    src = manifest("trainer", q=((8, 8), "float32"), kv=((4, 8), "float32"), z=((2,), "int8"), bias=((8,), "bfloat16"))
    dst = manifest("engine", q=((8, 9), "float32"), k=((4, 8), "float32"), z=((2,), "int8"), bias=((8,), "int16"))
    with pytest.raises(ManifestError) as caught:
        plan_refit(src, dst)
    assert str(caught.value).splitlines() == [
        "'bias': the source holds bfloat16, engine wants int16. Bytes are never reinterpreted: convert one side, "
        "source.to(torch.int16).",
        "engine rank 0 wants 'k', which no source rank holds. Nearest source names: 'kv'.",
        "'q': the source's shape is [8, 8], engine's is [8, 9]. Global shapes must be equal; leave padding out of the "
        "pieces.",
    ]
    assert caught.value.missing == ("k",)
    assert len(caught.value.faults) == 3


def test_a_missing_name_is_shown_with_the_nearest_ones():
    src = manifest("trainer", **{f"layers.0.{name}.weight": ((4,), "int8") for name in ("q", "k", "v")})
    dst = manifest("engine", **{"layers.0.qkv.weight": ((12,), "int8")})
    with pytest.raises(ManifestError, match=r"engine rank 0 wants 'layers\.0\.qkv\.weight', which no source rank"):
        plan_refit(src, dst)
    with pytest.raises(ManifestError, match=r"Nearest source names: 'layers\.0\.[qkv]\.weight', "):
        plan_refit(src, dst)


def test_of_names_that_differ_in_numbers_the_one_with_the_same_numbers_is_the_nearest():
    known = [f"layers.{at}.{name}.weight" for at in range(9000) for name in ("q_proj", "gate_proj")]
    assert nearest("layers.8000.qproj.weight", known).startswith("Nearest source names: 'layers.8000.q_proj.weight'")


def test_a_name_like_no_other_is_shown_with_their_number_and_the_first_of_them():
    with pytest.raises(ManifestError, match=r"which no source rank holds\. The source has 1 tensor: 'w'\."):
        plan_refit(manifest("trainer", w=((4,), "int8")), manifest("engine", zzzzzz=((4,), "int8")))


def test_many_faults_are_cut_short_in_the_message_and_complete_in_the_facts():
    dst = manifest("engine", **{f"t{at}": ((4,), "int8") for at in range(50)})
    with pytest.raises(ManifestError) as caught:
        plan_refit(manifest("trainer", w=((4,), "int8")), dst)
    assert str(caught.value).endswith("and 30 more")
    assert len(caught.value.missing) == 50


def test_two_sides_name_the_same_block():
    sides = [
        Manifest.from_layouts({"w": Layout((8,), "int8", Mesh({"x": 1}), granule=(granule,))}, world=str(granule))
        for granule in (2, 4)
    ]
    with pytest.raises(ManifestError, match=r"'w': the source's granule is \[2\], 4's is \[4\]"):
        plan_refit(*sides)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_block_that_one_side_declares_may_not_be_cut_by_the_other(by_hand):
    halves = Layout((4, 10), "int8", Mesh({"tp": 2}), (None, "tp"))
    src = Manifest.from_layouts({"scale": halves}, world="trainer")
    if by_hand:
        pieces = {rank: [Piece("scale", box) for box in halves.boxes(rank)] for rank in (0, 1)}
        src = Manifest.from_pieces([TensorSpec("scale", (4, 10), "int8")], pieces, world="trainer")
    dst = Manifest.from_layouts({"scale": Layout((4, 10), "int8", Mesh({"tp": 1}), granule=(1, 4))}, world="engine")
    with pytest.raises(LayoutError, match=r"'scale'.* 5 .*cuts a block of 4"):
        plan_refit(src, dst)


def test_a_gap_names_tensor_rank_and_box():
    spec = TensorSpec("lm_head.weight", (10, 4), "float32")
    src = Manifest.from_pieces([spec], {0: [Piece(spec.name, Box((0, 0), (8, 4)))]}, world="trainer")
    dst = Manifest.from_pieces([spec], {5: [Piece(spec.name, Box((6, 0), (10, 4)))]}, world="engine")
    with pytest.raises(CoverageError) as caught:
        plan_refit(src, dst)
    assert str(caught.value) == (
        "'lm_head.weight': engine rank 5 needs [8:10, 0:4) and no source rank holds it. The sources hold 32 elements "
        "in 1 boxes of a tensor of shape [10, 4]. If this part is padding, leave it out of the destination's pieces."
    )
    assert (caught.value.tensor, caught.value.box) == ("lm_head.weight", Box((8, 0), (10, 4)))


def test_padding_that_no_piece_names_is_no_gap():
    spec = TensorSpec("lm_head.weight", (10, 4), "float32")
    part = {0: [Piece(spec.name, Box((0, 0), (8, 4)))]}
    plan = plan_refit(
        Manifest.from_pieces([spec], part, world="trainer"), Manifest.from_pieces([spec], part, world="engine")
    )
    assert plan.wire_nbytes == 8 * 4 * 4


def test_pieces_of_the_rank_that_publishes_must_be_merged_first():
    src = Manifest.from_views([("w", (4,), (0,), torch.zeros(4))], world="trainer")
    with pytest.raises(ManifestError, match="merge"):
        plan_refit(src, manifest("engine", w=((4,), "float32")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "magic"}, r"Strategy 'magic' is unknown; use one of reshard, point-to-point, gather-broadcast\."),
    ],
)
def test_an_option_that_cannot_work_is_refused(options, message):
    with pytest.raises(PlanError, match=message):
        plan_refit(ROWS, COLUMNS, **options)


def test_asking_for_a_tensor_that_is_not_in_the_plan_shows_the_nearest():
    with pytest.raises(PlanError, match=r"The plan has no tensor 'tensors'\. Nearest source names: 'tensor'\."):
        list(plan_refit(ROWS, COLUMNS).transfers("tensors"))


# -- a real model's shapes -----------------------------------------------------------------------------------------


def smollm2_shapes():
    """The 272 tensors of SmolLM2-135M, tied embedding once."""
    hidden, inner, kv = 576, 1536, 192
    shapes = {"embed": (49152, hidden), "norm": (hidden,)}
    for layer in range(30):
        at = f"layers.{layer}."
        shapes |= {
            at + "q": (hidden, hidden),
            at + "k": (kv, hidden),
            at + "v": (kv, hidden),
            at + "o": (hidden, hidden),
        }
        shapes |= {at + "gate": (inner, hidden), at + "up": (inner, hidden), at + "down": (hidden, inner)}
        shapes |= {at + "ln1": (hidden,), at + "ln2": (hidden,)}
    return shapes


def test_a_small_model_on_128_fsdp_ranks_reaches_32_replicas_of_tp4():
    fsdp, tp = Mesh({"dp": 128}), Mesh({"dp": 32, "tp": 4})
    by_kind = {
        **dict.fromkeys(("q", "k", "v", "gate", "up", "embed"), ("tp",)),
        **dict.fromkeys(("o", "down"), (None, "tp")),
    }
    shapes = smollm2_shapes()
    src = Manifest.from_layouts(
        {name: Layout(shape, "bfloat16", fsdp, ("dp",), "ceil") for name, shape in shapes.items()}, world="trainer"
    )
    dst = Manifest.from_layouts(
        {
            name: Layout(shape, "bfloat16", tp, by_kind.get(name.rsplit(".", 1)[-1], ()), "ceil")
            for name, shape in shapes.items()
        },
        world="generator",
    )
    plan = plan_refit(src, dst)
    model_nbytes = sum(int(np.prod(shape)) * 2 for shape in shapes.values())
    norms = sum(shape[0] * 2 for shape in shapes.values() if len(shape) == 1)
    proof = plan.proof()
    assert proof.tensors == 272
    assert proof.patterns <= 8, "tensors of equal shape and holders are cut into cells once"
    assert proof.delivered_nbytes == proof.needed_nbytes == 32 * (model_nbytes + 3 * norms)
    assert plan.wire_nbytes == proof.needed_nbytes
    assert set(plan.received_nbytes()) == set(range(128, 256))
    assert len(set(plan.received_nbytes().values())) == 1, "all generator ranks hold equally much"
    assert len(plan.routes) < 10_000, "the plan does not grow with pairs times tensors"
