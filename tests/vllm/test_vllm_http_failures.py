"""A trainer that is killed in a refit of a live server, which answers with whole weights or not, and its successor."""

from __future__ import annotations

import threading

import pytest
from tests.vllm.deaths import answers_nothing, answers_of, check_serves, held_server, lose_trainer
from tests.vllm.live import Counter

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """(trainer, server, what it answers with each kind of weights); installs in the server can be held."""
    with held_server(tmp_path_factory.mktemp("server"), tp=1) as found:
        yield found


@pytest.mark.parametrize("where", ["moving", "before the pause"])
def test_killed_before_the_pause_the_server_answers_with_the_old_weights(where, scene):
    trainer, server, known = scene
    first, lost, restarted = Counter.next(kind=0), Counter.next(kind=1), Counter.next(kind=1)
    trainer.run([first])
    lose_trainer(trainer, lost, where)
    check_serves(server, known, first)
    trainer.run([restarted])
    check_serves(server, known, restarted)


@pytest.mark.parametrize("by_hand", [False, True], ids=["next trainer", "resumed by hand"])
def test_killed_between_pause_and_install_the_server_stays_paused_and_keeps_the_old_weights(by_hand, scene):
    trainer, server, known = scene
    first, lost, restarted = Counter.next(kind=0), Counter.next(kind=1), Counter.next(kind=1)
    trainer.run([first])
    lose_trainer(trainer, lost, "before the install")
    waiting = answers_nothing(server)
    if by_hand:
        assert server.ask("POST", "/resume")[0] == 200
        assert waiting.wait().tokens == known[0][0]
        check_serves(server, known, first)
    trainer.run([restarted])
    assert by_hand or waiting.wait().tokens == known[1][0]
    check_serves(server, known, restarted)


@pytest.mark.parametrize("where", ["before", "between", "inside"])
def test_killed_in_the_install_the_server_ends_it_and_stays_paused_with_whole_new_weights(where, scene, tmp_path):
    trainer, server, known = scene
    first, lost, restarted = Counter.next(kind=0), Counter.next(kind=1), Counter.next(kind=0)
    trainer.run([first])
    assert server.call_workers("hold_next_install", where, str(tmp_path), "0") == ["True"]
    lose_trainer(trainer, lost, tmp_path / "held")
    waiting = answers_nothing(server)
    (tmp_path / "go").touch()
    assert server.get("/is_paused") == {"is_paused": True}  # now that its worker is through
    assert server.get("/weight_info") == {"weight_version": str(first)}
    assert waiting.tokens == []
    assert server.ask("POST", "/resume")[0] == 200  # by hand, to see what it has
    assert waiting.wait().tokens == known[1][0]
    assert answers_of(server) == known[1]
    trainer.run([restarted])
    check_serves(server, known, restarted)


def test_a_restarted_trainer_takes_over_while_the_server_is_still_inside_a_layer(scene, tmp_path):
    trainer, server, known = scene
    first, lost, restarted = Counter.next(kind=0), Counter.next(kind=1), Counter.next(kind=0)
    trainer.run([first])
    server.call_workers("hold_next_install", "inside", str(tmp_path), "0")
    lose_trainer(trainer, lost, tmp_path / "held")
    waiting = answers_nothing(server)
    threading.Timer(5.0, (tmp_path / "go").touch).start()
    trainer.run([restarted])
    assert (tmp_path / "go").exists()
    assert waiting.wait().tokens == known[0][0]
    check_serves(server, known, restarted)


def test_killed_after_the_install_the_server_stays_paused_and_the_restarted_trainer_resumes_it(scene):
    trainer, server, known = scene
    first, lost, restarted = Counter.next(kind=0), Counter.next(kind=1), Counter.next(kind=0)
    trainer.run([first])
    lose_trainer(trainer, lost, "after the install")
    waiting = answers_nothing(server)
    trainer.run([restarted])
    assert waiting.wait().tokens == known[0][0]
    check_serves(server, known, restarted)
