"""Traced loaders against real loads: each checkpoint element is a number of its own, and every buffer is compared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from reshard.errors import BindingError, ManifestError, VerifyError
from reshard.integrations.trace_check import check_trace
from reshard.integrations.traced import world_manifest
from reshard.integrations.tracing import trace_load
from reshard.layouts.box import Box
from reshard.layouts.piece import TensorSpec
from reshard.plan.plan import plan_refit

POISON = -1


def specs_of(shapes, dtype="int64"):
    return [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]


def buffers_of(shapes, dtype=torch.int64):
    return {name: torch.full(shape, POISON, dtype=dtype) for name, shape in shapes.items()}


def numbered(specs):
    """The checkpoint, with no number in it twice."""
    weights, at = {}, 1
    for spec in specs:
        whole = Box.whole(spec.shape)
        numel = 0 if whole is None else whole.numel
        weights[spec.name] = torch.arange(at, at + numel).reshape(spec.shape)
        at += numel
    return weights


def landed(trace, weights, shapes):
    """What the pieces, fills and copies of a trace make of the checkpoint."""
    buffers = buffers_of(shapes)
    for name, shape, box, view in trace.views(buffers, trace.landing()):
        assert shape == weights[name].shape
        view.copy_(weights[name][tuple(map(slice, box.start, box.stop))].reshape(view.shape))
    trace.finish(buffers)
    return buffers


def each(function):
    """A loader that does the same with every tensor: ``function(buffers, name, tensor)``."""

    def load(buffers, weights):
        for name, tensor in weights:
            function(buffers, name, tensor)

    return load


def permuted(b, name, w):
    b["w"].copy_(w.permute(2, 0, 1))


def transposed(b, name, w):
    b["w"].data.copy_(w.t().contiguous())


def chunked(b, name, w):
    b["w"].copy_(w.chunk(3)[1])


def narrowed_both_ways(b, name, w):
    b["w"].narrow(0, 1, 4).copy_(w.narrow(0, 2, 4).narrow(1, 3, 5))


def megatron_qkv(b, name, w):
    """A checkpoint whose rows are 2 groups of (2 q, 1 k, 1 v) heads of 3, into [q; k; v]."""
    groups = w.view(2, 4, 3, 5)
    b["qkv"][:12].copy_(groups[:, :2].reshape(12, 5))
    b["qkv"][12:18].copy_(groups[:, 2].reshape(6, 5))
    b["qkv"][18:].copy_(groups[:, 3].reshape(6, 5))


def into_interleaved_rows(b, name, w):
    b["w"].view(4, 3, 5)[:, {"gate": 0, "up": 1}[name]].copy_(w)


def rows_into_interleaved_groups(b, name, w):
    for group in range(4):
        b["w"][group * 6 : group * 6 + 3].copy_(w[group * 3 : group * 3 + 3])


def rows_at_unequal_distances(b, name, w):
    for block, place in enumerate((0, 3, 8)):
        b["w"][place : place + 2].copy_(w[2 * block : 2 * block + 2])


def experts(b, name, w):
    """Each expert's gate and up into one stack, down transposed into another."""
    index, kind = name.split(".")
    if kind == "down":
        b["w2"][int(index)].copy_(w.t())
    else:
        b["w13"][int(index)].narrow(0, 0 if kind == "gate" else 4, 4).copy_(w)


def stacked_experts(b, name, w):
    for index, expert in enumerate(w.unbind(0)):
        gate, up = expert.chunk(2)
        b["w13"][index, :3].copy_(gate.narrow(0, 3, 3))
        b["w13"][index, 3:].copy_(up.narrow(0, 3, 3))


def kv_replicas(b, name, w):
    b["kv"].copy_(w.view(2, 1, 3, 5).expand(2, 2, 3, 5).reshape(12, 5))


def repeat_interleaved(b, name, w):
    b["w"].copy_(w.repeat_interleave(3, dim=0))


def repeated(b, name, w):
    b["w"].copy_(w.repeat(2, 3))


