"""Manifests: what one world holds or wants, published rank by rank and merged."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError, ManifestError
from reshard.layouts.bound import refine
from reshard.layouts.box import Box
from reshard.layouts.holding import HERE, Entry, Pieces, Rule
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.merge import merge
from reshard.layouts.mesh import Mesh
from reshard.layouts.piece import Piece, TensorSpec
from reshard.testing.strategies import cases

W = TensorSpec("w", (10, 4), "float32")
TOP, BOTTOM = Box((0, 0), (6, 4)), Box((6, 0), (10, 4))


def holders(manifest, name):
    """Boxes of a tensor with the ranks that hold them."""
    entry = manifest.entry(name)
    found = {}
    for holding in entry.holdings:
        for box, ranks in holding.boxes(entry.spec):
            found.setdefault(box, set()).update(ranks)
    return found


def test_pieces_given_by_hand_need_no_rule():
    manifest = Manifest.from_pieces([W], {0: [Piece("w", TOP)], 1: [Piece("w", BOTTOM), Piece("w", TOP)]})
    assert holders(manifest, "w") == {TOP: {0, 1}, BOTTOM: {1}}
    assert manifest.size == 2


def test_layouts_become_rules_that_name_all_ranks_of_the_mesh():
    layout = Layout((10, 4), "float32", Mesh({"tp": 2}, [3, 1]), ("tp",))
    manifest = Manifest.from_layouts({"w": layout}, world="trainer")
    assert holders(manifest, "w") == {Box((0, 0), (5, 4)): {3}, Box((5, 0), (10, 4)): {1}}
    assert (manifest.world, manifest.size, manifest.nbytes) == ("trainer", 4, 160)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({3: [Piece("v", TOP)]}, "Rank 3 has a piece of 'v', whose shape nobody declared."),
        (
            {1: [Piece("w", Box((6, 0), (12, 4)))]},  # two rows of padding
            "'w': rank 1 has box [6:12, 0:4), which is not inside the tensor's shape [10, 4]. If the rest is padding, "
            "leave it out of the piece.",
        ),
        (
            {0: [Piece("w", Box((0,), (6,)))]},  # another number of dims
            "'w': rank 0 has box [0:6), which is not inside the tensor's shape [10, 4]. If the rest is padding, leave "
            "it out of the piece.",
        ),
        (
            {2: [Piece("w", TOP), Piece("w", Box((5, 3), (7, 4)))]},
            "'w': rank 2 has two pieces that overlap, [0:6, 0:4) and [5:7, 3:4). Give each element once.",
        ),
        (
            {2: [Piece("w", TOP), Piece("w", TOP)]},  # the same piece twice
            "'w': rank 2 has two pieces that overlap, [0:6, 0:4) and [0:6, 0:4). Give each element once.",
        ),
    ],
)
def test_pieces_that_cannot_be_are_refused_with_rank_and_box(pieces, message):
    with pytest.raises(ManifestError) as caught:
        Manifest.from_pieces([W], pieces)
    assert str(caught.value) == message


def test_a_piece_may_not_cut_a_block():
    spec = TensorSpec("w", (10, 4), "uint8", granule=(4, 1))
    ok = Manifest.from_pieces([spec], {0: [Piece("w", Box((0, 0), (8, 4)))], 1: [Piece("w", Box((8, 0), (10, 4)))]})
    assert ok.size == 2, "the end of the tensor may be a part of a block"
    with pytest.raises(LayoutError, match=r"'w': rank 0 has box \[0:6, 0:4\), whose edge 6 on dim 0 cuts a block of 4"):
        Manifest.from_pieces([spec], {0: [Piece("w", TOP)]})


def test_two_scalars_of_one_rank_overlap():
    scalar = Piece("s", Box((), ()))
    with pytest.raises(ManifestError, match="two pieces that overlap"):
        Manifest.from_pieces([TensorSpec("s", (), "float32")], {0: [scalar, scalar]})


def test_a_name_is_declared_once():
    with pytest.raises(ManifestError, match="'w' is declared 2 times in one manifest; a name is unique"):
        Manifest((Entry(W, ()), Entry(W, ())))


# -- views of a rank's own memory ----------------------------------------------------------------------------------


def test_views_are_pieces_at_their_start_and_know_where_they_lie():
    buffer = torch.zeros(20, 4)
    manifest = Manifest.from_views([("w", (10, 4), (6, 0), buffer[3:7])])
    assert holders(manifest, "w") == {BOTTOM: {HERE}}
    (bound,) = manifest.local
    assert bound.piece == Piece("w", BOTTOM)
    assert bound.binding.buffer == buffer.untyped_storage().data_ptr()
    assert (bound.binding.offset_nbytes, bound.binding.strides) == (48, (4, 1))


def test_the_parts_of_a_fused_buffer_are_views_of_it():
    qkv = torch.zeros(12, 4)
    views = [("q", (6, 4), (0, 0), qkv[:6]), ("k", (3, 4), (0, 0), qkv[6:9]), ("v", (3, 4), (0, 0), qkv[9:])]
    manifest = Manifest.from_views(views)
    assert [bound.binding.offset_nbytes for bound in manifest.local] == [0, 96, 144]
    assert {bound.binding.buffer for bound in manifest.local} == {qkv.untyped_storage().data_ptr()}


def test_interleaved_rows_are_given_by_their_box():
    # Rows of two tensors alternate in blocks of three: [g0-2, u0-2, g3-5, u3-5].
    fused = torch.zeros(2, 2, 3, 4)
    whole = Box((0, 0), (6, 4))
    manifest = Manifest.from_views([("gate", (6, 4), whole, fused[:, 0]), ("up", (6, 4), whole, fused[:, 1])])
    gate, up = manifest.local
    assert gate.piece.box == up.piece.box == whole
    assert gate.binding.shape == (2, 3, 4)
    assert up.binding.offset_nbytes - gate.binding.offset_nbytes == 48
    assert not gate.binding.may_overlap(up.binding)


@pytest.mark.parametrize(
    ("coarse", "fine", "groups"),
    [
        ((8, 3), (2, 4, 3), ((2, 4), (3,))),  # one dim is a product of two
        ((8, 3), (8, 3), ((8,), (3,))),  # the same shape
        ((8, 3), (4, 6), None),  # a dim of the view runs over two of the box
        ((8, 3), (3, 8), None),  # transposed
        ((8,), (2, 2, 2, 1), ((2, 2, 2, 1),)),  # a dim of one element more
        ((1, 6), (1, 2, 3), ((1,), (2, 3))),
        ((), (), ()),
        ((6,), (2,), None),  # elements are missing
    ],
)
def test_a_view_refines_a_box_if_each_dim_is_a_product_of_its_dims(coarse, fine, groups):
    assert refine(coarse, fine) == groups


def test_an_empty_view_declares_the_tensor_and_holds_nothing():
    manifest = Manifest.from_views([("w", (10, 4), (10, 0), torch.zeros(0, 4))])
    assert manifest.names == ("w",)
    assert holders(manifest, "w") == {}
    assert manifest.local == ()


def test_a_scalar_view_is_one_piece():
    manifest = Manifest.from_views([("s", (), (), torch.tensor(3.5))])
    assert holders(manifest, "s") == {Box((), ()): {HERE}}


@pytest.mark.parametrize(
    ("views", "error", "message"),
    [
        (
            [("w", (10, 4), (8, 0), torch.zeros(4, 4))],
            ManifestError,
            r"'w': this rank has box \[8:12, 0:4\), which is not inside the tensor's shape \[10, 4\]",
        ),
        (
            [("w", (10, 4), (0, 0), torch.zeros(5, 4)), ("w", (12, 4), (5, 0), torch.zeros(5, 4))],
            ManifestError,
            r"'w' is declared as float32\[10, 4\] and as float32\[12, 4\] on one rank",
        ),
        (
            [("w", (10, 4), (0, 0), torch.zeros(5, 4)), ("w", (10, 4), (4, 0), torch.zeros(5, 4))],
            ManifestError,
            r"'w': this rank has two pieces that overlap, \[0:5, 0:4\) and \[4:9, 0:4\)",
        ),
        (  # a view whose shape does not make up its box
            [("w", (10, 4), Box((0, 0), (10, 4)), torch.zeros(4, 10))],
            ManifestError,
            "'w'",
        ),
        (  # more dims than the tensor, and no box
            [("w", (10, 4), (0, 0), torch.zeros(2, 5, 4))],
            ManifestError,
            "'w'",
        ),
    ],
)
def test_views_that_cannot_be_are_refused(views, error, message):
    with pytest.raises(error, match=message):
        Manifest.from_views(views)


def test_two_names_of_one_memory_are_aliases():
    weight = torch.zeros(6, 4)
    views = [
        ("lm_head", (6, 4), (0, 0), weight),
        ("embed", (6, 4), (0, 0), weight),
        ("other", (6, 4), (0, 0), weight + 1),
    ]
    assert Manifest.from_views(views).aliases == (("lm_head", "embed"),)


def test_the_same_memory_under_other_boxes_is_no_alias():
    weight = torch.zeros(6, 4)
    assert Manifest.from_views([("a", (6, 4), (0, 0), weight), ("b", (12, 4), (6, 0), weight)]).aliases == ()


def test_a_module_gives_its_parameters_and_persistent_buffers():
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    manifest = Manifest.from_torch(module, groups={"weight": "norm"})
    assert set(manifest.names) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert manifest.entry("weight").spec.group == "norm"
    assert manifest.entry("num_batches_tracked").spec.dtype == "int64"


def test_tied_parameters_of_a_module_are_aliases():
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)})
    module["head"].weight = module["embed"].weight
    assert Manifest.from_torch(module).aliases == (("head.weight", "embed.weight"),)


# -- merging -------------------------------------------------------------------------------------------------------


def test_merging_gives_every_published_piece_its_rank():
    parts = {
        4: Manifest.from_views([("w", (10, 4), (0, 0), torch.zeros(6, 4))]),
        7: Manifest.from_views([("w", (10, 4), (6, 0), torch.zeros(4, 4)), ("only", (2,), (0,), torch.zeros(2))]),
    }
    merged = merge(parts, world="trainer", size=9)
    assert holders(merged, "w") == {TOP: {4}, BOTTOM: {7}}
    assert holders(merged, "only") == {Box((0,), (2,)): {7}}
    assert (merged.world, merged.size) == ("trainer", 9)


def test_plain_tensors_of_several_ranks_are_replicas():
    merged = merge({rank: Manifest.from_torch({"w": torch.zeros(10, 4)}) for rank in range(3)})
    assert holders(merged, "w") == {Box((0, 0), (10, 4)): {0, 1, 2}}


def test_ranks_that_declare_one_name_differently_are_both_named():
    parts = {
        0: Manifest.from_views([("w", (10, 4), (0, 0), torch.zeros(6, 4))]),
        3: Manifest.from_views([("w", (10, 4), (6, 0), torch.zeros(4, 4, dtype=torch.bfloat16))]),
    }
    with pytest.raises(ManifestError) as caught:
        merge(parts)
    assert str(caught.value) == (
        "'w': rank 0 declares float32 [10, 4] and rank 3 declares bfloat16 [10, 4]. All ranks of a world declare the "
        "global shape and the same dtype."
    )


def test_an_alias_counts_only_where_all_ranks_that_have_both_names_agree():
    tied, first, second = torch.zeros(2), torch.zeros(2), torch.zeros(2)

    def views(a, b):
        return Manifest.from_views([("a", (2,), (0,), a), ("b", (2,), (0,), b)])

    only_a = Manifest.from_views([("a", (2,), (0,), first)])
    assert merge({0: views(tied, tied), 1: only_a}).aliases == (("b", "a"),)
    assert merge({0: views(tied, tied), 1: views(first, second)}).aliases == ()


def rule(*placement):
    return Rule(Mesh({"x": 2}), placement, "ceil")


@pytest.mark.parametrize(
    ("votes", "chosen"),
    [
        ([(True, True), (True, True)], 0),  # both readings fit: the first, what FSDP2 holds
        ([(True, True), (False, True)], 1),  # only rank 1 can tell
        ([(True, False), (True, True)], 0),
    ],
)
def test_the_first_reading_that_fits_every_rank_is_taken(votes, chosen):
    readings = (rule(("x",)), rule((), ("x",)))
    parts = {rank: Manifest((Entry(W, readings[:1], readings[1:], fits),)) for rank, fits in enumerate(votes)}
    assert merge(parts).entry("w").holdings == (readings[chosen],)


def test_no_reading_that_fits_all_ranks_is_an_error_that_names_a_rank():
    readings = (rule(("x",)), rule((), ("x",)))
    votes = [(True, False), (False, True)]
    parts = {rank: Manifest((Entry(W, readings[:1], readings[1:], fits),)) for rank, fits in enumerate(votes)}
    with pytest.raises(LayoutError, match=r"no reading of its placements .* \(rank 1 holds"):
        merge(parts)


# -- comparing and storing -----------------------------------------------------------------------------------------


@given(cases(odd_memory=False))
def test_a_manifest_survives_json(case):
    for manifest in (case.src, case.dst):
        text = json.dumps(manifest.to_json())
        again = Manifest.from_json(json.loads(text))
        assert again == manifest
        assert again.digest == manifest.digest


def test_readings_and_aliases_survive_json():
    entry = Entry(W, (rule(("x",)),), (rule((), ("x",)),), (True, False))
    manifest = Manifest((entry,), "world", 2, (("b", "a"),))
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_what_is_not_a_manifest_is_refused():
    with pytest.raises(ManifestError, match="its format is 'reshard-plan-1'"):
        Manifest.from_json({"format": "reshard-plan-1"})


@given(cases(odd_memory=False), st.randoms(use_true_random=False))
def test_the_order_of_registration_does_not_change_the_digest(case, random):
    entries = list(case.src.entries)
    random.shuffle(entries)
    again = Manifest(tuple(entries), case.src.world, case.src.size)
    assert again == case.src
    assert again.digest == case.src.digest


@pytest.mark.parametrize(
    "other",
    [
        Manifest.from_layouts({"w": Layout((8,), "float32", Mesh({"tp": 2}, [1, 0]), ("tp",))}),  # swapped places
        Manifest.from_layouts({"w": Layout((8,), "int32", Mesh({"tp": 2}), ("tp",))}),  # another dtype of equal size
        Manifest.from_layouts({"w": Layout((8,), "float32", Mesh({"tp": 2}))}),  # replicas
        Manifest.from_layouts({"v": Layout((8,), "float32", Mesh({"tp": 2}), ("tp",))}),  # another name
        Manifest.from_layouts({"w": Layout((8,), "float32", Mesh({"tp": 2}), ("tp",))}, world="other"),
    ],
)
def test_different_manifests_have_different_digests(other):
    one = Manifest.from_layouts({"w": Layout((8,), "float32", Mesh({"tp": 2}), ("tp",))})
    assert one.digest != other.digest


def test_a_selection_keeps_what_belongs_to_its_names():
    weight = torch.zeros(2)
    manifest = Manifest.from_views(
        [("a", (2,), (0,), weight), ("b", (2,), (0,), weight), ("c", (2,), (0,), weight + 1)]
    )
    some = manifest.select(["a", "c"])
    assert some.names == ("a", "c")
    assert [bound.piece.name for bound in some.local] == ["a", "c"]
    assert some.aliases == ()


def test_renumbering_moves_rules_and_pieces_alike():
    manifest = Manifest(
        (
            Entry(TensorSpec("a", (4,), "int8"), (Rule(Mesh({"x": 2}), (("x",),), "even"),)),
            Entry(TensorSpec("b", (4,), "int8"), (Pieces(((0, (Box((0,), (4,)),)),)),)),
        )
    )
    moved = manifest.renumber({0: 5, 1: 3}, world="group", size=8)
    assert holders(moved, "a") == {Box((0,), (2,)): {5}, Box((2,), (4,)): {3}}
    assert holders(moved, "b") == {Box((0,), (4,)): {5}}
    assert (moved.world, moved.size) == ("group", 8)


def test_a_rank_without_a_new_number_is_named():
    manifest = Manifest.from_pieces([W], {2: [Piece("w", TOP)]})
    with pytest.raises(ManifestError, match=r"Rank 2 is not a rank of this world \(\[0, 1\]\)"):
        manifest.renumber({0: 0, 1: 1})
