"""A trainer on one host refits vLLM servers on another: what crosses the link between them is counted at the link.

The hosts are namespaces: they share neither network nor memory, so that bytes of weights can only come over the link,
and inside the engines' host only over its own memory. The servers are started with a checkpoint, so that each says by
itself what a fresh engine of its size answers.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
from tests.vllm.engines import random_weights, save
from tests.vllm.tiny import LLAMA, checkpoint, write_config
from tests.vllm.trainers import Tree, fill

import reshard
from reshard.testing.hosts import Cluster, hear, supported

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
TIMEOUT = timedelta(seconds=150)
_START_SECONDS = 500
SIZES = {"gen0": 1, "gen1": 2}
"""Servers, and their tensor parallel ranks."""
KINDS = (31, 32)
"""Seeds of two sets of weights; the servers are started with the first one."""
PROMPTS = ([1, 5, 9], [7] * 5, [40, 3, 200, 17, 99, 1])
SMALL = "model.norm.weight"
"""A tensor of a few bytes: a refit of it alone says the same as one of all of them, and brings nothing."""


# -- on the trainer's host ---------------------------------------------------------------------------------------------


def trainer_rank(talk, rank, address, specs):
    """One of two FSDP2 ranks: it does what it is told until it is told None."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    talk.send(store.port if store else None)
    port = talk.recv()
    store = store or dist.TCPStore(address, port, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=dist.PrefixStore("trainer", store), rank=rank, world_size=2, timeout=TIMEOUT)
    model = Tree.of({s.name: torch.zeros(s.shape) for s in specs})  # float32: it travels as bfloat16
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    session = None
    talk.send("ready")
    while (command := talk.recv()) is not None:
        what, *arguments = command
        if what == "connect":
            session = connect(f"tcp://{address}:{port}", rank, *arguments)
            session.offer(model)
            talk.send(None)
        elif what == "refit":
            version, seed, names = arguments
            fill(model, random_weights(specs, seed))
            talk.send(session.refit(version, names=names))
        elif what == "close":
            session.close()
            talk.send(None)
        else:
            talk.send(globals()[what](*arguments) if rank == 0 else None)
    dist.destroy_process_group()


def connect(store, rank, name, urls, strategy):
    from reshard.integrations.vllm.servers import VLLMServers

    return reshard.connect(
        store,
        role="source",
        world="trainer",
        rank=rank,
        world_size=2,
        expect={"trainer": 2, **{world: SIZES[world] for world in urls}},
        session=name,
        strategy=strategy,
        engines=VLLMServers(urls, pause="keep"),
        timeout=TIMEOUT,
    )


def wait_for(urls):
    """Wait until all servers answer."""
    expiry = time.monotonic() + _START_SECONDS
    left = list(urls)
    while left:
        assert time.monotonic() < expiry, f"no answer from {left[0]}"
        try:
            if ask(left[0], "GET", "/health")[0] == 200:
                left.pop(0)
                continue
        except OSError:
            pass
        time.sleep(0.5)


def answers_of(url):
    """Tokens and their logprobs of each prompt, one at a time."""
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 1, "detokenize": False}
    found = []
    for prompt in PROMPTS:
        status, answer = ask(url, "POST", "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})
        assert status == 200, answer
        choice = answer["choices"][0]
        found.append((choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]))
    return found


def ask(url, method, route, body=None):
    """(status, JSON)."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=120)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, route, payload, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    finally:
        connection.close()


# -- the test's side ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refit:
    """What one refit moved; without the headers of packets."""

    sent_nbytes: int
    """Of weights, by both ranks of the trainer."""
    copies_into: set[float]
    """As the plan says it of the hosts."""
    came_nbytes: int
    """To the engines' host, of whatever kind, as its link counts them."""
    left_nbytes: int


