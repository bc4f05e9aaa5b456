"""Random loaders: whatever chain of movements and overlapping writes they are made of, the pieces say where it ends."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.integrations.moves import Dim, Move, TooIrregularError, through
from reshard.integrations.tracing import trace_load
from reshard.layouts.box import Box
from reshard.layouts.piece import TensorSpec

SHAPES = [(12, 8), (6, 4, 4), (24,), (4, 2, 3, 2), (5, 7)]


def narrow(rng, t):
    dim = rng.randrange(t.dim())
    start = rng.randrange(t.shape[dim])
    return t.narrow(dim, start, rng.randint(1, t.shape[dim] - start))


def transpose(rng, t):
    return t.transpose(rng.randrange(t.dim()), rng.randrange(t.dim()))


def split_dim(rng, t):
    dim = rng.randrange(t.dim())
    size = t.shape[dim]
    inner = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    return t.unflatten(dim, (size // inner, inner)) if t.dim() < 5 else t


def reshape(rng, t):
    return t.reshape(-1) if rng.random() < 0.5 else t.reshape(t.shape[0], -1)


def step(rng, t):
    return t[:: rng.randint(1, 3)]


def select_rows(rng, t):
    return t.index_select(0, torch.tensor([rng.randrange(t.shape[0]) for _ in range(rng.randint(1, 4))]))


def flip(rng, t):
    return t.flip(rng.randrange(t.dim()))


def roll(rng, t):
    return t.roll(rng.randint(-3, 3), rng.randrange(t.dim()))


def pad(rng, t):
    return F.pad(t, (rng.randint(0, 2), rng.randint(0, 2)), value=9)


def both(rng, t):
    return torch.stack([t, t.clone()], dim=rng.randint(0, t.dim())) if t.dim() < 5 and t.numel() < 200 else t


def expand(rng, t):
    return t.unsqueeze(0).expand(2, *t.shape) if t.dim() < 5 and t.numel() < 200 else t


def cat(rng, t):
    return torch.cat([t.clone(), t], dim=rng.randrange(t.dim())) if t.numel() < 200 else t


VIEWS = [narrow, transpose, split_dim, step]
ALL = [*VIEWS, reshape, select_rows, flip, roll, pad, both, expand, cat]


def moved(rng, t, steps):
    for _ in range(rng.randint(0, 4)):
        t = rng.choice(steps)(rng, t)
    return t


def load_by_chance(seed, buffer, weights):
    """Some writes, each of a part of a weight that was moved about into a part of the buffer that was too."""
    rng = random.Random(seed)
    scratch = buffer.new_full((60,), 5)
    for _, w in weights:
        for _ in range(rng.randint(1, 3)):
            source = moved(rng, w, ALL)
            memory = rng.choice([buffer, buffer, scratch])
            target = moved(rng, memory, [split_dim, transpose, step])
            flat = source.reshape(-1)
            n = min(flat.numel(), target.shape[0])
            if target.dim() == 1:
                target[:n].copy_(flat[:n])
            else:
                target[0].copy_(flat[0])  # one element everywhere
                target.select(-1, 0)[:n].copy_(
                    flat[:n].view(n, *[1] * (target.dim() - 2)).expand_as(target.select(-1, 0)[:n])
                )
        if rng.random() < 0.5:
            part = rng.randint(1, 40)
            buffer[part : part + 20].copy_(scratch[20:40])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_random_movements_land_where_a_real_load_puts_them(seed):
    rng = random.Random(seed)
    specs = [TensorSpec(f"w{i}", rng.choice(SHAPES), "int64") for i in range(rng.randint(1, 3))]
    traced, real, ours = (torch.full((120,), -1) for _ in range(3))
    weights, at = {}, 100
    for spec in specs:
        numel = Box.whole(spec.shape).numel
        weights[spec.name] = torch.arange(at, at + numel).reshape(spec.shape)
        at += numel
    trace = trace_load(lambda w: load_by_chance(seed, traced, w), specs, {"b": traced})
    load_by_chance(seed, real, weights.items())

    assert trace.opaque == trace.hidden == ()
    for name, _, box, view in trace.views({"b": ours}):
        view.copy_(weights[name][tuple(map(slice, box.start, box.stop))].reshape(view.shape))
    trace.finish({"b": ours})
    assert ours.tolist() == real.tolist()
    trace.manifest({"b": ours})  # no element of the checkpoint is in two pieces


def addresses(move):
    """(end, beginning) of every element of a move."""
    found = [(move.dst, move.src)]
    for size, dst, src in move.dims:
        found = [(d + i * dst, s + i * src) for d, s in found for i in range(size)]
    return found


DIMS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30), st.integers(0, 30)), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 9), DIMS, st.integers(0, 9), DIMS)
def test_a_move_through_another_is_what_its_elements_say(at, read_dims, begin, write_dims):
    read = Move(0, at, tuple(Dim(n, d, s) for n, d, s in read_dims))
    write = Move(begin, 0, tuple(Dim(n, d, s) for n, d, s in write_dims))
    written = dict(addresses(write))
    if len(written) < len(addresses(write)):
        return  # it writes an element twice, which no copy does
    found, left = through(read, write)
    expected = sorted((end, written[middle]) for end, middle in addresses(read) if middle in written)
    assert sorted(pair for move in found for pair in addresses(move)) == expected
    rest = sorted(pair for pair in addresses(read) if pair[1] not in written)
    assert sorted(pair for move in left for pair in addresses(move)) == rest


def test_a_pattern_of_too_many_parts_is_refused():
    long = 1 << 17
    with pytest.raises(TooIrregularError):
        through(Move(0, 0, (Dim(long, 1, 3),)), Move(0, 0, (Dim(long, 2, 1),)))
