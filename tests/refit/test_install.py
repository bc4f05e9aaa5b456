"""Commit by install groups: hooks that take what has landed, compared with dense copies; all ranks threads."""

from __future__ import annotations

import pytest
import torch
from tests.refit.sessions import NAMES, SHAPE, dense, error_of, run

import reshard
from reshard.errors import ConfigError, InstallError, PeerError
from reshard.layouts.box import Box
from reshard.layouts.holding import HERE
from reshard.layouts.piece import Piece, TensorSpec

ONE = {"trainer": 2, "gen0": 3}
GROUPS = {"head.w": "head", "layers.0.w": "layer 2", "layers.1.w": "layer 10"}
IN_ORDER = ["head", "layer 2", "layer 10"]


def traced(me, dtype="float32"):
    """Columns in two pieces each, known by their boxes alone: what a trace of an engine's loaders knows."""
    begin, stop = me.part[1].start, me.part[1].stop
    pieces = [
        Piece(name, Box((rows[0], begin), (rows[1], stop))) for name in me.names for rows in ((0, 5), (5, SHAPE[0]))
    ]
    specs = [TensorSpec(name, SHAPE, dtype, group=GROUPS[name]) for name in me.names]
    return reshard.Manifest.from_pieces(specs, {HERE: pieces})


class Engine:
    """An engine that installs what it is handed into memory that the session does not know."""

    def __init__(self, me, fail_at=None, error=None):
        self.me, self.fail_at, self.error = me, fail_at, error
        self.calls = []
        self.dtype = None

    def install(self, landed):
        assert 0 < landed.timeout_seconds <= 30
        if landed.group == self.fail_at:
            raise self.error
        self.calls.append((landed.group, landed.version))
        assert {GROUPS[piece.name] for piece, _ in landed.pieces} == {landed.group}
        begin = self.me.part[1].start
        for piece, view in landed.pieces:
            assert view.is_contiguous()
            assert tuple(view.shape) == piece.box.shape
            (top, left), (bottom, right) = piece.box.start, piece.box.stop
            self.me.tensors[piece.name][top:bottom, left - begin : right - begin] = view


@pytest.mark.parametrize("verify", ["none", "sum", "fingerprint"])
def test_what_has_landed_is_handed_to_the_engine_group_by_group_in_order(verify):
    def body(me, session):
        engine = Engine(me)
        if not me.is_source:
            session.accept(traced(me), install=engine.install)
        for version in (1, 2):
            me.train(version)
            report = session.refit(version)
            assert me.is_version(version)
        if not me.is_source:
            assert engine.calls == [(group, version) for version in (1, 2) for group in IN_ORDER]
            assert report.copies_nbytes == session.landing_nbytes > 0
        return report

    run(ONE, body, verify=verify)


@pytest.mark.parametrize(("held", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_engine_is_handed_the_dtype_that_it_asked_for(held, wanted):
    def body(me, session):
        engine = Engine(me)
        if not me.is_source:
            me.tensors = {name: tensor.to(getattr(torch, wanted)) for name, tensor in me.tensors.items()}
            session.accept(traced(me, wanted), install=engine.install)
        me.train(1)
        session.refit(1)
        if not me.is_source:
            for name, tensor in me.tensors.items():
                assert torch.equal(tensor, dense(1, name)[me.part].to(getattr(torch, held)).to(tensor.dtype))

    run(ONE, body, dtypes={"trainer": getattr(torch, held)})


def test_a_refit_of_some_tensors_installs_their_groups_alone():
    def body(me, session):
        engine = Engine(me)
        if not me.is_source:
            session.accept(traced(me), install=engine.install)
        me.train(1)
        session.refit(1)
        me.train(2)
        session.refit(2, names=["layers.*"])
        if not me.is_source:
            assert engine.calls[3:] == [("layer 2", 2), ("layer 10", 2)]
            assert me.is_version(2, ["layers.0.w", "layers.1.w"])
            assert me.is_version(1, ["head.w"])

    run(ONE, body)


@pytest.mark.parametrize(
    ("fail_at", "untouched", "torn"),
    [("head", True, False), ("head", False, True), ("layer 2", True, True), ("layer 2", False, True)],
)
def test_an_engine_that_fails_leaves_its_rank_torn_unless_it_had_written_nothing(fail_at, untouched, torn):
    def body(me, session):
        engine = Engine(me)
        if not me.is_source:
            session.accept(traced(me), install=engine.install)
        me.train(1)
        session.refit(1)
        me.train(2)
        victim = me.world == "gen0" and me.rank == 1
        if victim:
            engine.fail_at, engine.error = fail_at, ReshardlessError("the kernel said no", untouched)
        error = error_of(lambda: session.refit(2))
        serving = session.serving
        if victim:
            assert isinstance(error, InstallError)
            assert f"The install hook failed on install group {fail_at!r}" in error.message
            assert "ReshardlessError: the kernel said no." in error.message
            assert error.installed == tuple(IN_ORDER[: IN_ORDER.index(fail_at)])
            assert (serving.torn, serving.version) == (torn, 1)
            assert torn or me.is_version(1)
            engine.fail_at = None
        else:
            assert isinstance(error, PeerError)
            assert "gen0 rank 1" in error.message
        me.train(3)
        session.refit(3)
        assert me.is_version(3)
        assert not session.serving.torn

    run(ONE, body)


class ReshardlessError(Exception):
    """An engine's own error, which may say that nothing was written."""

    def __init__(self, text, untouched):
        super().__init__(text)
        self.untouched = untouched


def test_the_live_weights_change_group_by_group_and_the_engine_is_told_after_each():
    def body(me, session):
        seen = []

        def installed(group, version):
            state = {name: torch.equal(tensor, dense(1, name)[me.part]) for name, tensor in me.tensors.items()}
            seen.append((group, version, tuple(name for name in sorted(GROUPS) if state[name])))

        if not me.is_source:
            session.accept(me.manifest, groups=GROUPS.get, installed=installed)
        me.train(1)
        session.refit(1)
        if not me.is_source:
            assert seen == [
                ("head", 1, ("head.w",)),
                ("layer 2", 1, ("head.w", "layers.0.w")),
                ("layer 10", 1, ("head.w", "layers.0.w", "layers.1.w")),
            ]

    run(ONE, body)


def test_a_session_that_writes_in_place_has_nothing_to_hand_to_an_engine():
    def body(me, session):
        if not me.is_source:
            with pytest.raises(ConfigError, match="install= takes what has landed beside the live weights"):
                session.accept(traced(me), install=lambda landed: None)

    run(ONE, body, commit="in-place")


def test_the_session_cannot_verify_weights_that_it_handed_to_an_engine():
    def body(me, session):
        if not me.is_source:
            session.accept(traced(me), install=Engine(me).install)
            with pytest.raises(ConfigError, match="does not know the live weights"):
                session.verify()

    run(ONE, body, verify="fingerprint")


def test_the_room_that_staging_takes_is_known_before_the_first_refit():
    def body(me, session):
        before = session.landing_nbytes
        me.train(1)
        report = session.refit(1)
        assert report.copies_nbytes == before
        return before

    nbytes = SHAPE[0] * SHAPE[1] * 4 * len(NAMES)
    assert run(ONE, body) == [0, 0] + [nbytes // 3] * 3
    assert run(ONE, body, commit="in-place") == [0] * 5
