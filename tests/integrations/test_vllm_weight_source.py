"""What a WeightSource of vLLM's is read as, in the form of 0.30 to 0.32 and in that of 0.33; vLLM is not needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

import reshard
from reshard.errors import ManifestError
from reshard.integrations.vllm.weight_source import read_source
from reshard.testing.processes import threads

WHOLE = {
    "rows.w": torch.arange(40.0).reshape(10, 4),
    "columns.w": torch.arange(40.0).reshape(10, 4) + 100,
    "both.w": torch.arange(40.0).reshape(10, 4) + 200,
    "replicated.w": torch.arange(4.0) + 300,
    "owned.w": torch.arange(6.0) + 400,
}


@dataclass(frozen=True)
class Shard:
    """As vLLM 0.33 has it."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """As vLLM 0.33 has it."""


@dataclass(frozen=True)
class Meta:
    """vLLM's ParamMeta; 0.30 to 0.32 have the first three fields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Shard | Replicate, ...] | None = None


LAYOUTS = {
    "rows.w": ((0, 1, 2, 3), (4,), (Shard(0),)),  # 10 rows in chunks of 3: the last rank has 1
    "columns.w": ((0, 1, 2, 3), (2, 2), (Replicate(), Shard(1))),
    "both.w": ((0, 1, 2, 3), (2, 2), (Shard(0), Shard(0))),  # the outer axis first
    "replicated.w": (None, None, None),
    "owned.w": ((2,), (1,), None),
}
"""Of four ranks: owners, mesh and placements."""


class OldSource:
    """A source of 0.30 to 0.32: full tensors, None for what another rank holds."""

    def __init__(self, rank):
        self.rank = rank

    def metadata(self):
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WHOLE.items()]

    def __iter__(self):
        for name, tensor in WHOLE.items():
            yield name, None if name == "owned.w" and self.rank == 0 else tensor


class NewSource:
    """A source of 0.33 on four ranks: local pieces by mesh and placements."""

    def __init__(self, rank, local=True):
        self.rank, self.local = rank, local

    @cached_property
    def metadata(self):
        return [Meta(name, t.dtype, tuple(t.shape), *LAYOUTS[name]) for name, t in WHOLE.items()]

    def implements_iter_local(self):
        return self.local

    def iter_full(self):
        for meta in self.metadata:
            if meta.owners is None or self.rank in meta.owners:
                yield meta.name, WHOLE[meta.name]

    def iter_local(self):
        part = {
            "rows.w": lambda w: w.chunk(4)[self.rank],
            "columns.w": lambda w: w.chunk(2, dim=1)[self.rank % 2],
            "both.w": lambda w: w.chunk(2)[self.rank // 2].chunk(2)[self.rank % 2],
        }
        for name, tensor in self.iter_full():
            yield name, part.get(name, lambda w: w)(tensor)


def refitted(source_of, ranks):
    """What a destination gets of such sources, after it was poisoned."""
    got = {name: torch.full_like(tensor, -7.0) for name, tensor in WHOLE.items()}
    expect = {"trainer": ranks, "engine": 1}
    with reshard.serve_store() as store:

        def run(ctx):
            world, rank = ("trainer", ctx.rank) if ctx.rank < ranks else ("engine", 0)
            role = "source" if world == "trainer" else "destination"
            with reshard.connect(
                str(store), role=role, world=world, rank=rank, world_size=expect[world], expect=expect
            ) as session:
                if role == "source":
                    session.offer(read_source(source_of(rank), rank)[0])
                else:
                    session.accept(got)
                return session.refit(1)

        reports = threads(ranks + 1, run, timeout=60)
    return got, reports


@pytest.mark.parametrize(
    ("source_of", "ranks"),
    [
        pytest.param(OldSource, 2, id="0.30 to 0.32"),
        pytest.param(NewSource, 4, id="0.33, local pieces"),
        pytest.param(lambda rank: NewSource(rank, local=False), 4, id="0.33, full tensors"),
    ],
)
def test_an_engine_gets_what_the_source_has(source_of, ranks):
    got, _ = refitted(source_of, ranks)
    assert all(torch.equal(got[name], tensor) for name, tensor in WHOLE.items())


def test_a_module_is_read_where_it_lies_and_its_source_is_not_iterated():
    class ModuleSource:
        def __init__(self, module):
            self._module = module

    module = torch.nn.Linear(4, 4)
    what, lies = read_source(ModuleSource(module), 0)
    assert what is module
    assert lies is None


def test_it_is_told_whether_the_tensors_lie_where_they_lay():
    assert read_source(OldSource(1), 1)[1] == read_source(OldSource(1), 1)[1]

    class Moving(OldSource):
        def __iter__(self):
            self.kept = [(name, tensor.clone()) for name, tensor in WHOLE.items()]
            yield from self.kept

    moving, before = Moving(1), None
    before, kept = read_source(moving, 1)[1], moving.kept
    assert read_source(moving, 1)[1] != before
    assert kept


def test_a_source_that_says_one_thing_and_yields_another_is_refused():
    class Lying(NewSource):
        def iter_local(self):
            yield "rows.w", WHOLE["rows.w"][:2]

    with pytest.raises(ManifestError, match=r"'rows.w': the WeightSource yields \[2, 4\], .* says \[3, 4\]"):
        read_source(Lying(0), 0)

    class Unknown(OldSource):
        def __iter__(self):
            yield "other.w", WHOLE["rows.w"]

    with pytest.raises(ManifestError, match=r"'other.w'.*does not name it"):
        read_source(Unknown(0), 0)
