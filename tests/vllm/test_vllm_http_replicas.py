"""Live data parallel replicas of one server: both get each version, and it stays paused while one of them lacks it."""

from __future__ import annotations

import pytest
from tests.vllm import servers as vllm_servers
from tests.vllm.deaths import answers_nothing
from tests.vllm.engines import random_weights, save
from tests.vllm.holds import Holds
from tests.vllm.live import KINDS, PROMPTS, Counter, Trainer, write_model

import reshard

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]


class OneReplica(Holds):
    """Becomes a base of vLLM's worker."""

    def fail_next_install_of(self, replica):
        """Let the next install of one replica fail before it has written anything."""
        if self.parallel_config.data_parallel_index == int(replica):
            self.fail_next_install("before", str(self.rank))


EXTENSION = ["--worker-extension-cls", f"{__name__}.{OneReplica.__name__}"]


def answers_of(server):
    """By replica."""
    return [[server.generate(prompt, replica=replica) for prompt in PROMPTS] for replica in range(2)]


def test_replicas_get_each_version_and_stay_paused_while_one_of_them_lacks_it(tmp_path):
    specs = write_model(tmp_path)
    save(tmp_path, random_weights(specs, KINDS[0]))
    options = {"dp": 2, "load_format": "auto", "more": EXTENSION}
    with reshard.serve_store() as store, vllm_servers.started(tmp_path, tmp_path, [1], **options) as (server,):
        fresh = answers_of(server)
        assert fresh[0] == fresh[1]
        trainer = Trainer(str(store), specs, {"engine": (server.url, 2)})
        other, same, lost, mended = (Counter.next(kind=kind) for kind in (1, 0, 1, 0))

        (report,), (sent,) = trainer.run([other])
        assert sent <= 1.01 * sum(spec.nbytes for spec in specs)  # both are on one host
        assert report.copies_into["host1"] == 1.0
        changed = answers_of(server)
        assert changed[0] == changed[1] != fresh[0]
        trainer.run([same])
        assert answers_of(server) == fresh

        server.call_workers("fail_next_install_of", "1")
        with pytest.raises(Exception, match="no room") as raised:
            trainer.run([lost])
        assert f"its weights may be a mix of {same} and {lost}, until a refit completes" in str(raised.value)
        assert server.get("/is_paused") == {"is_paused": True}
        waiting = answers_nothing(server)
        trainer.run([mended])
        assert waiting.wait().tokens == fresh[0][0]
        assert answers_of(server) == fresh
        assert server.get("/weight_info") == {"weight_version": str(mended)}
