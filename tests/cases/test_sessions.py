"""Cases that need a session: casts, membership, versions, what is served after a failure, and what hooks see.

All ranks are threads. That a process which is killed at any state is named and replaced is shown with real processes in
``tests/refit/test_session_failures.py``.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from tests.refit.sessions import NAMES, TIMEOUT, Rank, error_of, run

from reshard.errors import ManifestError, MembershipError, PeerError, ReshardError, VerifyError
from reshard.transports import mover, program

PAIR = {"trainer": 1, "gen0": 1}
THREE = {"trainer": 1, "gen0": 3}


def bring(me, session, tensors, **options):
    (session.offer if me.is_source else session.accept)(tensors, **options)


def test_DQ_01_a_float32_buffer_in_a_bfloat16_model_stays_bit_exact_and_every_cast_is_listed():
    def body(me, session):
        weight = torch.full((8, 4), 1.2345, dtype=torch.float32 if me.is_source else torch.bfloat16)
        bias = 1 + torch.arange(8) * 2**-20 if me.is_source else torch.zeros(8)
        bring(me, session, {"w": weight, "gate.e_score_correction_bias": bias})
        report = session.refit(1)
        assert torch.equal(bias, 1 + torch.arange(8) * 2**-20)
        return [(cast.tensor, cast.src, cast.dst) for cast in report.casts]

    assert run(PAIR, body) == [[("w", "float32", "bfloat16")]] * 2


@pytest.mark.parametrize(("src", "dst", "fits"), [("float32", "bfloat16", True), ("bfloat16", "int32", False)])
def test_DQ_02_a_cast_is_what_both_sides_declare_and_bytes_are_never_read_as_another_dtype(src, dst, fits):
    def body(me, session):
        values = torch.arange(24, dtype=torch.float32).reshape(6, 4) / 7
        held, wanted = values.to(getattr(torch, src)), torch.zeros(6, 4, dtype=getattr(torch, dst))
        bring(me, session, {"w": held if me.is_source else wanted})
        error = error_of(lambda: session.refit(1))
        assert (error is None) == fits
        assert isinstance(error, ManifestError) or fits
        return me.is_source or torch.equal(wanted, held.to(wanted.dtype) if fits else torch.zeros_like(wanted))

    assert run(PAIR, body) == [True, True]


def test_DQ_05_each_refit_shows_in_the_live_module_though_a_hook_replaces_the_parameter():
    class Engine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(4))

    def body(me, session):
        module = Engine()
        bring(me, session, module)
        for version in (1, 2, 3):
            if me.is_source:
                module.w.data.fill_(version)
            error = error_of(lambda version=version: session.refit(version))
            if version > 1:
                assert "holds another tensor as 'w'" in error.message, "never written to a dead tensor"
                if not me.is_source:
                    session.accept(module)
                session.refit(version)
            assert module.w.tolist() == [float(version)] * 4
            if not me.is_source:
                module.w = torch.nn.Parameter(module.w.detach().clone())  # as a quantising hook does

    run(PAIR, body)


def test_NM_02_rules_map_wrappers_and_architectures_and_rules_that_collide_are_refused():
    held = {"_orig_mod.model.language_model.layers.0._checkpoint_wrapped_module.w": 1, "lm_head.w": 2, "q_proj.w": 3}
    wanted = ("language_model.model.layers.0.w", "language_model.lm_head.w", "q_proj.base_layer.w")

    def body(me, session):
        if me.is_source:
            tensors = {name: torch.full((2,), float(value)) for name, value in held.items()}
            rules = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
            collide = {"lm_head.": "x.", "q_proj.": "x."}
            assert isinstance(error_of(lambda: session.offer(tensors, rename=collide)), ManifestError)
            session.offer(tensors, rename=rules)
        else:
            tensors = {name: torch.zeros(2) for name in wanted}
            session.accept(tensors, rename={".base_layer.": "."})
        session.refit(1)
        return [tensor[0].item() for tensor in tensors.values()]

    assert run(PAIR, body) == [[1.0, 2.0, 3.0]] * 2


def test_MF_01_a_trainer_that_was_restarted_is_met_in_a_new_epoch_by_engines_that_were_not():
    gone = threading.Event()

    def body(me, address):
        if me.world == "trainer" and me.rank == 1:  # the successor, played by a thread of its own
            gone.wait(20)
            me = Rank("trainer", 0, 1)
            session = me.connect(address, {"trainer": 1, "gen0": 2})
            me.train(2)
            return session.refit(2).epoch
        if me.is_source:
            me = Rank("trainer", 0, 1)
        session = me.connect(address, {"trainer": 1, "gen0": 2})
        me.train(1)
        session.refit(1)
        if me.is_source:
            gone.set()  # and never calls again
            return None
        addresses = [tensor.data_ptr() for tensor in me.tensors.values()]
        report = session.refit(2)
        assert me.is_version(2)
        assert addresses == [tensor.data_ptr() for tensor in me.tensors.values()]
        return report.epoch

    assert run({"trainer": 2, "gen0": 2}, body, connect=False) == [None, 2, 2, 2]


def lose_copies_of(monkeypatch, thread):
    """Let one rank lose what it should write while its name is in the list."""
    carry_out, broken = program.carry_out, [thread]

    def lossy(copies):
        if threading.current_thread().name not in broken:
            carry_out(copies)

    for module in (mover, program):
        monkeypatch.setattr(module, "carry_out", lossy)
    return broken


@pytest.mark.parametrize("commit", ["staged", "in-place"])
def test_MF_04_MF_05_OB_03_one_replica_that_fails_is_told_to_all_and_none_serves_a_mix(monkeypatch, commit):
    broken = lose_copies_of(monkeypatch, "nobody")

    def body(me, session):
        me.train(1)
        session.refit(1)
        me.train(2)
        if (me.world, me.rank) == ("gen0", 1):
            broken[0] = threading.current_thread().name
        error = error_of(lambda: session.refit(2))
        assert isinstance(error, VerifyError if (me.world, me.rank) == ("gen0", 1) else ReshardError)
        assert (error.session, error.version) == ("default", 2)
        torn, version = session.serving.torn, session.serving.version
        if not me.is_source:
            assert version == 1
            assert torn == (commit == "in-place")
            assert torn or me.is_version(1)
        own = next(member for member in session.status() if member.name == f"{me.world} rank {me.rank}")
        assert own.torn == torn
        assert own.not_ready.startswith("torn") == torn
        broken[0] = "nobody"
        session.refit(2)
        assert me.is_source or me.is_version(2)
        assert not session.serving.torn

    run(THREE, body, commit=commit, verify="sum")


def test_OB_02_verify_has_no_false_alarm_and_names_what_changed():
    def body(me, session):
        embed = torch.arange(12.0).reshape(6, 2) if me.is_source else torch.zeros(6, 2)
        fused = torch.arange(8.0) if me.is_source else torch.full((10,), 5.0)  # the engine pads
        scale = torch.full((2,), 2.0 if me.is_source else 0.0)
        fp8 = (torch.arange(6.0) if me.is_source else torch.zeros(6)).to(torch.float8_e4m3fn)
        tensors = {"embed": embed, "lm_head": embed, "q": fused[:4], "k": fused[4:8], "scale": scale, "fp8": fp8}
        bring(me, session, tensors)
        session.refit(1)
        if me.is_source:
            return None
        assert set(session.verify().values()) == {1}
        fused[9] = 1.0  # padding is nobody's
        assert set(session.verify().values()) == {1}
        fp8.view(torch.uint8)[3] ^= 1
        assert [name for name, version in session.verify().items() if version is None] == ["fp8"]
        for tensor in (embed, fused, scale):
            tensor.normal_()
        return set(session.verify().values())

    assert run(PAIR, body, verify="fingerprint") == [None, {None}]


@pytest.mark.parametrize("absent", [("gen0", 1), ("trainer", 0)])
def test_TH_04_a_session_that_some_do_not_join_fails_on_every_side_and_names_them(absent):
    def body(me, address):
        if (me.world, me.rank) == absent:
            return None
        return error_of(lambda: me.connect(address, {"trainer": 2, "gen0": 3}, timeout=timedelta(seconds=10)))

    told = [error for error in run({"trainer": 2, "gen0": 3}, body, connect=False) if error is not None]
    assert len(told) == 4
    assert all(isinstance(e, MembershipError) and e.missing == ("{} rank {}".format(*absent),) for e in told)


def test_US_03_a_subset_is_asked_for_and_reported_as_one():
    def body(me, session):
        me.train(1)
        session.refit(1)
        me.train(2)
        assert isinstance(error_of(lambda: session.refit(2, names=["nothing.*"])), ManifestError)
        report = session.refit(2, names=["layers.0.*"])
        assert report.tensors == 1
        if not me.is_source:
            assert (report.partial, report.untouched, str(session.serving)) == (True, 2, "version 2 in part")
            assert me.is_version(2, ["layers.0.w"])
            assert me.is_version(1, NAMES[1:])
        session.refit(2)
        assert not session.serving.partial

    run(PAIR, body)


def test_VS_02_derived_weights_are_made_once_a_module_after_its_last_byte_and_an_error_fails_the_refit():
    def body(me, session):
        module = torch.nn.ModuleList([torch.nn.Linear(4, 6, bias=False) for _ in range(3)])
        derived = [torch.zeros(4, 6) for _ in range(3)]
        calls, fails = [], [False]

        def installed(group, version):
            if fails[0]:
                raise ValueError("no kernel for this")
            calls.append((group, version))
            derived[int(group)].copy_(module[int(group)].weight.detach().t())

        if me.is_source:
            session.offer(module)
        else:
            session.accept(module, groups=lambda name: name.split(".")[0], installed=installed)
        for version in (1, 2):
            if me.is_source:
                for layer in module:
                    torch.nn.init.constant_(layer.weight, float(version))
            session.refit(version)
            assert me.is_source or all(bool((kept == version).all()) for kept in derived)
        assert me.is_source or calls == [(str(at), version) for version in (1, 2) for at in range(3)]
        fails[0] = True
        error = error_of(lambda: session.refit(3))
        assert "no kernel for this" in error.message
        assert isinstance(error, PeerError) or not me.is_source

    run(PAIR, body)


def test_VS_07_a_buffer_without_a_source_is_an_error_unless_it_is_left_out_by_name_and_the_report_says_so():
    def body(me, session):
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.full((4,), 3.0 if me.is_source else -1.0))
        if not me.is_source:
            model.register_buffer("b", torch.ones(2))
            model.register_buffer("inv_freq", torch.full((3,), float("nan")), persistent=False)
        bring(me, session, model)
        assert error_of(lambda: session.refit(1)).missing == ("b",)
        bring(me, session, model, rename={"b": ""})
        report = session.refit(1)
        assert model.w.tolist() == [3.0] * 4
        if not me.is_source:
            assert model.b.tolist() == [1.0, 1.0]
            assert model.inv_freq.isnan().all()
        return report.left_out

    assert run(PAIR, body) == [(), ("b",)]
    assert TIMEOUT.total_seconds() > 1
