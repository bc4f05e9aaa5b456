"""Names: rules, wrappers, and what two rules must not do."""

from __future__ import annotations

import pytest
import torch

from reshard.errors import ManifestError
from reshard.layouts.manifest import Manifest
from reshard.refit.names import matching, new_name, renamed, without_wrappers


@pytest.mark.parametrize(
    ("name", "rules", "new"),
    [
        ("model.layers.0.w", {"model.": ""}, "layers.0.w"),
        ("model.layers.0.w", {"model.": "a.", "model.layers.": "b."}, "b.0.w"),  # the longest beginning
        ("a.base_layer.w", {".base_layer.": "."}, "a.w"),
        ("model.model.w", {"model.": ""}, "model.w"),  # once
        ("lm_head.w", {"lm_head.w": "embed.w", "lm_head.": "x."}, "embed.w"),  # a whole name comes first
        ("models.w", {"model.": ""}, "models.w"),
        ("lora_A.w", {"lora_A.w": ""}, None),
        ("w", {}, "w"),
    ],
)
def test_a_rule_replaces_a_beginning_a_part_or_a_whole_name(name, rules, new):
    assert new_name(name, rules) == new


def test_a_function_may_leave_tensors_out():
    manifest = Manifest.from_torch({"w": torch.zeros(2), "rotary.inv_freq": torch.zeros(3)})
    kept, _ = renamed(manifest, lambda name: None if "rotary" in name else f"model.{name}")
    assert kept.names == ("model.w",)
    assert [bound.piece.name for bound in kept.local] == ["model.w"]


def test_wrappers_go_and_module_only_where_every_name_has_it():
    assert without_wrappers(["module.a._fsdp_wrapped_module.w", "module.b"]) == {
        "module.a._fsdp_wrapped_module.w": "a.w",
        "module.b": "b",
    }
    assert without_wrappers(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}


def test_two_tensors_of_one_new_name_are_refused_and_all_are_listed():
    names = ["a.w", "b.w", "a.v", "b.v", "c"]
    manifest = Manifest.from_torch({name: torch.zeros(2) for name in names})
    with pytest.raises(ManifestError) as caught:
        renamed(manifest, {"a.": "", "b.": ""})
    assert caught.value.tensors == ("v", "w")
    assert "'a.w', 'b.w' would all be 'w'" in caught.value.message


def test_a_manifest_without_new_names_is_the_same_object():
    manifest = Manifest.from_torch({"w": torch.zeros(2)})
    assert renamed(manifest, None)[0] is manifest


def test_patterns_choose_names_in_their_order():
    assert matching(["layers.1.w", "layers.0.w", "head"], ["head", "layers.0.*"]) == ("layers.0.w", "head")
