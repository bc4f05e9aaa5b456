"""Engines whose ranks are processes of a test's pool: these import vLLM once, for many engines one after the other."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from tests.vllm.engines import answer, in_process, install, receive, tell
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def one_of(ctx, folder, **options):
    """This process's rank of an engine; all ranks must ask it the same, in the same order. One engine in a run."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if ctx.rank == 0:
        ctx.store.set("engine", uuid.uuid4().hex)
    name = f"engine_{ctx.store.get('engine').decode()}"

    class OneRank(UniProcExecutor):
        def _distributed_args(self):
            return f"file://{folder}/{name}", ctx.rank, ctx.rank

    try:
        with in_process(folder, tp=ctx.size, distributed_executor_backend=OneRank, **options) as llm:
            yield llm
    finally:
        for shared in Path("/dev/shm").glob(f"{name}*"):
            shared.unlink(missing_ok=True)  # vLLM leaves what its ranks reduce in


def answers_of_fresh(ctx, folder):
    """What an engine answers that loads its weights from a checkpoint, twice."""
    with one_of(ctx, folder, load_format="safetensors") as llm:
        return answer(llm), answer(llm)


def follow(ctx, folder, facts, versions):
    """Follow a trainer from version to version.

    Returns:
        The answers by version, and this rank's account of the last one.
    """
    from reshard.integrations.vllm.member import Member

    run, receiving, installing = Member._run, Allocations(), Allocations()

    def watched(member):
        with receiving:
            run(member)

    Member._run = watched
    try:
        with one_of(ctx, folder, weight_transfer_config={"backend": "reshard"}) as llm:
            tell(llm, "init_weight_transfer_engine", init_info=facts)
            answers = {}
            for version in versions:
                receive(llm, version)
                with installing:
                    install(llm, version)
                answers[version] = answer(llm)
            (account,) = tell(llm, account_of, version=max(versions))
    finally:
        Member._run = run
    made = {"receiving": sorted(receiving.nbytes), "installing": sorted(installing.nbytes)}
    return answers, {**account, **made}


def account_of(worker, version):
    """What a worker received in a refit, which is over when all others have installed, and what it keeps for it."""
    engine = worker.weight_transfer_engine
    expiry = time.monotonic() + 60
    while engine.report is None or engine.report.version != version:
        assert time.monotonic() < expiry
        time.sleep(0.01)
    report, trace = engine.report, engine.trace
    loaded = max(prod(b.shape) * getattr(torch, b.dtype).itemsize for b in trace.buffers)
    return {
        "received": report.received_nbytes,
        "staging": report.staging_nbytes - report.copies_nbytes,
        "room": report.copies_nbytes,
        "direct": trace.direct_nbytes,
        "whole": trace.whole_nbytes,
        "largest buffer": loaded,
        "largest that serves": max(loaded, *(t.untyped_storage().nbytes() for t in engine.model.parameters())),
    }


class Allocations(TorchDispatchMode):
    """Sees what memory is made by operations on CPU tensors, in whichever threads it is entered."""

    def __init__(self):
        super().__init__()
        self.nbytes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        known = {_memory(leaf) for leaf in tree_leaves((args, kwargs))}
        self.nbytes += [
            leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and _memory(leaf) not in known
        ]
        return result


def _memory(leaf):
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.untyped_storage()
    return leaf.data_ptr() if isinstance(leaf, torch.UntypedStorage) else None
