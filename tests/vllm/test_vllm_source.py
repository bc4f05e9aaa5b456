"""vLLM's own trainer side with the backend ``reshard``: its factory, its client protocol, its ModuleSource."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

import reshard
from reshard.errors import ConfigError
from reshard.testing.processes import threads

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

TIMEOUT = timedelta(seconds=60)


class Client:
    """A VLLMWeightSyncClient: what an engine with one worker does with the four calls, with tensors for a model."""

    def __init__(self, tensors):
        self.tensors, self.calls, self.session, self.work = tensors, [], None, None
        self.may_install = threading.Event()

    def init_weight_transfer_engine(self, info):
        self.calls.append("init")
        if self.session is not None or self.work is not None:
            return
        names = ("expect", "session", "commit", "verify", "strategy", "transport", "staging_nbytes")
        options = {name: info[name] for name in names}

        def join():
            self.session = reshard.connect(
                info["address"], role="destination", world=info["world"], rank=0, timeout=TIMEOUT, **options
            )
            self.session.accept(self.tensors, install=self._install)

        self._begin(join)

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, info):
        self.calls.append(f"{info['action']} {info['version']}")
        if info["action"] == "receive":
            self.may_install.clear()
            self._begin(lambda: self.session.refit(info["version"], to=info["to"]))
        else:
            self.may_install.set()

    def finish_weight_update(self, weight_version=None):
        self.calls.append(f"finish {weight_version}")

    def _install(self, landed):
        assert self.may_install.wait(landed.timeout_seconds)
        for piece, view in landed.pieces:
            self.tensors[piece.name].copy_(view)

    def _begin(self, work):
        before = self.work

        def in_turn():
            if before is not None:
                before.join()
            work()

        self.work = threading.Thread(target=in_turn, daemon=True)
        self.work.start()


def test_send_weights_drives_all_phases_on_every_rank_and_versions_count_up():
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from reshard.integrations.vllm.source import ReshardTrainerInitInfo

    wanted = torch.nn.Linear(8, 6)
    got = {name: torch.full_like(tensor, -7.0).detach() for name, tensor in wanted.state_dict().items()}
    client = Client(got)
    with reshard.serve_store() as store:

        def rank(ctx):
            module = torch.nn.Linear(8, 6)
            expect = {"trainer": 2, "engine": 1}
            info = ReshardTrainerInitInfo(str(store), expect, rank=ctx.rank, options={"timeout": TIMEOUT})
            assert info.is_sender == (ctx.rank == 0)
            trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(module))
            seen = []
            for value in (1.0, 2.0):
                with torch.no_grad():
                    module.weight.fill_(value)
                    module.bias.fill_(-value)
                trainer.send_weights()
                seen.append((trainer.report.version, got["weight"].unique().tolist(), got["bias"].unique().tolist()))
            trainer.shutdown()
            return seen

        seen = threads(2, rank, timeout=100)
        client.work.join(30)
        client.session.close()
    assert seen == [[(1, [1.0], [-1.0]), (2, [2.0], [-2.0])]] * 2
    assert client.calls == [
        "init",  # at connect
        *("init", "start", "receive 1", "install 1", "finish 1"),
        *("init", "start", "receive 2", "install 2", "finish 2"),
    ]


def test_what_cannot_be_is_refused_before_the_session():
    from reshard.integrations.vllm.source import ReshardTrainerEngine, ReshardTrainerInitInfo

    info = ReshardTrainerInitInfo("tcp://127.0.0.1:1", {"trainer": 1}, rank=0)
    with pytest.raises(ConfigError, match="pass source=ModuleSource"):
        ReshardTrainerEngine.trainer_init(info, client=None)
    with pytest.raises(ConfigError, match="'trainer' and 'engine' must be in it"):
        ReshardTrainerEngine.trainer_init(info, client=None, source=object())
