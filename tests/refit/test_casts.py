"""Casts in sessions: nothing is kept for them beside the weights, and what lands is the dense copy cast once."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from tests.cases.test_memory_bounds import forget_resident_peak, resident_peak_nbytes, torch_allocations
from tests.refit.sessions import TIMEOUT, error_of, ranks_of

import reshard
from reshard.errors import PeerError, VerifyError, VersionError
from reshard.testing.processes import ProcessPool, threads
from reshard.transports import mover
from reshard.transports.shm import share_memory_

MIB = 1 << 20
EXPECT = {"trainer": 2, "gen0": 3}
SHAPE = (31, 46)
ROWS, COLUMNS = (0, 11, 31), (0, 7, 8, 46)
"""Uneven cuts: of the trainer's ranks by rows, of the engine's by columns."""


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(2) as processes:
        yield processes


def dense(name, version, dtype):
    """Values that need rounding, with what a cast may not lose: infinities, subnormals, and numbers too large."""
    count = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float64).reshape(SHAPE)
    values = count / 7 + 1000 * version + 100 * len(name)
    values[0, :4] = torch.tensor([float("inf"), -float("inf"), 1e-41, 1e38], dtype=torch.float64)
    return values.to(dtype)


NAMES = ("a", "layers.0.w", "layers.10.w")
MASTERS = (dict.fromkeys(NAMES, torch.float32), dict.fromkeys(NAMES, torch.bfloat16))
"""Dtypes that the trainer holds and the engine wants."""

MIXED = (
    dict(zip(NAMES, (torch.float32, torch.float16, torch.bfloat16), strict=True)),
    dict(zip(NAMES, (torch.bfloat16, torch.bfloat16, torch.float32), strict=True)),
)
"""Cast at the source, at the source to a dtype as wide, and at the destination."""


class Model:
    """One rank's part: its source interleaved with other data, its destination transposed."""

    def __init__(self, rank, dtypes, *, shared=False):
        self.world, self.rank = ranks_of(EXPECT, rank)
        self.is_source, self.held = self.world == "trainer", dtypes[0]
        mine = dtypes[0 if self.is_source else 1]
        cuts = ROWS if self.is_source else COLUMNS
        lo, hi = cuts[self.rank : self.rank + 2]
        self.part = (slice(lo, hi), slice(None)) if self.is_source else (slice(None), slice(lo, hi))
        if self.is_source:
            self.tensors = {name: torch.zeros(hi - lo, 2 * SHAPE[1], dtype=mine[name])[:, ::2] for name in NAMES}
        else:
            self.tensors = {name: torch.full((hi - lo, SHAPE[0]), -7.0, dtype=mine[name]).t() for name in NAMES}
        if shared:
            share_memory_(self.tensors.values())
        start = (lo, 0) if self.is_source else (0, lo)
        self.manifest = reshard.Manifest.from_views([(n, SHAPE, start, t) for n, t in self.tensors.items()])

    @contextmanager
    def session(self, store, **options):
        role = "source" if self.is_source else "destination"
        with reshard.connect(
            store,
            role=role,
            world=self.world,
            rank=self.rank,
            world_size=EXPECT[self.world],
            expect=EXPECT,
            timeout=TIMEOUT,
            **options,
        ) as session:
            (session.offer if self.is_source else session.accept)(self.manifest)
            yield session

    def train(self, version):
        for name, tensor in self.tensors.items() if self.is_source else ():
            tensor.copy_(dense(name, version, tensor.dtype)[self.part])

    def cast_once(self, name, version):
        return dense(name, version, self.held[name])[self.part].to(self.tensors[name].dtype)

    def check(self, version):
        for name, tensor in self.tensors.items() if not self.is_source else ():
            assert torch.equal(tensor, self.cast_once(name, version)), name


