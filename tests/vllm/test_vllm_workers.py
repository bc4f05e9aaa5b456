"""The workers of one engine end each call alike: two processes with the weight transfer engine, and no more of vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from reshard.errors import InstallError, PeerError
from reshard.integrations.vllm.workers import NOTHING_WRITTEN, UPDATE_OPEN
from reshard.testing.processes import ProcessPool

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]

INIT = {"address": "tcp://127.0.0.1:1", "world": "engine", "expect": {"engine": 2}}
INSTALL = {"action": "install", "version": 1}


class FakeMember:
    """A worker's part in a session, whose install goes as told."""

    def __init__(self, *, error=None, wrote=False):
        self.error, self.wrote, self.is_whole = error, wrote, error is None
        self.world_size, self.facts = 2, None

    def install(self, version):
        del version
        if self.error is not None:
            raise self.error

    def leave(self, reason):
        pass

    def close(self):
        pass


def engines(ctx, calls):
    """What each of some calls raised here, and whether the model runs after it."""
    from vllm.distributed import parallel_state

    from reshard.integrations.vllm.engine import ReshardEngine
    from reshard.integrations.vllm.guard import Guard

    torch.accelerator.synchronize = lambda: None  # as vLLM has it on CPUs
    store = dist.PrefixStore(f"calls{len(calls)}", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size)
    parallel_state._TP = SimpleNamespace(world_size=ctx.size, cpu_group=dist.group.WORLD)
    try:
        engine = object.__new__(ReshardEngine)
        engine.parallel_config = SimpleNamespace(rank=ctx.rank, world_size=ctx.size, data_parallel_index=0)
        engine._guard, engine._member, engine._is_open = Guard(torch.nn.Identity()), None, False
        told = []
        for call in calls:
            try:
                call(engine, ctx.rank)
            except Exception as error:
                told.append((f"{type(error).__name__}: {error}", bool(engine._guard.reason)))
            else:
                told.append(("", bool(engine._guard.reason)))
        return told
    finally:
        parallel_state._TP = None
        dist.destroy_process_group()


def installing(errors, wrote):
    """An install that goes so on each rank."""

    def call(engine, rank):
        engine._member = FakeMember(error=errors[rank], wrote=wrote[rank])
        engine.start_weight_update()
        engine.update_weights(INSTALL)

    return call


def join_anew(engine, rank):
    del rank
    engine._join = lambda facts: None
    engine.init_transfer_engine(engine.parse_init_info(INIT))


def join_wrongly(engine, rank):
    engine.init_transfer_engine(engine.parse_init_info({**INIT, "commit": "in-place"} if rank == 0 else INIT))


def join_with_shared_experts(engine, rank):
    del rank
    engine.parallel_config.data_parallel_size = 2  # vLLM leaves it so for a model of experts alone
    engine.init_transfer_engine(engine.parse_init_info(INIT))


def end_update(engine, rank):
    del rank
    engine.finish_weight_update()


NO_ROOM = InstallError("no room", untouched=True)


def refuse_one(engine, rank):
    """Only the first worker fails, and the other one has written."""
    installing([NO_ROOM, None], [False, True])(engine, rank)


def refuse_all(engine, rank):
    installing([NO_ROOM, NO_ROOM], [False, False])(engine, rank)


def succeed(engine, rank):
    installing([None, None], [True, True])(engine, rank)


@pytest.fixture(scope="module")
def run():
    """Let both workers do some calls."""
    with ProcessPool(2) as pool:
        yield lambda *calls: pool.run(engines, calls, timeout=200)


def test_an_error_on_any_worker_is_raised_on_the_last_one_alone_and_all_models_stop_if_one_has_written(run):
    first, last = run(refuse_one, end_update, refuse_all, succeed, refuse_all)
    assert [text for text, _ in first] == [""] * 5
    assert "PeerError: Worker 0: no room" in last[0][0]
    assert NOTHING_WRITTEN not in last[0][0]
    assert "InstallError: no room" in last[2][0]
    assert NOTHING_WRITTEN not in last[2][0]  # they were a mix before it
    assert NOTHING_WRITTEN in last[4][0]
    assert [shut for _, shut in first] == [shut for _, shut in last] == [True, True, True, False, False]


def test_joining_an_engine_with_an_open_update_says_so_and_what_cannot_be_read_is_an_error_of_all(run):
    first, last = run(join_anew, refuse_one, join_anew, end_update, join_anew, join_wrongly)
    assert [text for text, _ in first] == [""] * 6
    assert last[0][0] == last[4][0] == ""
    assert UPDATE_OPEN in last[2][0]  # vLLM has ended it on the worker that raised, and on no other
    assert "Worker 0: " in last[5][0]
    assert "takes 'staged' only" in last[5][0]
    assert PeerError.__name__ in last[5][0]


def test_replicas_that_share_out_experts_are_refused(run):
    (first,), (last,) = run(join_with_shared_experts)
    assert first == ("", False)
    assert last[0].startswith("ConfigError: This engine's data parallel ranks share out experts")
