"""Tensors that go whole: to a loader, or by the user's choice; compared with dense copies, all ranks threads."""

from __future__ import annotations

import pytest
import torch
from tests.refit.sessions import NAMES, SHAPE, dense, error_of, run
from tests.refit.test_install import Engine, traced

import reshard
from reshard.errors import ConfigError, DigestError, ManifestError
from reshard.topology import presets

ONE = {"trainer": 2, "gen0": 3}
TWO = {"trainer": 2, "gen0": 3, "gen1": 2}
MIXED = {"layers.0.*": "direct", "*": "whole"}


@pytest.mark.parametrize("commit", ["staged", "in-place"])
@pytest.mark.parametrize("verify", ["sum", "fingerprint"])
def test_tensors_that_go_whole_are_cut_into_the_pieces_that_each_rank_keeps(commit, verify):
    def body(me, session):
        for version in (1, 2):
            me.train(version)
            report = session.refit(version)
            assert me.is_version(version)
            if verify == "fingerprint" and not me.is_source:
                assert session.verify() == dict.fromkeys(NAMES, version)
                me.tensors["head.w"][0, 0] += 1
                assert session.verify()["head.w"] is None
        return report

    reports = run(ONE, body, commit=commit, verify=verify, routes=MIXED)
    assert all(r.paths == reports[0].paths for r in reports)
    paths = reports[0].paths
    assert not paths["layers.0.w"].startswith("whole")
    for name in ("layers.1.w", "head.w"):
        assert paths[name].startswith("whole for gen0, since routes= says so for '*': ")
    assert {round(r.direct_fraction, 6) for r in reports} == {0.333333}
    assert "33% of bytes direct" in str(reports[0])


def test_a_tensor_that_goes_whole_enters_each_host_once():
    def body(me, session):
        me.train(1)
        report = session.refit(1)
        assert me.is_version(1)
        return report

    topology = presets.hosts([[0, 1], [2, 3, 4]], port_bytes_per_second=10**9)
    reports = run(ONE, body, routes={"*": "whole"}, topology=topology)
    nbytes = SHAPE[0] * SHAPE[1] * 4 * len(NAMES)
    assert sum(r.sent_nbytes for r in reports[:2]) == nbytes, "once into the engine's host"
    assert [r.received_nbytes for r in reports[2:]] == [nbytes] * 3, "and from there to every rank"
    assert [r.direct_fraction for r in reports] == [0.0] * 5


def test_whole_tensors_are_handed_to_an_engine_as_the_pieces_that_it_asked_for():
    def body(me, session):
        engine = Engine(me)
        if not me.is_source:
            session.accept(traced(me), install=engine.install)
        for version in (1, 2):
            me.train(version)
            session.refit(version)
            assert me.is_version(version)

    run(ONE, body, routes=MIXED)


@pytest.mark.parametrize("commit", ["staged", "in-place"])
def test_a_loader_is_given_whole_tensors_in_plan_order_after_what_goes_direct(commit):
    def body(me, session):
        calls, values = [], {}

        def load(name, tensor):
            calls.append(name)
            values[name] = tensor.clone()

        if not me.is_source:
            kept = {"layers.0.w": me.tensors["layers.0.w"]}
            start = [0, me.part[1].start]
            manifest = reshard.Manifest.from_views([(n, SHAPE, start, t) for n, t in kept.items()])
            session.accept(
                manifest,
                loaders={"head.w": load, "layers.1.*": load},
                installed=lambda group, version: calls.append((group, version, me.is_version(version, kept))),
            )
        for version in (1, 2):
            me.train(version)
            report = session.refit(version)
            if not me.is_source:
                assert all(torch.equal(values[n], dense(version, n)) for n in ("head.w", "layers.1.w"))
                assert calls == ["head.w", "layers.1.w", ("", version, True)]
                calls.clear()
        return report

    for report in run(ONE, body, commit=commit):
        assert report.paths["head.w"].startswith("whole for gen0, since it is given to a loader: ")
        assert report.direct_fraction == pytest.approx(1 / 3)


def test_an_engine_may_have_pieces_and_a_loader_and_each_world_its_own_ways():
    def body(me, session):
        engine, values = Engine(me), {}
        if me.world == "gen0":
            session.accept(traced(me), install=engine.install, loaders={"head.w": values.__setitem__})
        me.train(1)
        report = session.refit(1)
        if me.world == "gen0":
            assert me.is_version(1, ["layers.0.w", "layers.1.w"])
            assert torch.equal(values["head.w"], dense(1, "head.w"))
            assert bool((me.tensors["head.w"] == -7).all())
        else:
            assert me.is_source or me.is_version(1)
        return report

    for report in run(TWO, body, dtypes={"gen1": torch.bfloat16}):
        whole = {name: path for name, path in report.paths.items() if path.startswith("whole")}
        assert set(whole) == {"head.w (float32)"}, "the form in which gen1 wants it goes direct"
        assert whole["head.w (float32)"].startswith("whole for gen0, since it is given to a loader: ")


def test_a_loader_that_fails_leaves_the_rank_torn_and_is_named():
    def body(me, session):
        def load(name, tensor):
            raise ValueError("a scale is missing")

        if not me.is_source:
            session.accept(me.manifest, loaders={"head.w": load})
        me.train(1)
        error = error_of(lambda: session.refit(1))
        assert me.is_source or session.serving.torn
        return error

    errors = run({"trainer": 2, "gen0": 1}, body)
    assert "The loader hook failed on install group ''" in errors[2].message
    assert "ValueError: a scale is missing" in errors[2].message


@pytest.mark.parametrize(("kept", "torn"), [(False, False), (True, True)])
def test_a_loader_that_has_written_nothing_leaves_the_old_version_where_nothing_else_was_written(kept, torn):
    class Busy(Exception):
        untouched = True

    def body(me, session):
        def load(name, tensor):
            if calls:
                raise Busy
            calls.append(name)

        calls = []
        if not me.is_source:
            session.accept(me.manifest if kept else {}, loaders={"head.w": load})
        me.train(1)
        session.refit(1)
        error = error_of(lambda: session.refit(2))
        assert error is not None
        return session.serving

    serving = run({"trainer": 2, "gen0": 1}, body)[2]
    assert (serving.version, serving.torn) == (1, torn)


def test_a_loader_for_what_nobody_has_is_refused():
    def body(me, session):
        if not me.is_source:
            error = error_of(lambda: session.accept(me.manifest, loaders={"heads.*": print}))
            assert isinstance(error, ManifestError)
            assert "'heads.*', which matches no tensor of this rank" in error.message

    run(ONE, body)


def test_routes_are_the_same_on_all_members_and_known():
    def body(me, address):
        routes = {"*": "whole"} if me.is_source else None
        with pytest.raises(ConfigError, match="a tensor goes one of 'direct', 'whole'"):
            me.connect(address, ONE, routes={"*": "nearby"})
        session = me.connect(address, ONE, routes=routes)
        return error_of(lambda: session.refit(1))

    for error in run(ONE, body, connect=False):
        assert isinstance(error, DigestError)
        assert "routes=" in error.message


def test_room_for_whole_tensors_is_known_before_the_first_refit():
    def body(me, session):
        before = session.landing_nbytes
        me.train(1)
        assert session.refit(1).copies_nbytes == before
        return before

    nbytes = SHAPE[0] * SHAPE[1] * 4
    assert run(ONE, body, routes=MIXED)[2:] == [2 * nbytes + nbytes // 3] * 3
    assert run(ONE, body, routes=MIXED, commit="in-place")[2:] == [2 * nbytes] * 3
