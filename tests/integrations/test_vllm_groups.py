"""What a trace found is split into the least parts that an engine can install alone."""

from __future__ import annotations

import pytest
import torch

from reshard.errors import ManifestError
from reshard.integrations.traced import Buffer, Fill, LoadTrace, LocalCopy, Opaque, Region, TracedPiece
from reshard.integrations.vllm.groups import (
    check_all_written,
    group_names,
    install_groups,
    one_of_each_kind,
    part_of,
    taken_whole,
)
from reshard.layouts.box import Box
from reshard.layouts.piece import Piece, TensorSpec


def region(buffer, rows=4, offset=0):
    return Region(buffer, offset, (rows,), (1,))


def piece(name, buffer, rows=4, offset=0):
    return TracedPiece(Piece(name, Box((0,), (rows,))), region(buffer, rows, offset))


def trace(pieces, **more):
    buffers = dict.fromkeys(p.region.buffer for p in pieces)
    for one in (*more.get("hidden", ()), *(f.region for f in more.get("fills", ()))):
        buffers[one.buffer] = None
    specs = dict.fromkeys([p.piece.name for p in pieces] + [one.name for one in more.get("opaque", ())])
    return LoadTrace(
        tuple(TensorSpec(name, (4,), "float32") for name in specs),
        tuple(Buffer(name, (4,), (1,), "float32") for name in buffers),
        tuple(pieces),
        **more,
    )


PLAIN = [
    piece("model.embed.weight", "model.embed.weight"),
    *(piece(f"model.layers.{n}.{w}.weight", f"model.layers.{n}.attn.{w}.weight") for n in (0, 1, 10) for w in "ab"),
    piece("model.norm.weight", "model.norm.weight"),
    piece("lm_head.weight", "lm_head.weight"),
]


def test_each_numbered_layer_is_a_group_and_each_module_outside_of_them():
    groups = install_groups(trace(PLAIN))
    assert [group.name for group in groups] == [
        "lm_head",
        "model.embed",
        "model.layers.0",
        "model.layers.1",
        "model.layers.10",
        "model.norm",
    ]
    assert groups[2].layers == ("model.layers.0.attn.a", "model.layers.0.attn.b")
    assert group_names(groups)["model.layers.10.b.weight"] == "model.layers.10"
    assert sum(len(group.pieces) for group in groups) == len(PLAIN)


def test_layers_that_differ_in_numbers_alone_are_of_one_kind_and_a_part_is_what_one_of_them_needs():
    whole = trace(
        [*PLAIN, piece("model.layers.10.c.weight", "model.layers.10.attn.c.weight", rows=2)],
        fills=(Fill(region("model.layers.10.attn.c.weight", 2, 2), 0.0), Fill(region("lm_head.bias"), 0.0)),
    )
    groups = install_groups(whole)
    kinds = one_of_each_kind(groups)
    assert [group.name for group in kinds] == [
        "lm_head",
        "model.embed",
        "model.layers.0",
        "model.layers.10",
        "model.norm",
    ]
    part = part_of(whole, kinds[3])
    names = [f"model.layers.10.{w}.weight" for w in "abc"]
    assert [spec.name for spec in part.tensors] == [piece.piece.name for piece in part.pieces] == names
    assert [buffer.name for buffer in part.buffers] == [f"model.layers.10.attn.{w}.weight" for w in "abc"]
    assert part.fills == whole.fills[:1]


def test_fills_go_where_they_are_written():
    fill = Fill(region("model.embed.weight", 1, 3), 0.0)
    groups = {group.name: group for group in install_groups(trace(PLAIN, fills=(fill,)))}
    assert groups["model.embed"].fills == (fill,)
    assert groups["model.norm"].fills == ()


@pytest.mark.parametrize("how", ["a tensor in two layers", "a local copy between two layers"])
def test_layers_that_hang_together_are_one_group_with_all_that_lies_in_its_module(how):
    if how == "a tensor in two layers":
        both = [piece("stacked", f"model.layers.{n}.moe.weight") for n in (0, 1)]
        groups = install_groups(trace([*PLAIN, *both]))
    else:
        copy = LocalCopy(region("model.layers.0.attn.a.weight"), region("model.layers.1.attn.a.weight"))
        groups = install_groups(trace(PLAIN, copies=(copy,)))
    assert [group.name for group in groups] == ["lm_head", "model.embed", "model.layers", "model.norm"]


def test_a_parameter_of_the_root_makes_the_whole_model_one_group():
    (group,) = install_groups(trace([*PLAIN, piece("scale", "scale")]))
    assert group.name == ""
    assert "" in group.layers


def test_opaque_tensors_are_loaded_with_all_that_the_trace_could_not_follow():
    opaque = (Opaque("model.layers.1.odd", "the loader multiplies it"),)
    hidden = (region("model.layers.1.attn.c.weight"),)
    groups = {group.name: group for group in install_groups(trace(PLAIN, opaque=opaque, hidden=hidden))}
    assert groups["model.layers.1"].whole == ("model.layers.1.odd",)
    assert "model.layers.1.attn.c" in groups["model.layers.1"].layers
    assert groups["model.layers.0"].whole == ()
    assert "model.layers.1.odd" in groups["model.layers.1"].tensors


def test_an_opaque_tensor_that_the_trace_was_not_given_may_go_anywhere():
    opaque = (Opaque("odd", "the loader reads its values", is_unseen=True),)
    (group,) = install_groups(trace(PLAIN, opaque=opaque))
    assert (group.name, group.whole) == ("", ("odd",))
    assert len(group.layers) == 9


def test_tensors_named_by_a_pattern_travel_whole():
    asked = taken_whole(trace(PLAIN), {"*.layers.1.*": "as asked"})
    assert [(one.name, one.reason) for one in asked.opaque] == [
        ("model.layers.1.a.weight", "as asked"),
        ("model.layers.1.b.weight", "as asked"),
    ]
    groups = {group.name: group for group in install_groups(asked)}
    assert groups["model.layers.1"].pieces == ()
    assert groups["model.layers.1"].layers == ("model.layers.1.attn.a", "model.layers.1.attn.b")
    assert (asked.direct_nbytes, asked.whole_nbytes) == (7 * 16, 2 * 16)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.register_buffer("table", torch.zeros(4))


def test_a_model_must_be_filled_in_all_elements_of_its_parameters():
    check_all_written(trace([piece("weight", "weight")]), Model())
    check_all_written(trace([piece("weight", "weight", 3)], fills=(Fill(region("weight", 1, 3), 0.0),)), Model())
    with pytest.raises(ManifestError, match=r"'weight' has 1 elements that no offered tensor brings.*'weights'"):
        check_all_written(trace([piece("weights", "weight", 3)]), Model())
    check_all_written(trace([piece("w", "weight", 3)], opaque=(Opaque("x", "?"),), hidden=(region("weight"),)), Model())
