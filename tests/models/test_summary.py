"""A model's numbers added up from an outline equal those of the model with all of its tensors."""

from __future__ import annotations

import pytest

from reshard.errors import ConfigError
from reshard.models.catalogue import CATALOGUE, find_model
from reshard.models.summary import summarize, summary_of


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("form", ["", ":stacked"])
def test_an_outline_adds_up_to_the_whole_model(name, form):
    model = find_model(name + form)
    summary = summary_of(name + form)
    assert summary == summarize(model)
    assert (summary.parameters, summary.tensors) == (model.parameters, model.tensors)
    assert (summary.nbytes, summary.layers, summary.experts) == (model.nbytes, model.layers, model.experts)
    assert summary.tensors + summary.buffers == len(model.weights)
    assert summary.feed_forward_share == model.feed_forward_share


def test_a_name_that_the_catalogue_lacks_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"Nearest: .*qwen3-32b"):
        summary_of("qwen3-32")
