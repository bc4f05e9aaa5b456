"""Bytes that land in the host's memory beside weights that lie elsewhere, which a CPU makes believe."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.refit.sessions import NAMES, TIMEOUT, Rank, dense

import reshard
from reshard.errors import ConfigError
from reshard.refit.accept import make_acceptance
from reshard.refit.call import Asked, Setup, declare
from reshard.refit.declared import device_of
from reshard.refit.landed import Hooks
from reshard.refit.membership import Comer
from reshard.refit.options import make_options
from reshard.testing.processes import threads
from reshard.transports import program
from reshard.transports.messages import Messages

NAME = NAMES[0]
EXPECT = {"trainer": 1, "engine": 2}


def refit(store, rank, **options):
    one = Rank("trainer", 0, 1, names=[NAME]) if rank == 0 else Rank("engine", rank - 1, 2, names=[NAME])
    if one.is_source:
        one.tensors[NAME].copy_(dense(1, NAME))
    with one.connect(store, EXPECT, transport="torch_p2p", **options) as session:
        landing = 0 if one.is_source else session.landing_nbytes
        report = session.refit(1)
    assert torch.equal(one.tensors[NAME], dense(1, NAME)[one.part])
    return landing, report.copies_nbytes


@pytest.mark.parametrize("verify", ["none", "sum", "fingerprint"])
def test_what_lands_in_other_memory_than_messages_do_goes_through_staging(monkeypatch, verify):
    """Messages are told that they lie on another kind of device than all memory, as a GPU's are."""
    compiled = []

    class Elsewhere(Messages):
        def __init__(self, *args, device, **options):
            super().__init__(*args, device="meta", **options)

        def compile(self, operations):
            order = super().compile(operations)
            compiled.extend(order)
            return order

    monkeypatch.setattr(program, "Messages", Elsewhere)
    with reshard.serve_store() as store:
        told = threads(3, lambda ctx: refit(str(store), ctx.rank, staged_on="host", verify=verify))
    assert [landing > 0 for landing, _ in told] == [False, True, True]
    assert all(landing == copies for landing, copies in told)
    assert len(compiled) >= 4
    assert all(message.slot is not None for message in compiled), "some message lies in the weights themselves"


def test_room_in_the_host_does_not_say_where_the_weights_are():
    options = make_options(
        strategy="reshard", transport="auto", verify="none", staging_nbytes="1MiB", casts=True, commit="staged"
    )
    me = Comer("engine", 0, "destination", "an identity", "a place")
    host = torch.device("cpu")
    setup = Setup("default", "a store", me, EXPECT, options, torch.device("cuda"), TIMEOUT, None, None, host)
    wanted = Rank("engine", 0, 2).manifest
    offer = make_acceptance(
        wanted, setup, Hooks(install=print), rename=None, groups=None, offered=lambda: ()
    )  # room for the hook: a GPU is asked for none
    assert device_of(declare(setup, Asked(1, ("engine",), None, False, offer))) is None
    assert device_of(declare(replace(setup, lands_on=None), Asked(1, ("engine",), None, False, offer))) == host


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staged_on": "hosts"}, r"staged_on='hosts' is unknown; use one of device, host\."),
        ({"staged_on": "host", "commit": "in-place"}, r"staged_on='host' says where bytes land .* use commit='staged'"),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_anybody_is_met(options, message):
    with pytest.raises(ConfigError, match=message):
        Rank("engine", 0, 2).connect("tcp://127.0.0.1:1", EXPECT, **options)