class Scene:
    """Two hosts, two servers on one of them, the trainer on the other."""

    def __init__(self, cluster, ranks, urls, specs):
        self.cluster, self.ranks, self.urls, self.specs = cluster, ranks, urls, specs
        self.fresh = {world: self.tell("answers_of", url)[0] for world, url in urls.items()}
        """What each server answers with the first set of weights, which it has loaded itself."""

    @property
    def distinct_nbytes(self):
        """Of the weights: every engine wants all of them, in bfloat16."""
        return sum(spec.nbytes for spec in self.specs)

    def tell(self, *command):
        """Let both ranks do something; what they say."""
        for task in self.ranks:
            task.send(command)
        return hear(self.ranks, 300)

    def connect(self, worlds, strategy="reshard"):
        """Begin a session with some of the servers."""
        urls = {world: self.urls[world] for world in worlds}
        self.tell("connect", f"{'+'.join(worlds)} {strategy}", urls, strategy)

    def refit(self, version, kind, names=None):
        """Bring a set of weights, and read the link of the engines' host before and after."""
        before = self.cluster.link_count("engines")
        reports = self.tell("refit", version, KINDS[kind], names)
        count = self.cluster.link_count("engines") - before
        sent = sum(report.sent_nbytes for report in reports)
        return Refit(sent, set(reports[0].copies_into.values()), count.in_payload_nbytes, count.out_payload_nbytes)

    def answers(self, worlds):
        return {world: self.tell("answers_of", self.urls[world])[0] for world in worlds}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    reason = supported()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    config = write_config(
        folder, LLAMA, hidden_size=256, intermediate_size=768, vocab_size=16384, num_key_value_heads=2
    )
    specs = checkpoint(config)
    save(folder, random_weights(specs, KINDS[0]))
    servers = []
    with Cluster(["trainer", "engines"]) as cluster:
        urls = {}
        for at, (world, tp) in enumerate(SIZES.items()):
            urls[world] = f"http://{cluster.address('engines')}:{8000 + at}"
            servers.append(start(cluster, folder, urls[world], tp))
        address = cluster.address("trainer")
        ranks = [
            cluster.start("trainer", trainer_rank, rank, address, specs, label=f"rank {rank}") for rank in range(2)
        ]
        (port, _) = hear(ranks, 100)
        for rank in ranks:
            rank.send(port)
        hear(ranks, 100)
        try:
            for rank in ranks:
                rank.send(("wait_for", list(urls.values())))
            hear(ranks, _START_SECONDS + 20)
            yield Scene(cluster, ranks, urls, specs)
        except BaseException:
            for log in folder.glob("*.log"):
                print(log.read_text()[-4000:])
            raise
    assert [server.wait(10) is not None for server in servers] == [True] * len(servers)  # they end with their host


def start(cluster, folder, url, tp):
    """Start a server on the engines' host."""
    at = urlsplit(url)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", at.hostname, "--port", str(at.port), "--tensor-parallel-size", str(tp), "--seed", "1"]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out", "--dtype", "bfloat16"]
    command += ["--max-model-len", "64", "--max-num-seqs", "2"]
    command += ["--weight-transfer-config", json.dumps({"backend": "reshard"})]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines have more workers than this machine has cores
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": at.hostname,
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with open(folder / f"server{at.port}.log", "w", encoding="utf-8") as log:
        return cluster.popen("engines", command, stdout=log, stderr=subprocess.STDOUT, env=environment)


@pytest.mark.parametrize("worlds", [("gen0",), ("gen0", "gen1")], ids=["one engine", "two engines"])
def test_each_slice_of_the_weights_enters_the_engines_host_once(worlds, scene):
    scene.connect(worlds)
    scene.refit(1, kind=1)  # it connects, traces and plans
    changed = scene.answers(worlds)
    assert all(changed[world] != scene.fresh[world] for world in worlds)
    scene.refit(2, kind=0)
    assert scene.answers(worlds) == {world: scene.fresh[world] for world in worlds}  # tokens, and logprobs to the bit

    measured = [scene.refit(version, kind=version % 2) for version in (3, 4, 5)]
    assert scene.answers(worlds) == changed
    scene.refit(6, kind=1, names=[SMALL])  # it plans the part
    control = scene.refit(7, kind=1, names=[SMALL])
    scene.tell("close")

    distinct = scene.distinct_nbytes
    for one in measured:
        assert one.sent_nbytes == distinct  # of weights: each byte once, for all engines together
        assert one.copies_into == {1.0}
        assert one.came_nbytes >= distinct  # they did come over the link
    # The least of three: what TCP sends again on a busy machine is counted too.
    came = min(one.came_nbytes for one in measured) - control.came_nbytes
    left = min(one.left_nbytes for one in measured) - control.left_nbytes
    print(f"{distinct} B distinct; {came} B came for them, {control.came_nbytes} B besides; {left} B left for them")
    assert came <= 1.01 * distinct
    assert left <= 0.01 * distinct


def test_point_to_point_brings_them_for_each_engine_which_the_link_shows(scene):
    scene.connect(("gen0", "gen1"), strategy="point-to-point")
    scene.refit(1, kind=1)
    one = scene.refit(2, kind=0)
    assert scene.answers(scene.urls) == scene.fresh
    scene.tell("close")
    assert one.sent_nbytes >= 2 * scene.distinct_nbytes
    assert one.came_nbytes >= 2 * scene.distinct_nbytes
