"""New weights for a live vLLM server, four ways by turns in one run: time, standstill, memory, answers.

A trainer of two FSDP2 processes has the weights (SmolLM2-135M of the demo, unless ``--model`` names a folder):

  reshard                  every worker takes its own pieces beside the weights that serve, then installs them
  full tensors, packed     vLLM's own NCCL backend, both sides, gloo in the place of NCCL's communicator:
  full tensors, one by one   each tensor is gathered, broadcast and loaded, while the server stands still
  checkpoint folder        the trainer gathers and saves a folder, and the server runs vLLM's reload_weights

Run it with the Python of ``make venv-vllm``: ``.venv-vllm/bin/python benchmarks/vllm_refit.py``; it takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import torch.distributed as dist
from vllm_ways import PLUGIN, WAYS, train

import reshard
from reshard.demo.checkpoint import cache_folder, packaged_checkpoint
from reshard.testing.ports import free_port
from reshard.testing.processes import ProcessPool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).parent
START_SECONDS = 300
SMOKE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


@contextmanager
def served(model: Path, tp: int, log: Path) -> Iterator[str]:
    """A vLLM server of a model, which ends with the block; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", str(tp), "--dtype", "bfloat16"]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out", "--max-model-len", "128"]
    command += ["--max-num-seqs", "2", "--worker-extension-cls", "vllm_worker.Extension"]
    command += ["--weight-transfer-config", '{"backend": "reshard"}']
    cores = len(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(tp)),
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        expiry = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < expiry:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        else:
            raise SystemExit(f"The server did not start:\n{trouble(log)}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trouble(log: Path) -> str:
    """What a server's log says from its first error on, or at its end."""
    said = log.read_text(errors="replace")
    first = said.find(" ERROR ")
    return said[first : first + 6000] if first >= 0 else said[-6000:]


def measure(model: Path, tp: int, repeat: int) -> list[dict[str, Any]]:
    """Hand over ``1 + repeat`` times by each way; what the trainer's first rank saw."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, ProcessPool(2) as pool, reshard.serve_store() as address:
        saved = Path(folder) / "saved"
        saved.mkdir()
        (saved / "config.json").write_bytes((model / "config.json").read_bytes())
        log = Path(folder) / "server.log"
        with served(model, tp, log) as url:
            options = {"model": str(model), "saved": str(saved), "url": url, "address": str(address)}
            options |= {"port": store.port, "tp": tp, "repeat": repeat}
            try:
                results: list[dict[str, Any]] = pool.run(train, options, timeout=120 + 60 * (1 + repeat))[0]
            except Exception:
                print(trouble(log), file=sys.stderr)
                raise
    return results


def summary(results: Sequence[dict[str, Any]], model: str, tp: int, repeat: int) -> dict[str, Any]:
    """Medians without the first turn; the most memory of all turns."""
    loaded, *hand_overs = results
    right = {0: loaded["answers"]}  # what the server answered with the weights that it had loaded itself
    right[1] = next(one["answers"] for one in hand_overs if one["way"] == PLUGIN and one["kind"] == 1)
    ways = {}
    for way in WAYS:
        all_turns = [one for one in hand_overs if one["way"] == way]
        later = [one for one in all_turns if one["turn"] > 0]
        pause = statistics.median(one["pause_seconds"] for one in later)
        seconds = statistics.median(one["seconds"] for one in later)
        ways[way] = {
            "seconds": seconds,
            "pause_seconds": pause,
            "background_seconds": statistics.median(one["seconds"] - one["pause_seconds"] for one in later),
            "first_seconds": all_turns[0]["seconds"],
            "worker_extra_nbytes": max(max(one["worker_nbytes"]) for one in all_turns),
            "trainer_extra_nbytes": max(max(one["trainer_nbytes"]) for one in all_turns),
            "answers_are_right": all(one["answers"] == right[one["kind"]] for one in all_turns),
            "answers_are_right_as_left": all(one["answers_as_left"] == right[one["kind"]] for one in all_turns),
            "all_seconds": [one["seconds"] for one in later],
            "all_pause_seconds": [one["pause_seconds"] for one in later],
        }
    return {
        "model": model,
        "tp": tp,
        "repeat": repeat,
        "kinds_differ": right[0] != right[1],
        "sent_nbytes": max(one["sent_nbytes"] or 0 for one in hand_overs),
        "ways": ways,
    }


def table(report: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"{report['model']}, TP {report['tp']}, medians of {report['repeat']} hand-overs by turns; memory: the most "
        "that a rank took besides what it had",
        f"{'':26}{'in all, s':>10}{'stands still, s':>17}{'worker, MB':>12}{'trainer, MB':>13}  answers",
    ]
    for way, one in report["ways"].items():
        answers = "right" if one["answers_are_right_as_left"] else "wrong"
        if answers == "wrong" and one["answers_are_right"]:
            answers = "wrong, right once the tied head is packed anew"
        lines.append(
            f"{way:26}{one['seconds']:10.3f}{one['pause_seconds']:17.3f}{one['worker_extra_nbytes'] / 1e6:12.0f}"
            f"{one['trainer_extra_nbytes'] / 1e6:13.0f}  {answers}"
        )
    return "\n".join(lines)


def write_smoke(folder: Path) -> Path:
    """A tiny random model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SMOKE, architectures=["LlamaForCausalLM"], initializer_range=0.2)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder of weights; the demo's model if not given")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel workers of the server (default: 1)")
    parser.add_argument("--repeat", type=int, default=5, help="measured hand-overs of each way (default: 5)")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, to see that all of it runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            model, name = write_smoke(Path(folder)), "a tiny random model"
        elif options.model is not None:
            model, name = options.model, options.model.resolve().name
        else:
            checkpoint = packaged_checkpoint(cache_folder(), lambda doing: print(doing, file=sys.stderr))
            model, name = checkpoint.folder, checkpoint.name
        report = summary(measure(model, options.tp, options.repeat), name, options.tp, options.repeat)
    print(json.dumps(report, indent=1) if options.json else table(report))
    wrong = [way for way, one in report["ways"].items() if not one["answers_are_right"]]
    if wrong or not report["kinds_differ"]:
        raise SystemExit(f"Wrong answers after: {', '.join(wrong) or 'none, but both sets of weights answer alike'}.")


if __name__ == "__main__":
    main()