def run(dtypes, body, *, shared=False, **options):
    """``body(model, session)`` on every rank, all of them threads."""
    with reshard.serve_store() as store:

        def rank_body(ctx):
            torch.set_num_threads(1)
            model = Model(ctx.rank, dtypes, shared=shared)
            with model.session(str(store), **options) as session:
                return body(model, session)

        return threads(sum(EXPECT.values()), rank_body, timeout=60)


@pytest.mark.parametrize("transport", ["torch_p2p", "shm"])
@pytest.mark.parametrize("verify", ["none", "sum", "fingerprint"])
def test_a_cast_keeps_nothing_beside_the_weights_on_either_side(transport, verify):
    def body(model, session):
        for version in (1, 2):
            model.train(version)
            report = session.refit(version)
            model.check(version)
        if verify == "fingerprint" and not model.is_source:
            assert session.verify() == dict.fromkeys(NAMES, 2)
        assert session.landing_nbytes == 0
        return report

    staging_nbytes = 8 << 10
    for report in run(
        MIXED, body, transport=transport, verify=verify, commit="in-place", staging_nbytes=staging_nbytes
    ):
        assert [cast.where for cast in report.casts] == ["source", "source", "destination"]
        assert report.copies_nbytes == 0
        assert report.staging_nbytes <= staging_nbytes + 64
        assert report.staging_nbytes > 0 or transport == "shm", "there a destination reads the slots of the others"


@pytest.mark.parametrize("commit", ["staged", "in-place"])
def test_weights_that_others_read_in_place_are_cast_as_they_are_read(commit):
    def body(model, session):
        for version in (1, 2):
            model.train(version)
            report = session.refit(version)
            model.check(version)
        return report

    reports = run(MASTERS, body, shared=True, transport="shm", verify="none", commit=commit)
    for report in reports:
        assert all("read in place, one copy" in link for link in report.links.values())
        assert report.staging_nbytes == report.copies_nbytes
    landing = [SHAPE[0] * (hi - lo) * 2 * len(NAMES) for lo, hi in pairwise(COLUMNS)]
    assert [r.copies_nbytes > 0 for r in reports] == [False] * 2 + [commit == "staged"] * 3
    assert [r.received_nbytes for r in reports[2:]] == landing, "in the dtype of the wire"


@pytest.mark.parametrize("verify", ["sum", "fingerprint"])
def test_casts_are_made_once_as_they_are_packed_where_both_sides_sum_what_moved(verify):
    def body(model, session):
        model.train(1)
        report = session.refit(1)
        model.check(1)
        return report

    for report in run(MASTERS, body, shared=True, transport="shm", verify=verify):
        for link in report.links.values():
            assert "two copies through staging" in link
            assert "it casts most of what it sends, and that is cheaper done once, as it is packed" in link


@pytest.mark.parametrize(("transport", "verify"), [("torch_p2p", "fingerprint"), ("shm", "sum")])
def test_weights_that_training_has_made_nan_arrive_as_nan_and_verify(transport, verify):
    """The bits of a NaN after a cast depend on which of torch's kernels made it, so they are not compared."""

    def body(model, session):
        model.train(1)
        if model.is_source:
            for tensor in model.tensors.values():
                tensor[::2] = float("nan")
        session.refit(1)
        if not model.is_source:
            for name, tensor in model.tensors.items():
                want = model.cast_once(name, 1)
                assert torch.equal(tensor.isnan().any(1), torch.tensor(ROW_IS_NAN))
                assert torch.equal(tensor[tensor.isfinite()], want[tensor.isfinite()])
        return session.refit(2)

    for report in run(MIXED, body, transport=transport, verify=verify, commit="in-place"):
        assert report.unchanged is None or len(report.unchanged) == len(NAMES)


ROW_IS_NAN = [row % 2 == 0 if row < ROWS[1] else (row - ROWS[1]) % 2 == 0 for row in range(SHAPE[0])]


