"""What users get wrong in a session is told at once, by name, before a byte moves; and the next call works."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
from tests.refit.sessions import error_of, run

import reshard
from reshard.errors import (
    BindingError,
    ConfigError,
    InstallError,
    ManifestError,
    PeerError,
    ReshardError,
    TransportError,
)

PAIR = {"trainer": 1, "gen0": 1}
SOON = timedelta(seconds=2)


def bring(me, session, tensors, **options):
    (session.offer if me.is_source else session.accept)(tensors, **options)


# -- connect and serve_store --


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"expect": {"trainer": 1}}, "does not say who meets"),
        ({"expect": {"trainer": 1, "gen0": 0}}, "does not say who meets"),
        ({"expect": ["trainer", "gen0"]}, "does not say who meets"),
        ({"world": "gen7"}, "world='gen7' is none of those that are expected: 'trainer', 'gen0'"),
        ({"rank": 5}, r"rank=5 \(given, or from the launcher's environment\) is none of the 1 ranks"),
        ({"rank": "0"}, "rank='0' is no whole number"),
        ({"timeout": 30}, "timeout=30 is no time span"),
        ({"timeout": timedelta(0)}, "timeout=0 s cannot work"),
        ({"timeout": timedelta.max}, "a year at most"),
        ({"staging_nbytes": "lots"}, "staging_nbytes='lots'"),
        ({"staging_nbytes": None}, "staging_nbytes=None"),
        ({"routes": "whole"}, "routes='whole'"),
        ({"topology": "dgx-h100"}, "topology='dgx-h100' is no Topology"),
        ({"session": None}, "session=None is no name"),
        ({"store": None}, "store=None is no store"),
        ({"store": "tcp://127.0.0.1:99999"}, "is no address"),
    ],
)
def test_an_argument_of_connect_that_cannot_work_is_refused_without_waiting_for_anybody(options, said):
    given = {"store": "tcp://127.0.0.1:1", "role": "source", "world": "trainer", "rank": 0, "expect": PAIR, **options}
    with pytest.raises(ConfigError, match=said):
        reshard.connect(given.pop("store"), **given)


def test_what_listens_at_the_address_and_is_no_store_is_told_at_the_deadline():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(TransportError, match=r"does not answer as a store does.*Call connect again\.$"):
            reshard.connect(address, role="source", world="trainer", rank=0, expect=PAIR, timeout=SOON)


@pytest.mark.parametrize("host", ["0.0.0.0", "nowhere.invalid"])
def test_a_store_is_served_under_a_name_that_leads_to_it(host):
    with pytest.raises(ConfigError, match=r"under which (the members|they) reach this machine"):
        reshard.serve_store(host)


# -- offer and accept --


class Unfilled(torch.Tensor):
    """As quantisation libraries make them: a wrapper of other tensors."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *_):
        return NotImplemented


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (None, "A NoneType names no tensors"),
        (torch.zeros(3), "A Tensor names no tensors"),
        ({0: torch.zeros(3)}, "name is a text, not a int"),
        ({"w": torch.eye(2).to_sparse()}, "'w' is of layout sparse_coo"),
        ({"w": torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)}, "'w' is of layout nested"),
        ({"w": torch.nn.UninitializedParameter()}, "'w' has no shape yet"),
        ({"w": torch.zeros(2, dtype=torch.complex64).conj()}, "'w' is a lazy view"),
        ({"w": torch.zeros(3).numpy()}, "'w' is a ndarray, not a tensor"),
        ({"w": Unfilled()}, "'w' is a Unfilled without memory of its own"),
    ],
)
def test_what_is_no_dense_tensor_with_a_name_is_refused_by_name(what, said):
    with pytest.raises(ManifestError, match=said):
        reshard.Manifest.from_torch(what)


@pytest.mark.filterwarnings("ignore:.*quantized")
def test_a_quantised_tensor_is_refused_since_its_scale_would_stay_behind():
    view = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    with pytest.raises(ManifestError, match=r"'w' is quantised \(torch.qint8\)"):
        reshard.Manifest.from_views([("w", (4,), (0,), view)])


def overlapping():
    return torch.zeros(10).as_strided((4, 4), (2, 1))


@pytest.mark.parametrize("commit", ["staged", "in-place"])
@pytest.mark.parametrize("target", [lambda: torch.zeros(4).expand(4, 4), overlapping], ids=["expanded", "strided"])
def test_a_destination_whose_elements_share_memory_is_refused_before_it_is_written(target, commit):
    def body(me, session):
        tensor = torch.arange(16.0).reshape(4, 4) if me.is_source else target()
        bring(me, session, {"w": tensor})
        error = error_of(lambda: session.refit(1))
        assert isinstance(error, PeerError if me.is_source else BindingError)
        assert "'w' [0:4, 0:4): elements of it share memory" in error.message
        assert me.is_source or not tensor.any()
        assert not session.serving.torn

    run(PAIR, body, commit=commit)