def padded(b, name, w):
    b["w"].copy_(F.pad(w, (0, 2, 1, 1), value=7))


def padded_vocabulary(b, name, w):
    b["w"][: w.shape[0]].copy_(w)
    b["w"][w.shape[0] :].fill_(0)


def zeroed_and_copied_over(b, name, w):
    b["w"].zero_()
    b["w"][2:4, 1:3].copy_(w)


def concatenated(b, weights):
    b["w"].data.copy_(torch.cat([w for _, w in weights], dim=1))


def stacked(b, weights):
    b["w"].copy_(torch.stack([w for _, w in weights], dim=1))


def concatenated_with_zeros(b, name, w):
    b["w"].copy_(torch.cat([w, torch.zeros(2, 5, dtype=w.dtype)]))


def through_a_scratch(b, weights):
    scratch = torch.zeros(6, 5, dtype=torch.int64)
    for at, (_, w) in enumerate(weights):
        scratch[3 * at : 3 * at + 2] = w
    b["w"].copy_(scratch)


def through_a_scratch_that_is_reused(b, weights):
    scratch = torch.empty(4, 5, dtype=torch.int64)
    for at, (_, w) in enumerate(weights):
        scratch.copy_(w)
        b["w"][at].copy_(scratch.t())


def selected(b, name, w):
    b["w"].copy_(w.index_select(0, torch.tensor([4, 0, 2, 2, 5])))


def indexed(b, name, w):
    b["w"].copy_(w[[5, 1, 3]][:, torch.tensor([True, False, True, True, False])])


def put_by_index(b, name, w):
    b["w"][torch.tensor([3, 0, 5])] = w


def rolled(b, name, w):
    b["w"].copy_(w.roll((1, -2), (0, 1)))


def flipped(b, name, w):
    b["w"].copy_(w.flip(0))


def tied_by_a_copy(b, name, w):
    b["embed"].copy_(w)
    b["head"].copy_(w)


def half_tied(b, name, w):
    b["embed"].copy_(w[:4])
    b["head"].copy_(w[2:])


def one_scale_for_all(b, name, w):
    b["w"].fill_(w)


def flat_and_unaligned(b, name, w):
    b["w"].view(-1)[3:20].copy_(w.view(-1)[4:21])


def reshaped_through_a_copy(b, name, w):
    b["w"].copy_(w.t().reshape(6, 4).t())


def default_weight_loader(b, name, w):
    """As inference engines have it."""
    param = b[name]
    if param.numel() == 1 and w.numel() == 1:
        param.data.fill_(w.item())
    else:
        assert param.size() == w.size()
        param.data.copy_(w)


def later_wins(b, name, w):
    b["w"][:, 1:3].copy_(w[:, 1:3])
    b["w"][2:].copy_(w[:3])


def on_another_device(b, name, w):
    b["w"].copy_(w.to("cpu").contiguous().to(b["w"].device))


def strided_rows(b, name, w):
    b["w"].copy_(w[1::2])


