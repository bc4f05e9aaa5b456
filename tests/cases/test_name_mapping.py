"""Cases NM-*: one name is one tensor, and what has no counterpart is told before a byte moves."""

from __future__ import annotations

import pytest
import torch
from tests.cases.dense import POISON, refit, refused_refit

from reshard.errors import ManifestError
from reshard.layouts.manifest import Manifest


def layer(value):
    return torch.full((3, 2), float(value))


@pytest.mark.parametrize("wanted_layers", [2, 4])  # as many as the local names make; and all, half of which nobody has
def test_NM_01_layers_that_every_stage_counts_from_zero_are_refused(wanted_layers):
    wanted = {f"layers.{at}": layer(POISON) for at in range(wanted_layers)}

    def declare(rank):
        if rank == 2:
            return None, Manifest.from_torch(wanted)
        return Manifest.from_torch({f"layers.{at}": layer(2 * rank + at) for at in range(2)}), None

    for error in refused_refit(3, declare):
        assert isinstance(error, ManifestError)
        for name in ("'layers.0'", "'layers.1'", *(f"'layers.{at}'" for at in range(2, wanted_layers))):
            assert name in error.message
        assert "ranks 0 and 1" in error.message
    assert all(torch.equal(tensor, layer(POISON)) for tensor in wanted.values())


def test_NM_01_layers_with_global_names_land_where_they_belong(transport):
    wanted = {f"layers.{at}": layer(POISON) for at in range(4)}

    def declare(rank):
        if rank == 2:
            return None, Manifest.from_torch(wanted)
        return Manifest.from_torch({f"layers.{at}": layer(at) for at in (2 * rank, 2 * rank + 1)}), None

    refit(3, declare, transport=transport)
    assert [wanted[f"layers.{at}"].unique().tolist() for at in range(4)] == [[0.0], [1.0], [2.0], [3.0]]


def test_NM_02_one_error_lists_every_name_that_has_no_source_and_its_nearest():
    source = {
        "_orig_mod.model.language_model.layers.0._checkpoint_wrapped_module.w": layer(1),
        "lm_head.weight": layer(2),
        "q_proj.weight": layer(3),
        "v_proj.weight": layer(4),
    }
    wanted = ["language_model.model.layers.0.w", "language_model.lm_head.weight", "q_proj.base_layer.weight"]
    engine = {**{name: layer(POISON) for name in wanted}, "v_proj.weight": layer(POISON)}
    for error in refused_refit(
        2, lambda rank: (None, Manifest.from_torch(engine)) if rank else (Manifest.from_torch(source), None)
    ):
        assert isinstance(error, ManifestError)
        assert sorted(error.missing) == sorted(wanted)
        assert "'v_proj.weight', which" not in error.message
        assert "Nearest source names: 'lm_head.weight'" in error.message
    assert all(torch.equal(tensor, layer(POISON)) for tensor in engine.values())


def test_NM_02_source_names_that_nobody_wants_are_listed_by_the_refit(transport):
    source = {"w": layer(1), "extra.bias": layer(2)}
    engine = {"w": layer(POISON)}
    told = refit(
        2,
        lambda rank: (None, Manifest.from_torch(engine)) if rank else (Manifest.from_torch(source), None),
        transport=transport,
    )
    assert [compiled.not_covered for _, compiled in told] == [("extra.bias",)] * 2