@pytest.mark.parametrize("who", ["trainer", "gen0"])
def test_weights_that_were_freed_since_are_named_and_the_process_lives_on(who):
    """As sharding and sleeping engines free them: the tensor is there, its storage is empty."""

    def body(me, session):
        weight = torch.ones(4) if me.is_source else torch.zeros(4)
        bring(me, session, {"w": weight})
        session.refit(1)
        if me.world == who:
            weight.untyped_storage().resize_(0)
        error = error_of(lambda: session.refit(2))
        assert isinstance(error, BindingError)
        assert f"{who} rank 0 cannot take part: 'w' has no memory" in error.message
        if me.world == who:
            weight.untyped_storage().resize_(16)
            weight.fill_(3)
            bring(me, session, {"w": weight})
        session.refit(2)
        return weight.tolist()

    trained, served = run(PAIR, body)
    assert trained == served


def test_tensors_without_memory_are_named():
    def body(me, session):
        bring(me, session, {"w": torch.zeros(4) if me.is_source else torch.zeros(4, device="meta")})
        error = error_of(lambda: session.refit(1))
        assert "gen0 rank 0 cannot take part: 'w' has no memory" in error.message

    run(PAIR, body)


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"installed": 3}, "installed=3 cannot be called"),
        ({"install": "hook"}, "install='hook' cannot be called"),
        ({"loaders": {"w": None}}, r"loaders\['w'\]=None cannot be called"),
        ({"loaders": print}, "give a loader for each pattern"),
        ({"rename": 5}, "rename=5"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_by_accept_and_not_at_the_commit(hooks, said):
    def body(me, session):
        if not me.is_source:
            with pytest.raises(ConfigError, match=said):
                session.accept({"w": torch.zeros(4)}, **hooks)

    run(PAIR, body)


def test_install_groups_by_name_count_for_a_manifest_too():
    def body(me, session):
        told = []
        if not me.is_source:
            groups = {"head.w": "last"}
            session.accept(me.manifest, groups=groups, installed=lambda group, version: told.append(group))
        session.refit(1)
        assert me.is_source or told == ["", "last"]

    run(PAIR, body)


def test_options_that_differ_are_told_with_the_names_of_the_members():
    def body(me, address):
        session = me.connect(address, PAIR, verify="sum" if me.is_source else "none")
        error = error_of(lambda: session.refit(1))
        assert "trainer rank 0 called with verify='sum' and gen0 rank 0 with verify='none'" in error.message
        assert "when they connect" in error.message

    run(PAIR, body, connect=False)


# -- refit --


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"version": "2"}, "version='2' is no whole number"),
        ({"version": 1.5}, "version=1.5 is no whole number"),
        ({"version": -1}, "versions count from 0"),
        ({"names": []}, "names no tensor"),
        ({"names": [5]}, "give one text, or a list of texts"),
        ({"to": 5}, "give one text, or a list of texts"),
        ({"timeout": 5}, "timeout=5 is no time span"),
        ({"timeout": timedelta(0)}, "timeout=0 s cannot work"),
    ],
)
def test_an_argument_of_refit_that_cannot_work_is_refused_and_the_next_call_works(arguments, said):
    def body(me, session):
        me.train(3)
        with pytest.raises(ConfigError, match=said):
            session.refit(**{"version": 3, **arguments})
        session.refit(torch.tensor(3))
        assert me.is_version(3)

    run(PAIR, body)


def test_a_lease_and_a_wait_are_for_a_whole_number():
    def body(me, session):
        session.refit(1)
        calls = [lambda: session.wait_for("1")]
        if me.is_source:
            with pytest.raises(ConfigError, match="it calls offer, not lease"):
                session.lease()
        else:
            calls.append(lambda: session.lease(version="1"))
        for call in calls:
            with pytest.raises(ConfigError, match="version='1' is no whole number"):
                call()

    run(PAIR, body)