MOVING = [
    # loader, checkpoint, buffers, most pieces
    (each(permuted), {"w": (3, 4, 5)}, {"w": (5, 3, 4)}, 1),
    (each(transposed), {"w": (3, 4)}, {"w": (4, 3)}, 1),
    (each(chunked), {"w": (9, 5)}, {"w": (3, 5)}, 1),
    (each(narrowed_both_ways), {"w": (7, 9)}, {"w": (6, 5)}, 1),
    (each(megatron_qkv), {"w": (24, 5)}, {"qkv": (24, 5)}, 6),
    (each(into_interleaved_rows), {"gate": (4, 5), "up": (4, 5)}, {"w": (12, 5)}, 2),
    (each(rows_into_interleaved_groups), {"w": (12, 5)}, {"w": (24, 5)}, 1),
    (each(rows_at_unequal_distances), {"w": (6, 5)}, {"w": (10, 5)}, 2),
    (
        each(experts),
        {f"{i}.{kind}": (5, 4) if kind == "down" else (4, 5) for i in range(3) for kind in ("gate", "up", "down")},
        {"w13": (3, 8, 5), "w2": (3, 4, 5)},
        9,
    ),
    (each(stacked_experts), {"w": (4, 12, 5)}, {"w13": (4, 6, 5)}, 2),
    (each(kv_replicas), {"w": (6, 5)}, {"kv": (12, 5)}, 1),
    (each(repeat_interleaved), {"w": (4, 5)}, {"w": (12, 5)}, 1),
    (each(repeated), {"w": (2, 4)}, {"w": (4, 12)}, 1),
    (each(padded), {"w": (3, 4)}, {"w": (5, 6)}, 1),
    (each(padded_vocabulary), {"w": (5, 4)}, {"w": (8, 4)}, 1),
    (each(zeroed_and_copied_over), {"w": (2, 2)}, {"w": (6, 5)}, 1),
    (concatenated, {"a": (3, 4), "b": (3, 5)}, {"w": (3, 9)}, 2),
    (stacked, {"a": (3, 4), "b": (3, 4)}, {"w": (3, 2, 4)}, 2),
    (each(concatenated_with_zeros), {"a": (3, 5)}, {"w": (5, 5)}, 1),
    (through_a_scratch, {"a": (2, 5), "b": (2, 5)}, {"w": (6, 5)}, 2),
    (through_a_scratch_that_is_reused, {"a": (4, 5), "b": (4, 5)}, {"w": (2, 5, 4)}, 2),
    (each(selected), {"w": (6, 5)}, {"w": (5, 5)}, 4),
    (each(indexed), {"w": (6, 5)}, {"w": (3, 3)}, 6),
    (each(put_by_index), {"w": (3, 5)}, {"w": (6, 5)}, 3),
    (each(rolled), {"w": (5, 7)}, {"w": (5, 7)}, 4),
    (each(flipped), {"w": (4, 5)}, {"w": (4, 5)}, 4),
    (each(tied_by_a_copy), {"w": (4, 5)}, {"embed": (4, 5), "head": (4, 5)}, 1),
    (each(half_tied), {"w": (6, 5)}, {"embed": (4, 5), "head": (4, 5)}, 2),
    (each(one_scale_for_all), {"w": ()}, {"w": (3, 2)}, 1),
    (each(flat_and_unaligned), {"w": (5, 6)}, {"w": (4, 7)}, 3),
    (each(reshaped_through_a_copy), {"w": (3, 8)}, {"w": (4, 6)}, 12),
    (each(default_weight_loader), {"w": (3, 8), "bias": (3,)}, {"w": (3, 8), "bias": (3,)}, 2),
    (each(later_wins), {"w": (5, 4)}, {"w": (5, 4)}, 4),
    (each(on_another_device), {"w": (5, 4)}, {"w": (5, 4)}, 1),
    (each(strided_rows), {"w": (8, 3)}, {"w": (4, 3)}, 4),
]


def name_of(case):
    function = case[0].__closure__[0].cell_contents if case[0].__closure__ else case[0]
    return function.__name__


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", MOVING, ids=name_of)
def test_what_a_loader_only_moves_lands_by_pieces_where_a_real_load_puts_it(case, device):
    load, shapes, buffer_shapes, most = case
    specs, real = specs_of(shapes), buffers_of(buffer_shapes)
    weights = numbered(specs)
    traced = {name: tensor.clone().to(device) for name, tensor in real.items()}

    trace = trace_load(lambda w: load(traced, w), specs, traced)
    load(real, iter(weights.items()))

    assert trace.opaque == trace.hidden == trace.unused == ()
    ours = landed(trace, weights, buffer_shapes)
    assert {name: tensor.tolist() for name, tensor in ours.items()} == {n: t.tolist() for n, t in real.items()}
    assert len(trace.pieces) <= most
    if device == "cpu":  # tracing wrote nothing
        assert all((tensor == POISON).all() for tensor in traced.values())
        assert check_trace(trace, lambda w: load(traced, w), traced) == sum(t.numel() for t in real.values())
        assert all((tensor == POISON).all() for tensor in traced.values())


