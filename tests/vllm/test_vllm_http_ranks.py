"""A live server of two ranks: failed installs and a killed trainer leave it whole, or paused and mended by the next."""

from __future__ import annotations

import pytest
from tests.vllm.deaths import answers_nothing, answers_of, check_serves, held_server, lose_trainer
from tests.vllm.live import Counter

from reshard.integrations.vllm.workers import NOTHING_WRITTEN

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """(trainer, server, what it answers with each kind of weights); installs in the server can be held."""
    with held_server(tmp_path_factory.mktemp("server"), tp=2) as found:
        yield found


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=["first rank", "last rank", "both"])
def test_an_install_that_fails_leaves_a_server_paused_only_if_one_of_its_ranks_has_written(failing, scene):
    trainer, server, known = scene
    first, lost, again = Counter.next(kind=0), Counter.next(kind=1), Counter.next(kind=1)
    trainer.run([first])
    for rank in failing:
        assert server.call_workers("fail_next_install", "before", str(rank))[rank] == "True"
    with pytest.raises(Exception, match="no room") as raised:
        trainer.run([lost])
    text = str(raised.value)
    assert (NOTHING_WRITTEN in text) is (len(failing) == 2)
    if len(failing) == 2:
        assert f"engine serves version {first}" in text
        check_serves(server, known, first)
    else:
        assert f"engine stays paused, its weights may be a mix of {first} and {lost}, until a refit completes" in text
        assert server.get("/is_paused") == {"is_paused": True}
        waiting = answers_nothing(server)
    trainer.run([again])
    assert len(failing) == 2 or waiting.wait().tokens == known[1][0]
    check_serves(server, known, again)


@pytest.mark.parametrize("where", ["between", "inside"])
def test_killed_while_one_rank_is_in_the_install_and_the_other_through_the_server_gets_whole_weights(
    where, scene, tmp_path
):
    trainer, server, known = scene
    first, lost, restarted = Counter.next(kind=0), Counter.next(kind=1), Counter.next(kind=0)
    trainer.run([first])
    assert server.call_workers("hold_next_install", where, str(tmp_path), "1")[1] == "True"
    lose_trainer(trainer, lost, tmp_path / "held")
    waiting = answers_nothing(server)
    (tmp_path / "go").touch()
    assert server.get("/is_paused") == {"is_paused": True}
    assert server.ask("POST", "/resume")[0] == 200  # by hand, to see what it has
    assert waiting.wait().tokens == known[1][0]
    assert answers_of(server) == known[1]
    trainer.run([restarted])
    check_serves(server, known, restarted)
