"""Cases TA-*: two names for one memory, memory that others look into, and views of every shape."""

from __future__ import annotations

import pytest
import torch
from tests.cases.dense import POISON, TIMEOUT, arange, refit, refused_refit, same_bits, split

import reshard
from reshard.errors import ManifestError
from reshard.layouts.manifest import Manifest
from reshard.testing.processes import threads

NAMES = ("embed.weight", "lm_head.weight")


def tied(value):
    return dict.fromkeys(NAMES, value)


def test_TA_01_a_tied_destination_is_written_once(transport):
    source, target = arange(6, 4), torch.full((6, 4), float(POISON))
    told = refit(
        2,
        lambda rank: (None, Manifest.from_torch(tied(target))) if rank else (Manifest.from_torch(tied(source)), None),
        transport=transport,
    )
    assert same_bits(target, source)
    assert told[1][0].wire_nbytes == source.nbytes


def test_TA_01_an_untied_destination_of_a_tied_source_gets_both_copies(transport):
    source, target = arange(6, 4), {name: torch.full((6, 4), float(POISON)) for name in NAMES}
    refit(
        2,
        lambda rank: (None, Manifest.from_torch(target)) if rank else (Manifest.from_torch(tied(source)), None),
        transport=transport,
    )
    assert all(same_bits(target[name], source) for name in NAMES)


def test_TA_01_two_source_tensors_for_one_destination_buffer_are_refused_by_both_names():
    target = torch.full((6, 4), float(POISON))
    source = {name: at + arange(6, 4) for at, name in enumerate(NAMES)}
    for error in refused_refit(
        2, lambda rank: (None, Manifest.from_torch(tied(target))) if rank else (Manifest.from_torch(source), None)
    ):
        assert isinstance(error, ManifestError)
        assert all(name in error.message for name in NAMES)
    assert torch.equal(target, torch.full_like(target, POISON))


def test_TA_01_a_tied_destination_takes_the_one_name_that_the_source_has(transport):
    source, target = {"embed.weight": arange(6, 4)}, torch.full((6, 4), float(POISON))
    refit(
        2,
        lambda rank: (None, Manifest.from_torch(tied(target))) if rank else (Manifest.from_torch(source), None),
        transport=transport,
    )
    assert same_bits(target, source["embed.weight"])


def test_TA_01_a_name_that_is_tied_on_one_rank_and_alone_on_another_is_written_on_both(transport):
    """One engine ties its head, another has it on a pipeline stage without the embedding."""
    source = arange(6, 4)
    whole, stage = torch.full((6, 4), float(POISON)), torch.full((6, 4), float(POISON))
    sides = [
        (Manifest.from_torch(tied(source)), None),
        (None, Manifest.from_torch(tied(whole))),
        (None, Manifest.from_torch({"lm_head.weight": stage})),
    ]
    refit(3, lambda rank: sides[rank], transport=transport)
    assert same_bits(whole, source)
    assert same_bits(stage, source)


class Mixer(torch.nn.Module):
    """An engine's module that keeps a view of one of its parameters as a plain attribute."""

    def __init__(self, value):
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 4, 3, groups=4, bias=False)
        self.D = torch.nn.Parameter(torch.empty(8))
        with torch.no_grad():
            self.conv.weight.copy_(value + arange(4, 1, 3))
            self.D.copy_(value + arange(8))
        self.conv_view = self.conv.weight.view(4, 3)

    def addresses(self):
        return [t.data_ptr() for t in (self.conv.weight, self.conv_view, self.D)]


def test_TA_04_aliases_of_a_destination_stay_alive_through_three_refits(transport):
    trainer, engine = Mixer(0), Mixer(POISON)
    before = engine.addresses()

    def body(ctx):
        side = {"src": Manifest.from_torch(trainer)} if ctx.rank == 0 else {"dst": Manifest.from_torch(engine)}
        group = ctx.process_group("mixer")
        compiled = reshard.compile_refit(group, **side, transport=transport, timeout=TIMEOUT)
        for version in (1, 2, 3):
            if ctx.rank == 0:
                with torch.no_grad():
                    trainer.conv.weight.copy_(100 * version + arange(4, 1, 3))
                    trainer.D.copy_(100 * version + arange(8))
            compiled.run(TIMEOUT)
            if ctx.rank == 1:
                assert engine.addresses() == before
                assert same_bits(engine.conv_view, 100 * version + arange(4, 3))
                assert same_bits(engine.D, 100 * version + arange(8))
            group.barrier().wait(TIMEOUT)

    threads(2, body)
    assert engine.conv_view.untyped_storage().data_ptr() == engine.conv.weight.untyped_storage().data_ptr()


def guarded(size, *, guard=99.0):
    """A buffer filled with the guard's value, in which a view will be written."""
    return torch.full((size,), guard)


SOURCES = {
    "columns of a wider matrix": lambda full: torch.nn.functional.pad(full, (2, 2), value=-1.0)[:, 2:-2],
    "the second half of a buffer": lambda full: torch.cat([full * 0 - 1, full]).chunk(2, 0)[1],
    "a transposed matrix": lambda full: full.t().contiguous().t(),
}


def transposed(buffer):
    return buffer[3 : 3 + 32].view(8, 4).t()


def row_strided(buffer):
    return buffer.as_strided((3, 4), (5, 1), 2)


def columns(buffer):
    return buffer[:32].view(4, 8)[:, 2:6]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("view_of", "shape", "size"), [(transposed, (4, 8), 40), (row_strided, (3, 4), 24), (columns, (4, 4), 40)]
)
def test_TA_05_views_are_read_and_written_in_logical_order_and_nothing_beside_them(
    transport, source, view_of, shape, size
):
    full = arange(*shape)
    held = SOURCES[source](full)
    assert torch.equal(held, full)
    buffer, expected = guarded(size), guarded(size)
    view_of(expected).copy_(full)
    src, dst = split(shape, [0], ()), split(shape, [1], ())

    def body(ctx):
        group = ctx.process_group("views")
        if ctx.rank == 0:
            reshard.reshard(held, src_layout=src, group=group, transport=transport, timeout=TIMEOUT)
        else:
            target = view_of(buffer)
            reshard.reshard(dst=target, dst_layout=dst, group=group, transport=transport, timeout=TIMEOUT)

    threads(2, body)
    assert same_bits(buffer, expected), "the values, and every guard around them"


def test_TA_05_a_strided_view_is_read_in_place_out_of_shared_memory():
    """The same with a source in shared memory, which its readers copy from directly."""
    wide = torch.nn.functional.pad(arange(4, 8), (2, 2), value=-1.0)
    reshard.share_memory_([wide])
    buffer, expected = guarded(40), guarded(40)
    transposed(expected).copy_(arange(4, 8))
    src, dst = split((4, 8), [0], ()), split((4, 8), [1], ())

    def body(ctx):
        group = ctx.process_group("lent")
        if ctx.rank == 0:
            return reshard.reshard(wide[:, 2:-2], src_layout=src, group=group, transport="shm", timeout=TIMEOUT)
        return reshard.reshard(dst=transposed(buffer), dst_layout=dst, group=group, transport="shm", timeout=TIMEOUT)

    told = threads(2, body)
    assert told[1].read_in_place_nbytes == 4 * 8 * 4
    assert same_bits(buffer, expected)