def changes_the_parameter(b, name, w):
    b[name].copy_(w)
    if name == "w":
        b["w"].mul_(2)


def changes_the_weight(b, name, w):
    if name == "w":
        w.add_(1)
    b[name].copy_(w)


def adds_to_the_parameter(b, name, w):
    if name == "w":
        b["w"].add_(w)
    else:
        b[name].copy_(w)


@pytest.mark.parametrize(
    ("load", "operation"),
    [
        (lambda b, n, w: b[n].copy_(w + 1 if n == "w" else w), "aten.add.Tensor"),
        (lambda b, n, w: b[n].copy_(w.float() * 0.5 if n == "w" else w), "aten.mul.Tensor"),
        (
            lambda b, n, w: b[n].copy_(torch.stack([w.sort(0).values, w]).amax(0) if n == "w" else w),
            "aten.amax.default",
        ),
        (changes_the_parameter, "aten.mul_.Tensor"),
        (changes_the_weight, "aten.add_.Tensor"),
        (adds_to_the_parameter, "aten.add_.Tensor"),
    ],
    ids=["add", "mul", "sort", "mul_ on the parameter", "add_ on the weight", "add_ to the parameter"],
)
def test_what_a_loader_computes_with_is_opaque_with_the_operation_and_the_others_stay_pieces(load, operation):
    specs = specs_of({"w": (3, 4), "v": (3, 4)})
    buffers = buffers_of({"w": (3, 4), "v": (3, 4)})
    trace = trace_load(lambda ws: each(load)(buffers, ws), specs, buffers)
    assert [(one.name, operation in one.reason) for one in trace.opaque] == [("w", True)]
    assert [(p.piece.name, p.region.buffer) for p in trace.pieces] == [("v", "v")]
    assert {region.buffer for region in trace.hidden} == {"w"}
    assert check_trace(trace, lambda ws: each(load)(buffers, ws), buffers) == 12  # all of v


def test_an_opaque_tensor_is_wanted_whole_and_needs_memory_to_land_in():
    specs, buffers = specs_of({"w": (3, 4)}), buffers_of({"w": (3, 2)})
    trace = trace_load(lambda ws: [buffers["w"].copy_(w[:, :2] * 2) for _, w in ws], specs, buffers)
    assert trace.manifest().entry("w").holdings[0].held[0][1] == (Box((0, 0), (3, 4)),)
    with pytest.raises(BindingError, match=r"'w' is opaque \(aten.mul.Tensor computes with it\)"):
        trace.views(buffers)
    landing = trace.landing()
    assert trace.manifest(buffers, landing=landing).local[0].view is landing["w"]


@pytest.mark.parametrize(
    "ask",
    [lambda w: w.sum().item() > 0, lambda w: bool((w == 0).all()), lambda w: torch.equal(w, w), lambda w: w[w > 1]],
)
def test_a_loader_that_asks_for_values_is_traced_again_without_that_tensor(ask):
    specs = specs_of({"a": (3, 4), "scale": (3, 4), "b": (3, 4)})
    buffers = buffers_of({"a": (3, 4), "scale": (3, 4), "b": (3, 4)})

    def load(weights):
        for name, w in weights:
            if name == "scale":
                ask(w)
            buffers[name].copy_(w)

    trace = trace_load(load, specs, buffers)
    assert [(one.name, "reads its values" in one.reason) for one in trace.opaque] == [("scale", True)]
    assert [p.piece.name for p in trace.pieces] == ["a", "b"]
    assert check_trace(trace, load, buffers) == 36