@pytest.mark.parametrize("transport", ["torch_p2p", "shm"])
def test_a_cast_that_goes_wrong_as_it_is_unpacked_is_found(transport, monkeypatch):
    carry_out, broken = mover.carry_out, []

    def wrong(copies):
        carry_out(copies)
        if threading.current_thread().name in broken:
            copies.bits[0][0][..., -1] ^= 1

    monkeypatch.setattr(mover, "carry_out", wrong)

    def body(model, session):
        model.train(1)
        session.refit(1)
        if (model.world, model.rank) == ("gen0", 2):
            broken.append(threading.current_thread().name)
        return error_of(lambda: session.refit(2))

    errors = run(MASTERS, body, transport=transport, verify="sum", commit="in-place")
    assert isinstance(errors[-1], VerifyError)
    assert all(isinstance(error, PeerError) for error in errors[:-1])


def test_a_snapshot_is_cast_as_it_is_sent_and_the_trainer_may_go_on_writing():
    def body(model, session):
        model.train(1)
        work = session.refit(1, async_op=True, snapshot=True)
        model.train(9)
        report = work.wait()
        model.check(1)
        return report

    for report in run(MASTERS, body, commit="in-place"):
        assert report.copies_nbytes == 0


@pytest.mark.parametrize("dtypes", [MASTERS, MIXED], ids=["masters", "mixed"])
def test_fingerprints_of_what_is_cast_tell_versions_apart_before_and_after_they_are_packed(dtypes):
    """What was summed as the last version was packed does not stand for what the source holds by now."""

    def body(model, session):
        model.train(1)
        first, again = session.refit(1), session.refit(1)
        model.train(2)
        error = error_of(lambda: session.refit(1))
        model.check(1)
        second = session.refit(2)
        model.check(2)
        return first, again, error, second, {} if model.is_source else session.verify()

    for first, again, error, second, versions in run(dtypes, body, transport="torch_p2p", verify="fingerprint"):
        assert isinstance(error, VersionError)
        assert first.digest == again.digest != second.digest
        assert (len(again.unchanged), second.unchanged) == (len(NAMES), ())
        assert set(versions.values()) <= {2}


def _grown(ctx, address, transport, verify, limit):
    """32 tensors of 1 MiB in float32 from one rank to one, in bfloat16: how much more a refit holds at its peak."""
    torch.set_num_threads(1)
    side = 512
    is_source = ctx.rank == 0
    dtype = torch.float32 if is_source else torch.bfloat16
    tensors = {f"p{at}": torch.full((side, side), at + 0.3 if is_source else 0.0, dtype=dtype) for at in range(32)}
    with reshard.connect(
        address,
        role="source" if is_source else "destination",
        world=("trainer", "gen0")[ctx.rank],
        rank=0,
        world_size=1,
        expect={"trainer": 1, "gen0": 1},
        transport=transport,
        verify=verify,
        commit="in-place",
        staging_nbytes=limit,
        timeout=TIMEOUT,
    ) as session:
        (session.offer if is_source else session.accept)(tensors)
        with torch_allocations():
            torch.zeros(1)
        forget_resident_peak()
        before = resident_peak_nbytes()
        with torch_allocations() as allocated:
            report = session.refit(1)
        grown = resident_peak_nbytes() - before
    want = torch.full((side, side), 0.3) + torch.arange(32)[:, None, None]
    assert all(torch.equal(t, want[at].to(dtype)) for at, t in enumerate(tensors.values()))
    return grown, allocated["peak"], report.staging_nbytes, report.copies_nbytes


@pytest.mark.parametrize("transport", ["torch_p2p", "shm"])
@pytest.mark.parametrize("verify", ["none", "sum"])
def test_a_refit_with_casts_holds_no_more_than_its_staging(pool, transport, verify):
    """Copies of what is cast would take 16 MiB."""
    limit = 2 * MIB
    with reshard.serve_store() as store:
        for grown, allocated, staging, copies in pool.run(_grown, str(store), transport, verify, limit, timeout=90):
            assert copies == 0
            assert staging <= limit + 64
            assert allocated <= limit + 2 * MIB, "and two pieces of scratch"
            assert grown <= limit + 7 * MIB, "Python, threads, sockets, and a peer's slots that are mapped here"
