"""A small session for tests: a trainer that holds rows, engines that want columns, every rank a thread or a process."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch

import reshard
from reshard.errors import ReshardError
from reshard.testing.processes import threads

POISON = -7.0
TIMEOUT = timedelta(seconds=20)
SHAPE = (12, 24)
NAMES = ("layers.0.w", "layers.1.w", "head.w")


def dense(version, name="layers.0.w"):
    """The whole tensor of a version: values that name place, tensor and version, and need rounding in bfloat16."""
    count = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    return count / 7 + 1000 * version + 100 * NAMES.index(name)


class Rank:
    """What one rank of a world has: trainers rows in float32, engines columns in a dtype of their own."""

    def __init__(self, world, rank, size, dtype=torch.float32, names=NAMES):
        self.world, self.rank, self.size, self.names = world, rank, size, names
        self.is_source = world == "trainer"
        dim = 0 if self.is_source else 1
        step = SHAPE[dim] // size
        self.part = [slice(None), slice(None)]
        self.part[dim] = slice(rank * step, (rank + 1) * step)
        self.part = tuple(self.part)
        start = [0, 0]
        start[dim] = rank * step
        shape = [*SHAPE]
        shape[dim] = step
        self.tensors = {name: torch.full(shape, POISON, dtype=dtype) for name in names}
        self.manifest = reshard.Manifest.from_views([(n, SHAPE, start, t) for n, t in self.tensors.items()])

    def connect(self, store, expect, **options):
        options = {"timeout": TIMEOUT, **options}
        session = reshard.connect(
            store,
            role="source" if self.is_source else "destination",
            world=self.world,
            rank=self.rank,
            world_size=self.size,
            expect=expect,
            **options,
        )
        self.bring(session)
        return session

    def bring(self, session, **options):
        (session.offer if self.is_source else session.accept)(self.manifest, **options)

    def train(self, version):
        """Set the weights of a version; only the source does so."""
        if self.is_source:
            for name, tensor in self.tensors.items():
                tensor.copy_(dense(version, name)[self.part])

    def is_version(self, version, names=None):
        return all(
            torch.equal(self.tensors[name], dense(version, name)[self.part].to(self.tensors[name].dtype))
            for name in names or self.names
        )

    def is_poison(self):
        return all(bool((tensor == POISON).all()) for tensor in self.tensors.values())


def ranks_of(expect, rank):
    """(world, rank in it) of the n-th rank of all."""
    for world, size in expect.items():
        if rank < size:
            return world, rank
        rank -= size
    raise AssertionError


def run(expect, body, *, dtypes=None, timeout=40, connect=True, names=None, **options):
    """Run ``body(me, session)`` on every rank of every world, and return the results in the order of ``expect``."""
    with reshard.serve_store() as store:

        def rank_body(ctx):
            torch.set_num_threads(1)
            world, rank = ranks_of(expect, ctx.rank)
            me = Rank(
                world, rank, expect[world], (dtypes or {}).get(world, torch.float32), (names or {}).get(world, NAMES)
            )
            if not connect:
                return body(me, str(store))
            with me.connect(str(store), expect, **options) as session:
                return body(me, session)

        return threads(sum(expect.values()), rank_body, timeout=timeout)


def error_of(call):
    """The error that a call raises; None if it raises none."""
    error = None
    with contextlib.suppress(ReshardError):
        try:
            call()
        except ReshardError as raised:
            error = raised
    return error