def test_a_tensor_can_be_declared_opaque_and_the_loader_does_not_see_it():
    specs, buffers = specs_of({"a": (2, 2), "b": (2, 2)}), buffers_of({"a": (2, 2), "b": (2, 2)})

    def load(weights):
        for name, w in weights:
            assert name == "a"
            buffers[name].copy_(w)

    trace = trace_load(load, specs, buffers, opaque={"b": "quantised by hand"})
    assert [(one.name, one.reason) for one in trace.opaque] == [("b", "quantised by hand")]
    assert check_trace(trace, load, buffers) == 8


class Model(torch.nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.weight = torch.nn.Parameter(torch.full((4, 3), -1.0, device=device))
        self.register_buffer("scale", torch.full((3,), -1.0, device=device))
        self.tied = self.inner.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", ["data", "parameter"])
def test_a_loader_that_replaces_the_memory_of_a_parameter_is_followed_and_undone(way, device):
    model = Model(device)
    was = dict(model.named_parameters(remove_duplicate=False)), model.inner.weight.data

    def load(weights):
        for name, w in weights:
            if name == "scale":
                model.scale.copy_(w)
            elif way == "data":
                model.inner.weight.data = w.t().contiguous()
            else:
                model.inner.weight = torch.nn.Parameter(w.t())

    specs = specs_of({"weight": (3, 4), "scale": (3,)}, "float32")
    trace = trace_load(load, specs, model)
    assert {(p.piece.name, p.region.buffer, p.piece.box.shape) for p in trace.pieces} == {
        ("weight", "tied" if way == "data" else "inner.weight", (3, 4)),
        ("scale", "scale", (3,)),
    }
    now = dict(model.named_parameters(remove_duplicate=False)), model.inner.weight.data
    assert now[0].keys() == was[0].keys()
    assert all(now[0][name] is was[0][name] for name in now[0])
    assert now[1].untyped_storage()._cdata == was[1].untyped_storage()._cdata
    if device == "cpu":
        check_trace(trace, load, model)
        assert (model.inner.weight == -1).all()
        assert (model.scale == -1).all()


def test_what_is_done_to_a_parameter_after_its_memory_was_replaced_is_done_to_the_new_memory():
    model = Model()

    def load(weights):
        for _, w in weights:
            model.scale.data = w.clone()
            model.scale.data[:2].zero_()
            model.inner.weight.data = torch.full((2, 2), 3.0)  # a number of the loader's own

    trace = trace_load(load, specs_of({"scale": (3,)}, "float32"), model)
    assert [(p.piece.box, p.region.offset) for p in trace.pieces] == [(Box((2,), (3,)), 2)]
    assert {(f.region.buffer, f.region.shape, f.value) for f in trace.fills} == {
        ("scale", (2,), 0.0),
        ("tied", (4,), 3.0),
    }
    assert check_trace(trace, load, model) == 7
    assert model.scale.tolist() == [-1.0] * 3


def test_two_names_of_one_parameter_are_one_buffer_and_an_alias():
    model = Model()
    specs = specs_of({"inner.weight": (4, 3), "tied": (4, 3), "scale": (3,)}, "float32")
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())

    def load(weights):
        for name, w in weights:
            targets[name].data.copy_(w)

    trace = trace_load(load, specs, model)
    assert trace.aliases == (("inner.weight", "tied"),)
    assert [(p.piece.name, p.region.buffer) for p in trace.pieces] == [("tied", "tied"), ("scale", "scale")]
    assert [u.name for u in trace.unused] == ["inner.weight"]  # the later name wins, as in a real load
    assert check_trace(trace, load, model) == 15


def test_a_buffer_that_is_a_view_of_another_shows_each_element_once():
    flat = torch.full((20,), POISON, dtype=torch.int64)
    buffers = {"second": flat[8:20].view(3, 4), "flat": flat}
    specs = specs_of({"w": (3, 4), "v": (8,)})

    def load(weights):
        for name, w in weights:
            (buffers["second"] if name == "w" else flat[:8]).copy_(w)

    trace = trace_load(load, specs, buffers)
    assert [(p.piece.name, p.region.buffer, p.region.offset) for p in trace.pieces] == [
        ("w", "second", 0),
        ("v", "flat", 0),
    ]
    assert check_trace(trace, load, buffers) == 32