@pytest.mark.parametrize(
    ("where", "async_op", "said"),
    [
        ("a hook", False, "refit was called in a hook"),
        ("a hook", True, "refit was called in a hook"),
        ("another thread", False, "another call of it is under way here"),
    ],
)
def test_a_refit_within_a_refit_is_refused_and_harms_neither(where, async_op, said):
    def body(me, session):
        told = []

        def again(*_):
            told.append(error_of(lambda: session.refit(9)))

        def installed(*_):
            if where == "a hook":
                again()
            else:
                thread = threading.Thread(target=again)
                thread.start()
                thread.join(20)

        if not me.is_source:
            session.accept(me.manifest, installed=installed)
        for version in (1, 2):
            me.train(version)
            done = session.refit(version, async_op=async_op)
            if async_op:
                done.wait()
            assert me.is_version(version)
        assert me.is_source or [type(error) for error in told] == [ConfigError] * 2
        assert me.is_source or said in told[0].message

    run(PAIR, body)


@pytest.mark.parametrize(("hook", "async_op"), [("install", False), ("committed", True)])
def test_a_close_within_a_refit_is_refused_and_harms_it_not(hook, async_op):
    def body(me, session):
        told = []
        if not me.is_source:
            session.accept(me.manifest, **{hook: lambda _: told.append(error_of(session.close))})
        for version in (1, 2):
            me.train(version)
            done = session.refit(version, async_op=async_op)
            assert (done.wait() if async_op else done).version == version
        session.close()
        if not me.is_source:
            assert [type(error) for error in told] == [ConfigError] * len(told)
            assert "close was called in a hook" in told[0].message
            assert len(told) >= 2
        with pytest.raises(ConfigError, match="is closed here"):
            session.refit(3)

    run(PAIR, body)


def test_a_close_in_another_thread_waits_for_the_refit_that_is_under_way():
    def body(me, session):
        closers = []

        def close_meanwhile(*_):
            closers.append(threading.Thread(target=session.close))
            closers[0].start()
            time.sleep(0.2)
            assert closers[0].is_alive()

        if not me.is_source:
            session.accept(me.manifest, committed=close_meanwhile)
        me.train(1)
        assert session.refit(1).version == 1
        assert me.is_version(1)
        for closer in closers:
            closer.join(20)
            assert not closer.is_alive()
            assert "is closed here" in error_of(lambda: session.refit(2)).message
        assert me.is_source or closers

    run(PAIR, body)


def test_a_hook_that_takes_longer_than_the_call_fails_the_refit_on_all_ranks_and_the_next_one_works():
    waited = threading.Event()

    def body(me, session):
        def installed(group, version):
            if version == 1:
                assert waited.wait(20)

        if not me.is_source:
            session.accept(me.manifest, installed=installed)
        error = error_of(lambda: session.refit(1, timeout=SOON))
        waited.set()
        assert isinstance(error, ReshardError)
        assert not isinstance(error, InstallError)
        me.train(2)
        session.refit(2)
        assert me.is_version(2)

    run(PAIR, body)


def _refitted_once(ctx, address):
    """The session of a trainer, rank 0, or of its engine, after version 1; and what this rank holds."""
    role = "destination" if ctx.rank else "source"
    session = reshard.connect(address, role=role, world=("trainer", "gen0")[ctx.rank], rank=0, expect=PAIR)
    weight = torch.full((4,), 0.0 if ctx.rank else 2.0)
    (session.accept if ctx.rank else session.offer)({"w": weight})
    session.refit(1)
    return session, weight


def _forked(ctx, address):
    session, weight = _refitted_once(ctx, address)
    child = os.fork()
    if child == 0:
        error = error_of(lambda: session.refit(2, timeout=SOON))
        os._exit(7 if isinstance(error, ConfigError) and "this is its fork" in error.message else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    session.refit(2)
    return weight.tolist()


def _interrupted(ctx, address):
    session, weight = _refitted_once(ctx, address)
    if ctx.rank:
        ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as a worker of the pool has it
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            session.refit(2, timeout=timedelta(seconds=30))  # the trainer does not call before
        signal.signal(signal.SIGINT, ignored)
        ctx.store.set("interrupted", "yes")
    else:
        ctx.store.wait(["interrupted"], timedelta(seconds=20))
        weight.fill_(3)
    session.refit(2)
    return weight.tolist()


@pytest.fixture(scope="module")
def pool():
    from reshard.testing.processes import ProcessPool

    with ProcessPool(2) as processes:
        yield processes


def test_a_fork_of_a_process_with_a_session_does_not_speak_over_its_connections(pool):
    with reshard.serve_store() as store:
        assert pool.run(_forked, str(store)) == [[2.0] * 4] * 2


def test_an_interrupt_ends_a_wait_for_others_long_before_the_deadline_and_the_next_refit_works(pool):
    with reshard.serve_store() as store:
        assert pool.run(_interrupted, str(store), timeout=40) == [[3.0] * 4] * 2
