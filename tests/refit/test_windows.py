"""Room for tensors that go whole is within the staging limit, whatever the model; compared with dense copies."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.refit.sessions import POISON, SHAPE, Rank, dense, error_of, run

import reshard
from reshard.errors import InstallError, PeerError
from reshard.refit.progress import Watch
from reshard.topology import presets

ONE = {"trainer": 2, "gen0": 3}
TWO = {"trainer": 2, "gen0": 2, "gen1": 3}
MANY = tuple(f"layers.{at}.w" for at in range(40))
NBYTES = SHAPE[0] * SHAPE[1] * 4
LIMIT = 4 * NBYTES
"""A tenth of the model; half of it is room for two tensors."""


class Large(Rank):
    """A model of ten times the staging limit; a rank may have only some of its tensors."""

    def __init__(self, world, rank, size, dtype=torch.float32, names=MANY):
        super().__init__(world, rank, size, dtype, names)

    def dense(self, version, name):
        return dense(version) + 100 * MANY.index(name)

    def train(self, version):
        if self.is_source:
            for name, tensor in self.tensors.items():
                tensor.copy_(self.dense(version, name)[self.part])

    def is_version(self, version, names=None):
        return all(
            torch.equal(self.tensors[name], self.dense(version, name)[self.part].to(self.tensors[name].dtype))
            for name in names or self.names
        )


def run_large(expect, body, *, dtypes=None, names=None, **options):
    """As ``run``, in place, with the large model; ``names`` are those of a (world, rank)."""
    options = {"commit": "in-place", "staging_nbytes": LIMIT, **options}

    def rank_body(me, address):
        mine = (names or {}).get((me.world, me.rank), MANY)
        large = Large(me.world, me.rank, me.size, (dtypes or {}).get(me.world, torch.float32), mine)
        with large.connect(address, expect, **options) as session:
            return body(large, session)

    return run(expect, rank_body, connect=False)


@pytest.mark.parametrize("verify", ["none", "sum", "fingerprint"])
def test_a_model_of_ten_times_the_staging_limit_goes_whole_within_that_limit_on_both_sides(verify):
    def body(me, session):
        before = session.landing_nbytes
        for version in (1, 2):
            me.train(version)
            report = session.refit(version)
            assert me.is_version(version)
            if verify == "fingerprint" and not me.is_source:
                assert session.verify() == dict.fromkeys(MANY, version)
                me.tensors["layers.7.w"][0, 0] += 1
                assert session.verify()["layers.7.w"] is None
        assert report.copies_nbytes == before == (0 if me.is_source else LIMIT // 2)
        return report

    topology = presets.hosts([[0, 1], [2, 3, 4]], port_bytes_per_second=10**9)
    reports = run_large(ONE, body, verify=verify, routes={"*": "whole"}, topology=topology)
    total = NBYTES * len(MANY)
    for report in reports:
        assert report.staging_nbytes <= LIMIT + 1024, "sums of what is on its way come on top"
        assert (report.windows, report.tensors, report.direct_fraction) == (20, 40, 0.0)
        assert set(report.paths) == set(MANY)
        assert report.copies_into == {"host1": 1.0}
        assert report.bound_seconds == total / 10**9
        assert report.bound_fraction == pytest.approx(1.0)
        assert "40 tensors in 20 windows" in str(report)
    assert sum(report.sent_nbytes for report in reports[:2]) == total, "once into the engines' host"
    assert [report.received_nbytes for report in reports[2:]] == [total] * 3
    assert [sum(report.link_nbytes.values()) for report in reports[:2]] == [r.sent_nbytes for r in reports[:2]]
    if verify == "fingerprint":
        assert len({report.digest for report in reports}) == 1
        assert {report.unchanged for report in reports} == {()}


def test_worlds_that_take_different_tensors_whole_share_the_windows():
    """gen0 takes all of it as routes say; one rank of gen1 has a part of the layers only, some of them by a loader."""
    few = MANY[5:25]

    def body(me, session):
        values = {}
        if me.world == "gen1" and me.rank == 1:
            kept = {name: me.tensors[name] for name in few}
            views = [(name, SHAPE, [0, me.part[1].start], tensor) for name, tensor in kept.items()]
            loaders = {"layers.2*": lambda name, tensor: values.update({name: tensor.clone()})}
            session.accept(reshard.Manifest.from_views(views), loaders=loaders)
        for version in (1, 2):
            me.train(version)
            report = session.refit(version)
            loaded = [name for name in few if me.world == "gen1" and me.rank == 1 and name.startswith("layers.2")]
            assert me.is_version(version, [name for name in me.names if name not in loaded])
            assert sorted(values) == sorted(loaded)
            assert all(torch.equal(values[name], me.dense(version, name).bfloat16()) for name in loaded)
            assert all(bool((me.tensors[name] == POISON).all()) for name in loaded), "a loader's are not written"
        return report

    reports = run_large(
        TWO,
        body,
        dtypes={"gen1": torch.bfloat16},
        names={("gen1", 1): few, ("gen1", 2): MANY[:3]},
        routes={"layers.3*": "direct", "*": "whole"},
    )
    assert len({report.windows for report in reports}) == 1
    assert reports[0].windows > 10
    assert len({tuple(report.paths.items()) for report in reports}) == 1
    assert all(report.staging_nbytes <= LIMIT + 1024 for report in reports)


def test_groups_are_installed_in_order_when_their_last_window_has_landed():
    group_of = {name: f"block {at // 10}" for at, name in enumerate(MANY)}
    loaded = [name for name in MANY if MANY.index(name) % 10 in (0, 1, 2, 3, 9)]

    def body(me, session):
        calls, landed = [], []
        watch = Watch(session._runner)

        def load(name, tensor):
            mine = [other for other in MANY if group_of[other] == group_of[name] and other not in loaded]
            assert me.is_version(session.status()[0].target, mine), "a loader comes after the others of its group"
            assert torch.equal(tensor, me.dense(version, name))
            calls.append(name)
            landed.append(watch.look().landed_nbytes)

        def installed(group, version):
            assert [name for name in calls if group_of.get(name) == group] == [
                n for n in loaded if group_of[n] == group
            ]
            calls.append((group, version))

        if not me.is_source:
            session.accept(
                me.manifest,
                groups=group_of.__getitem__,
                loaders=dict.fromkeys(loaded, load),
                installed=installed,
                committed=lambda version: calls.append(version),
            )
        for version in (1, 2):
            me.train(version)
            report = session.refit(version)
            if not me.is_source:
                in_order = [
                    call
                    for block in range(4)
                    for call in (*loaded[5 * block : 5 * block + 5], (f"block {block}", version))
                ]
                assert calls == [*in_order, version]
                total = watch.look().total_nbytes or report.local_nbytes + report.received_nbytes
                assert landed == sorted(landed)
                assert landed[0] < landed[-1] == total
                calls.clear(), landed.clear()
        return report

    routes = {"layers.*4.w": "whole", "layers.*5.w": "whole", "*": "direct"}
    for report in run_large(ONE, body, routes=routes):
        assert report.windows > 4
        assert report.direct_fraction == pytest.approx(12 / 40)


def test_a_loader_that_fails_between_windows_leaves_its_rank_torn_and_the_next_refit_repairs_it():
    def body(me, session):
        calls, broken = [], []

        def load(name, tensor):
            calls.append(name)
            if broken and len(calls) == 3:
                raise ValueError("a scale is missing")

        victim = (me.world, me.rank) == ("gen0", 1)
        if not me.is_source:
            session.accept(me.manifest, loaders={"*": load})
        me.train(1)
        session.refit(1)
        calls.clear()
        broken += [True] * victim
        error = error_of(lambda: session.refit(2))
        serving = session.serving
        assert serving.torn == (not me.is_source)
        assert len(calls) == (0 if me.is_source else 3 if victim else 4), "nobody is two windows ahead"
        broken.clear()
        calls.clear()
        session.refit(3)
        assert (session.serving.version, session.serving.torn) == (3, False)
        assert me.is_source or calls == list(MANY)
        return error

    errors = run_large({"trainer": 2, "gen0": 2}, body, routes={"*": "whole"})
    assert isinstance(errors[3], InstallError)
    assert "gen0 rank 1, moving: The loader hook failed on install group ''" in errors[3].message
    assert "ValueError: a scale is missing. It serves torn (was version 1)" in errors[3].message
    for error in errors[:3]:
        assert isinstance(error, PeerError)
        assert "gen0 rank 1 failed at" in error.message
        assert "a scale is missing" in error.message


@pytest.mark.parametrize("keeps", [False, True])
def test_in_debug_mode_a_loader_that_keeps_what_the_next_window_overwrites_is_named(keeps):
    def body(me, session):
        kept = []
        if not me.is_source:
            session.accept(
                me.manifest, debug=True, loaders={"*": lambda name, tensor: kept.append(tensor) if keeps else None}
            )
        me.train(1)
        error = error_of(lambda: session.refit(1))
        kept.clear()
        return error

    errors = run_large({"trainer": 1, "gen0": 1}, body)
    if keeps:
        assert isinstance(errors[1], InstallError)
        assert "Somebody keeps 'layers.0.w', 'layers.1.w' as a loader was given it" in errors[1].message
    else:
        assert errors == [None, None]


def test_some_tensors_of_a_snapshot_go_in_their_own_windows_in_the_background():
    def body(me, session):
        me.train(1)
        session.refit(1)
        me.train(2)
        work = session.refit(2, names=["layers.1*", "layers.7.w"], async_op=True, snapshot=True)
        me.train(3)
        report = work.wait()
        named = [name for name in MANY if name.startswith("layers.1") or name == "layers.7.w"]
        if not me.is_source:
            assert me.is_version(2, named)
            assert me.is_version(1, [name for name in MANY if name not in named])
        assert (report.windows, report.tensors) == (6, 12)
        report = session.refit(3)
        assert me.is_version(3)
        return report.windows

    assert run_large(ONE, body, routes={"*": "whole"}) == [20] * 5


def test_a_tensor_larger_than_its_share_of_the_limit_has_the_room_to_itself_and_that_is_said(caplog):
    def body(me, session):
        before = session.landing_nbytes
        me.train(1)
        report = session.refit(1)
        assert me.is_version(1)
        assert report.copies_nbytes == before == (0 if me.is_source else NBYTES)
        return report.windows

    with caplog.at_level(logging.WARNING, "reshard.session"):
        windows = run_large({"trainer": 1, "gen0": 1}, body, routes={"*": "whole"}, staging_nbytes=NBYTES)
    assert windows == [len(MANY)] * 2
    assert (
        "gen0 rank 0: a tensor that goes whole takes 1.12 KiB of room, more than half of staging_nbytes" in caplog.text
    )


def test_a_staged_commit_keeps_room_for_all_whole_tensors_at_once():
    def body(me, session):
        before = session.landing_nbytes
        me.train(1)
        report = session.refit(1)
        assert me.is_version(1)
        assert report.copies_nbytes == before == (0 if me.is_source else NBYTES * len(MANY))
        return report.windows

    assert run_large(ONE, body, routes={"*": "whole"}, commit="staged") == [1] * 5