def test_tables_that_the_loader_looks_into_are_not_written_by_the_check():
    buffers = {"w": torch.zeros(1, 4), "expert_map": torch.tensor([-1, 0]), "scale": torch.zeros(())}

    def load(weights):
        for name, w in weights:
            place = int(buffers["expert_map"][int(name)].item())
            if place >= 0:
                buffers["w"][place].copy_(w)
                buffers["scale"].copy_(w[0])

    trace = trace_load(load, specs_of({"0": (4,), "1": (4,)}, "float32"), buffers)
    assert [u.name for u in trace.unused] == ["0"]
    assert check_trace(trace, load, buffers) == 7
    assert buffers["expert_map"].tolist() == [-1, 0]


def test_a_check_needs_memory_where_a_trace_needs_none():
    buffers = {"w": torch.zeros(4, device="meta"), "untouched": torch.zeros(2, device="meta")}

    def load(weights):
        for _, w in weights:
            buffers["w"].copy_(w)

    trace = trace_load(load, specs_of({"w": (4,)}, "float32"), buffers)
    with pytest.raises(BindingError, match="'w' is on the meta device"):
        check_trace(trace, load, buffers)
    buffers["w"] = torch.zeros(4)
    assert check_trace(trace, load, buffers) == 4


def test_a_cast_is_a_piece_in_the_dtype_of_the_buffer():
    buffers = {"w": torch.zeros(3, 4, dtype=torch.bfloat16)}
    specs = specs_of({"w": (3, 8)}, "float32")

    def load(weights):
        for _, w in weights:
            buffers["w"].copy_(w[:, 4:].to(torch.bfloat16))

    trace = trace_load(load, specs, buffers)
    assert trace.casts == {"w": ("float32", "bfloat16")}
    assert trace.manifest(buffers).entry("w").spec.dtype == "bfloat16"
    assert check_trace(trace, load, buffers) == 12


def test_rounding_on_the_way_is_no_movement():
    buffers = {"w": torch.zeros(3, 4)}

    def load(weights):
        for _, w in weights:
            buffers["w"].copy_(w.to(torch.bfloat16))

    trace = trace_load(load, specs_of({"w": (3, 4)}, "float32"), buffers)
    assert [one.reason for one in trace.opaque] == [
        "it goes through several dtypes (float32 -> bfloat16 -> float32, kept as float32)"
    ]


def test_bits_that_are_copied_through_a_view_of_another_dtype_move_as_they_are():
    buffers = {"w": torch.zeros(3, 4, dtype=torch.float8_e4m3fn)}

    def load(weights):
        for _, w in weights:
            buffers["w"].view(torch.uint8).copy_(w.view(torch.uint8).flip(0))

    trace = trace_load(load, specs_of({"w": (3, 4)}, "float8_e4m3fn"), buffers)
    assert not trace.opaque
    assert check_trace(trace, load, buffers) == 12


def test_bits_that_are_read_as_another_number_are_opaque():
    buffers = {"w": torch.zeros(3, 4, dtype=torch.int16), "wide": torch.zeros(3, 8, dtype=torch.uint8)}

    def load(weights):
        for _, w in weights:
            buffers["w"].copy_(w.view(torch.int16))
            buffers["wide"].copy_(w.view(torch.uint8))

    trace = trace_load(load, specs_of({"w": (3, 4)}, "bfloat16"), buffers)
    assert [one.name for one in trace.opaque] == ["w"]
    assert not trace.pieces


def test_a_tensor_that_only_goes_into_memory_that_was_not_given_is_an_error():
    kept = torch.zeros(3)  # as a live bias that is left out of the buffers

    def load(weights):
        for name, w in weights:
            (kept if name == "bias" else buffers["w"]).copy_(w)

    buffers = buffers_of({"w": (3,)})
    with pytest.raises(ManifestError, match="'bias' is copied into memory that is none of the buffers"):
        trace_load(load, specs_of({"w": (3,), "bias": (3,)}), buffers)


