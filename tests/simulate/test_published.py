"""What was published: every row can be planned, and says what it is."""

import pytest

from reshard.simulate.published import PUBLISHED


@pytest.mark.parametrize("refit", PUBLISHED, ids=lambda refit: f"{refit.title}, {refit.where or 'nobody'}")
def test_a_row_says_who_published_what_and_a_candidate_says_why(refit):
    assert bool(refit.figures) == bool(refit.where)
    assert all(0 < figure.low_seconds <= figure.high_seconds for figure in refit.figures)
    assert {figure.what for figure in refit.figures} <= {"usual way", "point-to-point", "reshard"}
    assert refit.is_layout_published or refit.remark


def test_the_configurations_that_the_field_has_published_are_there():
    assert {refit.title for refit in PUBLISHED} >= {
        "DeepSeek-V3 on H100",
        "DeepSeek-V3 on GB200",
        "Qwen3-235B on H100",
        "Qwen3-235B on GB200",
        "Nemotron Ultra v3 on GB200",
        "Qwen3-30B on H100",
        "Qwen3-32B on H100",
    }
    assert any(refit.model == "generic-2.4t" and refit.figures[0].low_seconds == 4.3 for refit in PUBLISHED)
