"""Refits over several domains, moved for real: every element compared, with striped, relayed and forwarded buckets.

All ranks are threads of one process; the topology says which of them count as hosts.
"""

import threading
from datetime import timedelta

import pytest
import torch
from tests.plan.worlds import random_refit

from reshard.layouts.bound import bind_shards
from reshard.layouts.manifest import Manifest
from reshard.refit.compile import compile_refit
from reshard.testing.processes import threads
from reshard.transports.shm import share_memory_

POISON = -7.0
TIMEOUT = timedelta(seconds=30)


def dense(shape):
    """A tensor whose values name their place."""
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)


def part(shape, box):
    return dense(shape)[tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))]


def local_side(manifest, rank, *, filled, shared=False):
    """This rank's tensors of a manifest by rules, bound: filled from the dense copy, or poisoned."""
    bound, tensors = [], {}
    for entry in manifest.entries:
        for rule in entry.holdings:
            if rank not in rule.ranks:
                continue
            layout = rule.layout(entry.spec)
            tensor = torch.full(layout.local_shape(rank), POISON)
            if shared:
                share_memory_([tensor])
            pieces = bind_shards(entry.spec.name, layout, rank, tensor)
            for piece in pieces if filled else ():
                piece.view.copy_(part(entry.spec.shape, piece.piece.box))
            tensors[entry.spec.name] = (tensor, pieces, entry.spec.shape)
            bound += pieces
    return Manifest(manifest.entries, "w", 0, (), tuple(bound)), tensors


def move(context, seed, transport):
    torch.set_num_threads(1)
    src, dst, topology = random_refit(seed)
    held, _ = local_side(src, context.rank, filled=True, shared=bool(seed % 2))
    wanted, tensors = local_side(dst, context.rank, filled=False)
    refit = compile_refit(
        context.process_group("refit"),
        src=held if held.local else None,
        dst=wanted if wanted.local else None,
        transport=transport,
        topology=topology,
        staging_nbytes=("8KiB", "32KiB", "1MiB")[seed % 3],
        verify=("none", "sum", "fingerprint")[seed // 3 % 3],
        timeout=TIMEOUT,
    )
    for _ in range(2):
        for tensor, _, _ in tensors.values():
            tensor.fill_(POISON)
        refit.run(TIMEOUT)
        for _, pieces, shape in tensors.values():
            for piece in pieces:
                assert torch.equal(piece.view, part(shape, piece.piece.box)), piece.piece
    return {route.rule for route in refit.plan.routes}


@pytest.mark.parametrize("transport", ["torch_p2p", "auto"])
@pytest.mark.parametrize("seed", range(16))
def test_every_element_lands_where_a_dense_copy_would_put_it(seed, transport):
    _, _, topology = random_refit(seed)
    size = max(rank for domain in topology.domains for rank in domain.ranks) + 1
    rules = threads(size, lambda context: move(context, seed, transport), timeout=90)
    assert len({frozenset(rule) for rule in rules}) == 1


def test_gpus_that_share_a_fabric_are_a_domain_and_each_has_a_port(monkeypatch):
    here = threading.local()
    monkeypatch.setattr("reshard.refit.compile.fabric_of", lambda _: here.label)

    def scenario(ctx):
        here.label = "fabric a" if ctx.rank in (0, 2) else "fabric b"
        side = Manifest.from_torch({"w": torch.arange(64) if ctx.rank == 0 else torch.zeros(64, dtype=torch.int64)})
        sides = {"src": side} if ctx.rank == 0 else {"dst": side}
        refit = compile_refit(ctx.process_group("all"), **sides, transport="torch_p2p")
        refit.run()
        topology = refit.plan.topology
        return [list(domain.ranks) for domain in topology.domains], len(topology.ports), refit.plan.crossings

    assert threads(4, scenario) == [([[0, 2], [1, 3]], 4, 1)] * 4  # one copy crosses, though three ranks want it