def test_a_tensor_that_no_rank_takes_is_an_error_unless_it_is_named():
    """Each rank of two keeps its experts and skips the others'; the cached frequencies are nobody's."""
    shapes = {"experts.0": (2, 2), "experts.1": (2, 2), "norm": (2,), "inv_freq": (4,)}
    traces = {}
    for rank in range(2):
        buffers = buffers_of({"experts": (1, 2, 2), "norm": (2,)})

        def load(weights, rank=rank, buffers=buffers):
            for name, w in weights:
                if name == "norm":
                    buffers["norm"].copy_(w)
                elif name == f"experts.{rank}":
                    buffers["experts"][0].copy_(w)

        traces[rank] = trace_load(load, specs_of(shapes), buffers)
        assert [u.name for u in traces[rank].unused] == [f"experts.{1 - rank}", "inv_freq"]
    with pytest.raises(ManifestError, match="'inv_freq' is in the checkpoint and no rank takes anything of it"):
        world_manifest(traces)
    manifest = world_manifest(traces, ignored=["inv_freq"])
    assert manifest.entry("experts.1").holdings[0].ranks == (1,)
    assert manifest.entry("norm").holdings[0].ranks == (0, 1)
    plan_refit(manifest, manifest).proof()


def test_a_loader_that_a_trace_cannot_see_through_fails_the_check():
    """It asks which device a tensor is on, and does something else with data."""
    buffers = buffers_of({"w": (3, 4)})

    def load(weights):
        for _, w in weights:
            buffers["w"].copy_(w if w.is_meta else w.flip(0))

    trace = trace_load(load, specs_of({"w": (3, 4)}), buffers)
    with pytest.raises(VerifyError, match=r"Buffer 'w': 8 of 12 elements differ .* the first at \[0, 0\]"):
        check_trace(trace, load, buffers)
    assert (buffers["w"] == POISON).all()


def test_a_write_that_was_not_seen_shows_where_the_buffer_held_the_same_before():
    buffers = {"w": torch.zeros(4, 2, dtype=torch.int64)}

    def load(weights):
        for _, w in weights:
            buffers["w"][:2].copy_(w)
            if not w.is_meta:
                buffers["w"][2:].zero_()

    trace = trace_load(load, specs_of({"w": (2, 2)}), buffers)
    with pytest.raises(VerifyError, match=r"4 of 8 elements differ .* the first at \[2, 0\]"):
        check_trace(trace, load, buffers)


def test_an_index_without_values_makes_what_it_selects_opaque():
    buffers = buffers_of({"w": (2, 4)})

    def load(weights):
        for _, w in weights:
            buffers["w"].copy_(w[torch.arange(2, device=w.device)])

    trace = trace_load(load, specs_of({"w": (3, 4)}), buffers)
    assert [one.reason for one in trace.opaque] == ["aten.index.Tensor computes with it"]
    assert check_trace(trace, load, buffers) == 0


def test_memory_that_lies_otherwise_than_when_it_was_traced_is_refused():
    buffers = buffers_of({"w": (3, 4)})
    trace = trace_load(lambda ws: [buffers["w"].copy_(w) for _, w in ws], specs_of({"w": (3, 4)}), buffers)
    with pytest.raises(BindingError, match="was int64\\[3, 4\\] with strides \\[4, 1\\] when it was traced"):
        trace.manifest({"w": torch.zeros(4, 3, dtype=torch.int64).t()})
    with pytest.raises(BindingError, match="'w' was traced and is not among those given"):
        trace.manifest({})


def test_an_error_of_the_loader_says_that_it_was_traced_and_how_far():
    def load(weights):
        for name, _ in weights:
            if name == "b":
                raise KeyError(name)

    with pytest.raises(KeyError) as caught:
        trace_load(load, specs_of({"a": (1,), "b": (1,)}), {})
    assert "the last that it had taken is 'b'" in caught.value.__notes__[0]
