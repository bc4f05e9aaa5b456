"""Sessions between worlds that were launched apart: every element compared with a dense copy, all ranks threads."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.refit.sessions import NAMES, SHAPE, TIMEOUT, Rank, dense, error_of, run

import reshard
from reshard.errors import BindingError, ConfigError, DigestError, ManifestError, PeerError, VersionError
from reshard.refit.casts import Cast

ONE = {"trainer": 2, "gen0": 3}
TWO = {"trainer": 2, "gen0": 3, "gen1": 2}


@pytest.mark.parametrize("commit", ["staged", "in-place"])
@pytest.mark.parametrize("verify", ["none", "sum", "fingerprint"])
def test_each_refit_brings_the_engine_to_the_trainers_weights(commit, verify):
    def body(me, session):
        addresses = {name: tensor.data_ptr() for name, tensor in me.tensors.items()}
        for version in (1, 2, 5):
            me.train(version)
            report = session.refit(version)
            assert me.is_version(version)
            assert (report.version, report.tensors, report.partial) == (version, len(NAMES), False)
        assert addresses == {name: tensor.data_ptr() for name, tensor in me.tensors.items()}
        assert not dist.is_initialized()
        return session.serving.version

    assert run(ONE, body, commit=commit, verify=verify) == [5] * 5


def test_the_report_counts_what_moved_and_where_the_time_went():
    def body(me, session):
        me.train(1)
        return session.refit(1)

    reports = run(ONE, body)
    nbytes = SHAPE[0] * SHAPE[1] * 4 * len(NAMES)
    assert sum(r.sent_nbytes for r in reports) == sum(r.received_nbytes for r in reports) == nbytes
    assert [sum(r.link_nbytes.values()) for r in reports] == [nbytes // 2] * 2 + [nbytes // 3] * 3
    for report in reports:
        assert list(report.phases) == ["gathering", "planning", "moving", "landed", "committing", "confirming"]
        assert 0 < sum(report.phases.values()) <= report.seconds
        assert set(report.paths) == set(NAMES)
        assert report.to_json()["version"] == 1
    assert [r.copies_nbytes > 0 for r in reports] == [False] * 2 + [True] * 3, "staged: room to land beside the weights"


def test_two_engines_with_layouts_and_dtypes_of_their_own_are_served_by_one_plan():
    def body(me, session):
        for version in (1, 2):
            me.train(version)
            report = session.refit(version)
            assert me.is_version(version)
        return report

    reports = run(TWO, body, dtypes={"gen1": torch.bfloat16}, commit="in-place")
    assert {r.to for r in reports} == {("gen0", "gen1")}
    assert {r.casts for r in reports} == {
        tuple(Cast(name, "gen1", "float32", "bfloat16", "source") for name in sorted(NAMES))
    }


def test_a_refit_to_one_engine_leaves_the_others_alone_and_needs_none_of_their_ranks():
    def body(me, session):
        me.train(1)
        session.refit(1)
        me.train(2)
        if me.world != "gen1":
            report = session.refit(2, to=["gen0"])
            assert report.to == ("gen0",)
            assert me.is_version(2)
        else:
            assert me.is_version(1)
        if me.world != "gen0":
            session.refit(2, to=["gen1"])
        session.refit(3 if me.train(3) is None else 0)
        assert me.is_version(3)

    run(TWO, body)


def test_a_rank_outside_of_a_refit_is_told_so_when_it_calls():
    def body(me, session):
        if me.world == "gen1":
            with pytest.raises(ConfigError, match="'gen1' has no part in a refit to 'gen0'"):
                session.refit(1, to=["gen0"])
        with pytest.raises(ConfigError, match="destination worlds are 'gen0', 'gen1'"):
            session.refit(1, to=["gen7"])

    run(TWO, body)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (torch.float32, torch.bfloat16),  # the usual: master weights to what an engine computes in
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),  # narrower on the source: the cast comes after the wire
        (torch.float16, torch.bfloat16),  # as wide: on the source
        (torch.float64, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("commit", ["staged", "in-place"])
def test_a_cast_is_exactly_what_torch_makes_of_the_tensor(held, wanted, commit):
    def body(me, session):
        for version in (1, 2):
            if me.is_source:
                for name, tensor in me.tensors.items():
                    tensor.copy_(dense(version, name)[me.part])
            report = session.refit(version)
            for name, tensor in me.tensors.items():
                assert torch.equal(tensor, dense(version, name)[me.part].to(held).to(tensor.dtype))
        return report

    reports = run(ONE, body, dtypes={"trainer": held, "gen0": wanted}, commit=commit, verify="sum")
    where = "destination" if wanted.itemsize > held.itemsize else "source"
    assert {cast.where for report in reports for cast in report.casts} == {where}
    wire = min(held.itemsize, wanted.itemsize)
    assert sum(r.received_nbytes for r in reports) == SHAPE[0] * SHAPE[1] * wire * len(NAMES)


def test_integers_and_fp8_are_never_cast():
    def body(me, session):
        return error_of(lambda: session.refit(1))

    for error in run(ONE, body, dtypes={"trainer": torch.float32, "gen0": torch.float8_e4m3fn}):
        assert isinstance(error, ManifestError)
        assert "the source holds float32, gen0 wants float8_e4m3fn" in error.message


def test_names_under_wrappers_and_prefixes_meet_by_rules():
    class Model(torch.nn.Module):
        def __init__(self, names):
            super().__init__()
            for value, name in enumerate(names, start=10 * len(names)):
                module = self
                *path, last = name.split(".")
                for part in path:
                    if not hasattr(module, part):
                        module.add_module(part, torch.nn.Module())
                    module = getattr(module, part)
                module.register_parameter(last, torch.nn.Parameter(torch.full((4, 2), float(value))))

    trainer = Model(["_orig_mod.model.language_model.layers.0._checkpoint_wrapped_module.w", "_orig_mod.lm_head.w"])
    base = Model(["_orig_mod.q_proj.w"])
    trainer._orig_mod.add_module("q_proj", base._orig_mod.q_proj)
    engine = Model(["language_model.model.layers.0.w", "language_model.lm_head.w", "q_proj.base_layer.w"])

    def body(me, session):
        if me.is_source:
            rules = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
            session.offer(trainer, rename=rules)
        else:
            session.accept(engine, rename={".base_layer.": "."})
        return session.refit(1)

    reports = run({"trainer": 1, "gen0": 1}, body)
    landed = {name: tensor.unique().tolist() for name, tensor in engine.named_parameters()}
    assert landed == {
        "language_model.model.layers.0.w": [20.0],
        "language_model.lm_head.w": [21.0],
        "q_proj.base_layer.w": [10.0],
    }
    assert reports[0].renamed["q_proj.w"] == "_orig_mod.q_proj.w"
    assert reports[1].renamed == {"q_proj.w": "q_proj.base_layer.w"}


def test_one_error_lists_every_name_shape_and_dtype_that_does_not_fit_on_either_side():
    def body(me, session):
        if me.is_source:
            session.offer({"a.w": torch.zeros(4), "b": torch.zeros(3), "c": torch.zeros(2), "extra": torch.zeros(1)})
        else:
            session.accept(
                {
                    "a.weight": torch.zeros(4),
                    "b": torch.zeros(5),
                    "c": torch.zeros(2, dtype=torch.int32),
                    "d": torch.ones(1),
                }
            )
        return error_of(lambda: session.refit(1))

    for error in run({"trainer": 1, "gen0": 1}, body):
        assert isinstance(error, ManifestError)
        assert error.missing == ("a.weight", "d")
        assert error.not_wanted == ("a.w", "extra")
        for part in (
            "gen0 rank 0 wants 'a.weight', which no source rank holds. Nearest source names: 'a.w'.",
            "'b': the source's shape is [3], gen0's is [5].",
            "'c': the source holds float32, gen0 wants int32.",
            "The source holds 2 that nobody wants: 'a.w', 'extra'.",
        ):
            assert part in error.message


def test_after_a_mismatch_another_offer_and_the_next_refit_work():
    def body(me, session):
        rules = {name: f"other.{name}" for name in NAMES}
        me.bring(session, rename=rules if me.is_source else None)
        me.train(1)
        assert isinstance(error_of(lambda: session.refit(1)), ManifestError)
        assert me.is_source or me.is_poison()
        me.bring(session)
        session.refit(1)
        assert me.is_version(1)

    run(ONE, body)


def test_a_tied_name_is_written_once_and_seen_under_both():
    def body(me, session):
        tensor = torch.full((6, 4), 5.0 if me.is_source else -1.0)
        (session.offer if me.is_source else session.accept)({"embed.w": tensor, "lm_head.w": tensor})
        report = session.refit(1)
        assert tensor.unique().tolist() == [5.0]
        return report.received_nbytes

    assert run({"trainer": 1, "gen0": 1}, body) == [0, 6 * 4 * 4]


# -- versions --


def test_a_lower_version_is_refused_on_all_ranks_unless_it_is_meant():
    def body(me, session):
        me.train(3)
        session.refit(3)
        me.train(2)
        error = error_of(lambda: session.refit(2))
        assert isinstance(error, VersionError)
        assert "Version 2 is lower than version 3, which gen0 rank 0 serves" in error.message
        assert me.is_source or me.is_version(3)
        session.refit(2, allow_rollback=True)
        assert me.is_version(2)
        return session.epoch, session.serving.version

    assert run(ONE, body) == [(1, 2)] * 5


def test_ranks_that_ask_for_different_versions_are_told_and_go_on_in_the_same_epoch():
    def body(me, session):
        me.train(1)
        error = error_of(lambda: session.refit(2 if (me.world, me.rank) == ("gen0", 1) else 1))
        assert isinstance(error, DigestError)
        assert "trainer rank 0 called refit with version=1 and gen0 rank 1 with version=2" in error.message
        session.refit(1)
        assert me.is_version(1)
        return session.epoch

    assert run(ONE, body) == [1] * 5


def test_the_same_version_is_accepted_with_equal_weights_and_refused_with_others():
    def body(me, session):
        me.train(7)
        session.refit(7)
        report = session.refit(7)
        assert set(report.unchanged) == set(NAMES)
        assert "nothing changed" in str(report)
        if me.is_source:
            me.tensors["head.w"].add_(1)
        error = error_of(lambda: session.refit(7))
        assert isinstance(error, VersionError)
        assert "'head.w' differ" in error.message
        assert me.is_source or me.is_version(7)
        after = session.refit(8)
        assert set(after.unchanged) == set(NAMES) - {"head.w"}

    run(ONE, body, verify="fingerprint")


def test_a_trainer_that_resumes_from_a_checkpoint_may_send_what_is_served_and_nothing_else_under_its_version():
    """The successor, played by a thread of its own, knows nothing of what its predecessor sent."""
    gone, expect = threading.Event(), {"trainer": 1, "gen0": 2}

    def body(me, address):
        if me.is_source:
            resumed, me = me.rank == 1, Rank("trainer", 0, 1)
            assert not resumed or gone.wait(20)
        session = me.connect(address, expect, verify="fingerprint")
        me.train(7)
        if me.is_source and not resumed:
            session.refit(7)
            gone.set()  # and never calls again
            return None
        report = session.refit(7) if me.is_source else [session.refit(7), session.refit(7)][1]
        if me.is_source:
            me.tensors["head.w"].add_(1)
        error = error_of(lambda: session.refit(7))
        assert isinstance(error, VersionError)
        assert "'head.w' differ" in error.message
        assert me.is_source or me.is_version(7)
        return report.epoch

    assert run({"trainer": 2, "gen0": 2}, body, connect=False) == [None, 2, 2, 2]


def test_verify_says_which_version_each_tensor_is_now():
    def body(me, session):
        if me.is_source:
            for version in (1, 2):
                me.train(version)
                session.refit(version, names=None if version == 1 else ["layers.*"])
            return None
        assert session.verify() == dict.fromkeys(session.verify(), None)
        session.refit(1)
        assert session.verify() == dict.fromkeys(NAMES, 1)
        report = session.refit(2, names=["layers.*"])
        assert (report.partial, report.tensors, report.untouched) == (True, 2, 1)
        assert session.serving.partial
        assert session.verify() == {"layers.0.w": 2, "layers.1.w": 2, "head.w": 1}
        me.tensors["layers.1.w"].view(-1)[5] += 100  # one element of one rank
        assert session.verify() == {"layers.0.w": 2, "layers.1.w": None, "head.w": 1}
        me.tensors["layers.1.w"].copy_(dense(1, "layers.1.w")[me.part])
        assert session.verify()["layers.1.w"] == 1, "the version before is remembered"
        return True

    assert run(ONE, body, verify="fingerprint", dtypes={"gen0": torch.bfloat16})[2:] == [True] * 3


def test_fingerprints_are_the_same_whatever_the_layout():
    def body(me, session):
        me.train(1)
        return session.refit(1).digest

    by_two = run({"trainer": 2, "gen0": 3}, body, verify="fingerprint")
    by_one = run({"trainer": 3, "gen0": 1}, body, verify="fingerprint")
    assert len({*by_two, *by_one}) == 1


def test_a_pattern_that_matches_nothing_is_an_error_and_a_refit_of_some_leaves_the_others():
    def body(me, session):
        me.train(1)
        error = error_of(lambda: session.refit(1, names=["layer.*"]))
        assert isinstance(error, ManifestError)
        assert "'layer.*' matches no tensor" in error.message
        session.refit(1, names="layers.0.*")
        return me.is_source or (me.is_version(1, ["layers.0.w"]) and not me.is_version(1, ["head.w"]))

    assert all(run(ONE, body))


# -- binding --


def test_a_rebound_parameter_is_named_on_all_ranks_before_a_byte_moves():
    def body(me, session):
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.constant_(model.weight, 3.0 if me.is_source else -1.0)
        (session.offer if me.is_source else session.accept)(model)
        session.refit(1)
        if not me.is_source:
            model.weight = torch.nn.Parameter(torch.zeros(4, 4))
        error = error_of(lambda: session.refit(2))
        assert isinstance(error, BindingError)
        assert "gen0 rank 0 cannot take part: its module holds another tensor as 'weight'" in error.message
        if not me.is_source:
            session.accept(model)
        session.refit(2)
        return model.weight.unique().tolist()

    assert run({"trainer": 1, "gen0": 1}, body) == [[3.0], [3.0]]


def test_a_rank_that_offered_nothing_is_named():
    def body(me, session):
        session._offer = None
        return error_of(lambda: session.refit(1)).message

    assert all("trainer rank 0 cannot take part: it has offered nothing" in said for said in run(ONE, body))


def test_aliases_of_destination_memory_stay_and_show_the_new_values():
    def body(me, session):
        weight = torch.full((4, 1, 3), 2.0 if me.is_source else -1.0)
        alias = weight.view(4, 3)
        (session.offer if me.is_source else session.accept)({"conv.w": weight})
        for version in (1, 2, 3):
            if me.is_source:
                weight.fill_(version)
            session.refit(version)
            assert alias.unique().tolist() == [float(version)]
        assert alias.data_ptr() == weight.data_ptr()

    run({"trainer": 1, "gen0": 1}, body)


def test_install_groups_are_told_in_order_after_their_weights_are_live():
    told = []

    def body(me, session):
        if not me.is_source:
            derived = {}

            def installed(group, version):
                told.append((group, version))
                derived[group] = {n: t.clone() for n, t in me.tensors.items() if n.startswith(group)}

            session.accept(me.manifest, groups=lambda name: name.rsplit(".", 1)[0], installed=installed)
        me.train(1)
        session.refit(1)
        if not me.is_source:
            assert all(torch.equal(t, dense(1, n)[me.part]) for kept in derived.values() for n, t in kept.items())

    run({"trainer": 2, "gen0": 1}, body)
    assert told == [("head", 1), ("layers.0", 1), ("layers.1", 1)]


def test_an_error_while_installing_fails_the_refit_everywhere_and_the_next_one_heals():
    def body(me, session):
        broken = [True]

        def installed(group, version):
            if broken[0] and me.rank == 1:
                raise OSError("no room for derived weights")

        if not me.is_source:
            session.accept(me.manifest, installed=installed)
        me.train(1)
        error = error_of(lambda: session.refit(1))
        torn = session.serving.torn
        if (me.world, me.rank) != ("gen0", 1):
            assert isinstance(error, PeerError)
            assert "gen0 rank 1 failed" in error.message
        assert "no room for derived weights" in error.message
        broken[0] = False
        session.refit(2 if me.train(2) is None else 0)
        assert me.is_version(2)
        assert not session.serving.torn
        return torn

    assert run(ONE, body) == [False, False, False, True, False]


# -- work in the background --


def test_a_refit_in_the_background_is_waited_for_and_calls_stay_in_order():
    def body(me, session):
        me.train(1)
        work = session.refit(1, async_op=True)
        assert work.wait(TIMEOUT).version == 1
        assert me.is_version(1)
        work = session.refit(2, async_op=True)
        session.refit(3)
        assert work.is_completed()
        return session.serving.version

    assert run(ONE, body) == [3] * 5


def test_a_closed_session_refits_no_more():
    def body(me, session):
        session.close()
        with pytest.raises(ConfigError, match="is closed here"):
            session.refit(1)

    run(ONE, body)


# -- arguments --


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"role": "trainer"}, "role='trainer' is unknown"),
        ({"commit": "later"}, "commit='later' is unknown"),
        ({"verify": "maybe"}, "verify='maybe' is unknown"),
        ({"world_size": 4}, "has 4 processes here"),
        ({"rank": None}, "neither RANK nor SLURM_PROCID"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anybody_is_waited_for(options, said, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    given = {"role": "source", "world": "trainer", "rank": 0, "world_size": 2, "expect": ONE, **options}
    with pytest.raises(ConfigError, match=said):
        reshard.connect("tcp://127.0.0.1:1", **given)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "7"}, "has 7 processes here"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "9"}, "has 9 processes here"),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "1"}, "rank=5 "),
    ],
)
def test_what_torchrun_and_slurm_say_of_a_process_is_what_its_session_has(environment, said, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        reshard.connect("tcp://127.0.0.1:1", role="source", world="trainer", expect={"trainer": 1, "engine": 1})


def test_rank_and_size_come_from_the_launchers_environment(monkeypatch):
    from reshard.refit.connect import _from_environment

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert _from_environment("rank", None, "RANK", "SLURM_PROCID") == 3
    monkeypatch.delenv("RANK")
    assert _from_environment("rank", None, "RANK", "SLURM_PROCID") == 5
    assert _from_environment("rank", 0, "RANK", "SLURM_PROCID") == 0


def test_a_source_accepts_nothing_and_a_destination_offers_nothing():
    def body(me, session):
        with pytest.raises(ConfigError, match="calls offer, not accept" if me.is_source else "calls accept, not offer"):
            (session.accept if me.is_source else session.offer)(me.manifest)

    run({"trainer": 1, "gen0": 1}, body)


def test_ranks_of_a_world_have_numbers_of_their_own():
    assert (Rank("trainer", 1, 2).part[0], Rank("gen0", 1, 3).part[1]) == (slice(6, 12), slice(8, 16))


def test_a_snapshot_is_what_is_sent_though_the_trainer_goes_on_writing():
    def body(me, session):
        for version in (1, 2):
            me.train(version)
            work = session.refit(version, async_op=True, snapshot=True)
            me.train(90 + version)  # on the source only, while the refit runs
            work.wait(TIMEOUT)
            assert me.is_source or me.is_version(version)
        session.refit(3)  # without a snapshot: what the trainer holds now
        assert me.is_version(92)

    run(ONE, body)


def test_the_next_snapshot_is_not_taken_before_the_last_one_has_been_read():
    asked = threading.Event()

    def body(me, session):
        me.train(1)
        if not me.is_source:
            assert asked.wait(20)
            time.sleep(0.3)  # for a snapshot that does not wait to be overwritten
            session.refit(1)
            assert me.is_version(1)
            session.refit(2)
            return me.is_version(2)
        session.refit(1, async_op=True, snapshot=True)
        me.train(2)
        asked.set()
        session.refit(2, async_op=True, snapshot=True).wait(TIMEOUT)
        return True

    assert run({"trainer": 1, "gen0": 1}, body) == [True, True]


def test_events_are_kept_appended_to_a_file_and_drawn_as_a_trace(tmp_path):
    def body(me, session):
        me.train(1)
        session.refit(1)
        session.write_trace(tmp_path / f"{me.world}{me.rank}.json")
        return session.events

    kept = run({"trainer": 1, "gen0": 1}, body, events=tmp_path / "events.jsonl")
    assert [row["event"] for row in kept[1]] == [
        "Joined", "Met", "Called", "Gathered", "Planned", "Moved", "AllLanded", "Committed", "AllCommitted",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len([row for row in lines if row["event"] == "Moved"]) == 2
    trace = json.loads((tmp_path / "gen00.json").read_text())["traceEvents"]
    bars = [row["name"] for row in trace if row["ph"] == "X"]
    assert bars == ["meeting", "gathering", "planning", "moving", "landed", "committing", "confirming"]
    assert all(row["dur"] >= 0 for row in trace if row["ph"] == "X")


def test_after_a_failure_the_last_events_are_written_beside_the_log(tmp_path):
    def body(me, session):
        if me.is_source:
            session.offer({"other": torch.zeros(1)})
        assert error_of(lambda: session.refit(1)) is not None

    run({"trainer": 1, "gen0": 1}, body, events=tmp_path / "events.jsonl")
    failed = [json.loads(line) for line in (tmp_path / "events.jsonl.failed").read_text().splitlines()]
    assert {row["member"] for row in failed} == {"trainer rank 0", "gen0 rank 0"}
    assert any("ManifestError" in row.get("error", "") for row in failed)
