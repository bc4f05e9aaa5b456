"""New weights into a live vLLM engine, three ways in one run: the plug-in, full tensors, and a checkpoint folder.

Run it with the Python of ``make venv-vllm``: ``.venv-vllm/bin/python benchmarks/vllm_refit.py`` (``--tp 2``,
``--model FOLDER``). A trainer of two FSDP2 processes has the weights.

- ``plug-in``: every rank of the engine takes its own pieces, beside the weights that serve, and installs them.
- ``full tensors``: each tensor is gathered, sent whole to every rank, and goes through the model's ``load_weights``.
- ``checkpoint``: the trainer gathers and writes a folder, and the engine runs vLLM's own ``reload_weights``.

For each way the median of some refits: seconds from a finished training step to new weights in the engine, of these
the seconds in which the engine can answer nothing, bytes sent, and the most memory that a worker and the trainer's
first rank took besides what they had.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import reshard
from reshard.demo.checkpoint import cache_folder, packaged_checkpoint
from reshard.testing.processes import ProcessPool

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS = ("plug-in", "full tensors", "checkpoint")
TIMEOUT = timedelta(seconds=180)


def train(ctx: Any, address: str, port: int, expect: dict[str, int], model: str, refits: int) -> list[dict[str, Any]]:
    """The trainer: for each way, change the weights and hand them over, ``refits`` times."""
    import torch

    from reshard.demo.checkpoint import Checkpoint
    from reshard.demo.trainer import Trainer
    from reshard.demo.worlds import SourceWorld

    torch.set_num_threads(1)
    store = dist.PrefixStore("trainer", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size, timeout=TIMEOUT)
    told = dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
    try:
        trainer = Trainer(Checkpoint.open(Path(model)), SourceWorld(ctx.size))
        rows: list[dict[str, Any]] = []
        for way in WAYS:
            hand_over = _by_folder(ctx.rank, told) if way == "checkpoint" else _by_session(ctx, address, expect, way)
            for version in range(refits):
                with torch.no_grad():
                    for held in trainer.held():
                        held.local.mul_(1.001)  # stands for a training step
                had = _reset_peak()
                row = hand_over(trainer.model, version)
                rows.append({"way": way, "trainer_nbytes": _status("VmHWM") - had, **row})
        return rows
    finally:
        dist.destroy_process_group()


def _by_session(ctx: Any, address: str, expect: dict[str, int], way: str) -> Callable[[Any, int], dict[str, Any]]:
    session = reshard.connect(
        address,
        role="source",
        world="trainer",
        rank=ctx.rank,
        world_size=ctx.size,
        expect=expect,
        session=way,
        strategy=_strategy(way),
        timeout=TIMEOUT,
    )

    def hand_over(model: Any, version: int) -> dict[str, Any]:
        if version == 0:
            session.offer(model)
        report = session.refit(version)
        return {"sent": report.sent_nbytes, "seconds": report.seconds - report.phases["gathering"]}

    return hand_over


def _by_folder(rank: int, told: Any) -> Callable[[Any, int], dict[str, Any]]:
    from safetensors.torch import save_file

    def hand_over(model: Any, version: int) -> dict[str, Any]:
        told.wait([f"ready {version}"])
        began = time.perf_counter()
        whole = {}
        for name, parameter in model.named_parameters():
            tensor = parameter.full_tensor().detach()
            if rank == 0:
                whole[name] = tensor
        if rank == 0:
            save_file(whole, f"{told.get('folder').decode()}/model.safetensors")
            told.set(f"saved {version}", "")
        told.wait([f"loaded {version}"])
        return {"sent": sum(t.nbytes for t in whole.values()), "seconds": time.perf_counter() - began}

    return hand_over


def _strategy(way: str) -> str:
    return "gather-broadcast" if way == "full tensors" else "reshard"


def serve(llm: Any, address: str, told: Any, expect: dict[str, int], refits: int) -> list[dict[str, Any]]:
    """The engine: take the weights each way, ``refits`` times."""
    rows = []
    for way in WAYS:
        facts = {"address": address, "world": "engine", "expect": expect, "session": way, "strategy": _strategy(way)}
        if way == "full tensors":
            facts["whole"] = {"*": "measured as the usual way"}
        for version in range(refits):
            had = llm.collective_rpc(_reset_of_worker)
            if way == "checkpoint":
                stall = _reload(llm, told, version)
            else:
                facts["timeout_seconds"] = TIMEOUT.total_seconds()
                llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": facts})
                llm.collective_rpc("start_weight_update")
                for action in ("receive", "install"):
                    info = {"action": action, "version": version}
                    llm.collective_rpc("update_weights", kwargs={"update_info": info})
                llm.collective_rpc("finish_weight_update")
                stall = max(llm.collective_rpc(_committing_of_worker))
            peaks = llm.collective_rpc(_peak_of_worker)
            extra = max(peak - before for peak, before in zip(peaks, had, strict=True))
            rows.append({"way": way, "stall": stall, "worker_nbytes": extra})
    return rows


def _reload(llm: Any, told: Any, version: int) -> float:
    told.set(f"ready {version}", "")
    told.wait([f"saved {version}"])
    began = time.perf_counter()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": told.get("folder").decode()})
    told.set(f"loaded {version}", "")
    return time.perf_counter() - began


def _reset_of_worker(worker: Any) -> int:
    return _reset_peak()


def _peak_of_worker(worker: Any) -> int:
    return _status("VmHWM")


def _committing_of_worker(worker: Any) -> float:
    return worker.weight_transfer_engine.report.phases["committing"]


def _reset_peak() -> int:
    """Let the kernel count this process's peak of memory from now; the bytes that it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(what: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{what}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder of weights; the demo's model if not given")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--refits", type=int, default=5, help="for each way; the first one, which plans, is left out")
    options = parser.parse_args()
    folder = options.model or str(packaged_checkpoint(cache_folder(), print).folder)
    os.environ |= {
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # this program sends functions to the workers
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(options.tp)),
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM

    told = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    expect = {"trainer": 2, "engine": options.tp}
    with tempfile.TemporaryDirectory() as saved, ProcessPool(2) as pool, reshard.serve_store() as store:
        (Path(saved) / "config.json").write_text((Path(folder) / "config.json").read_text())
        told.set("folder", saved)
        llm = LLM(
            folder,
            load_format="dummy",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=2,
            tensor_parallel_size=options.tp,
            weight_transfer_config={"backend": "reshard"},
        )
        try:
            with ThreadPoolExecutor(1) as thread:
                arguments = (str(store), told.port, expect, folder, options.refits)
                trainer = thread.submit(pool.run, train, *arguments, timeout=600)
                served = serve(llm, str(store), told, expect, options.refits)
                trained = trainer.result()
        finally:
            llm.llm_engine.engine_core.shutdown()
    show(trained, served)


def show(trained: list[list[dict[str, Any]]], served: list[dict[str, Any]]) -> None:
    """Print one line of JSON a way: medians, without the first refit."""
    for way in WAYS:
        first = [row for row in trained[0] if row["way"] == way][1:]
        sent = [sum(rows[at]["sent"] for rows in trained) for at, row in enumerate(trained[0]) if row["way"] == way]
        engine = [row for row in served if row["way"] == way][1:]
        result = {
            "way": way,
            "seconds": round(statistics.median(row["seconds"] for row in first), 4),
            "stall_seconds": round(statistics.median(row["stall"] for row in engine), 4),
            "sent_nbytes": sent[-1],
            "worker_extra_nbytes": round(statistics.median(row["worker_nbytes"] for row in engine)),
            "trainer_extra_nbytes": round(statistics.median(row["trainer_nbytes"] for row in first)),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
