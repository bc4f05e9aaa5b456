"""Run a loader once on tensors that carry no data, and learn which box of which checkpoint tensor lands where.

    trace = trace_load(model.load_weights, specs, model)
    check_trace(trace, model.load_weights, model)           # against a real load of random weights
    manifest = trace.manifest(dict(model.named_parameters()))

Nothing is loaded and no buffer is written, so the model may be a live one, or one on the meta device that was built for
any rank of any parallelism. What the loader only moves (narrow, chunk, transpose, stack, pad ...) comes out as pieces.
What it computes with is opaque, with the operation as the reason.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from reshard.errors import ManifestError
from reshard.integrations.assembly import FinalBuffer, assemble
from reshard.integrations.calls import Calls
from reshard.integrations.movements import MOVING
from reshard.integrations.moves import move_of, through_all
from reshard.integrations.traced import LoadTrace, describe
from reshard.integrations.watching import ReadsValueError, Watcher, id_of, offset_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reshard.integrations.moves import Move
    from reshard.layouts.piece import TensorSpec

    Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
    """Takes (name in the checkpoint, tensor) pairs, and brings them to where they belong."""

    Buffers = torch.nn.Module | Mapping[str, torch.Tensor]
    """A module, which stands for its parameters and buffers, or tensors by name."""


def trace_load(
    load: Loader,
    checkpoint: Iterable[TensorSpec],
    buffers: Buffers,
    *,
    opaque: Mapping[str, str] | None = None,
) -> LoadTrace:
    """Trace one load of one rank.

    A trace sees what the loader does in the thread that calls it, and believes what it sees: ``check_trace`` holds it
    against a real load, and is to be called before a trace is trusted.

    Args:
        load: The loader; it is called once, and once more for each tensor whose values it asks for.
        checkpoint: Names, shapes and dtypes, in the order in which they are to be loaded.
        buffers: A module (its parameters and buffers), or the rank's tensors by name; on any device. They are as they
            were when this returns.
        opaque: Tensors that are not to be traced, with the reason; the loader does not see them here.

    Returns:
        Every checkpoint tensor as pieces, as opaque or as unused; plain values.

    Raises:
        ManifestError: A tensor is copied into memory that is not among the buffers, and nowhere else.
    """
    specs = tuple(checkpoint)
    reasons = dict(opaque or {})
    while True:
        watcher = Watcher(MOVING)
        try:
            final = _watch(watcher, load, [s for s in specs if s.name not in reasons], buffers)
        except ReadsValueError as error:
            new = sorted(error.names - set(reasons))
            if not new:
                raise ManifestError(
                    f"The loader asks for a value ({error.operation}) of a buffer that holds none while it is traced. "
                    f"Trace it with buffers on a real device."
                ) from error
            reasons |= dict.fromkeys(new, f"the loader reads its values ({error.operation})")
            continue
        return assemble(specs, final, reasons, strays=_strays(watcher))


def _watch(
    watcher: Watcher,
    load: Loader,
    specs: Sequence[TensorSpec],
    buffers: Buffers,
) -> list[FinalBuffer]:
    """Run the loader, and read each buffer as it is afterwards."""
    with torch.no_grad(), put_back(buffers) as before:
        for tensor in before.values():
            watcher.add_target(tensor)
        at = ["none yet"]

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for spec in specs:
                root = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
                watcher.add_root(spec.name, root)
                at[0] = spec.name
                yield spec.name, root

        calls = Calls()
        try:
            with watcher, calls:
                load(weights())
        except Exception as error:
            error.add_note(f"while it was traced on tensors without data; the last that it had taken is {at[0]!r}")
            raise
        return _final(watcher, {name: calls.now(tensor) for name, tensor in tensors_of(buffers).items()})


def _final(watcher: Watcher, buffers: Mapping[str, torch.Tensor]) -> list[FinalBuffer]:
    """What lies in the buffers, each memory under the first name that has it."""
    shown: dict[int, list[Move]] = {}  # by storage: the addresses that a buffer has shown already
    first: dict[tuple[object, ...], str] = {}
    names: dict[str, list[str]] = {}
    final: list[FinalBuffer] = []
    for name, tensor in buffers.items():
        storage, at = id_of(tensor), offset_of(tensor)
        place = (storage, at, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        if tensor.numel() and first.setdefault(place, name) != name:
            names[first[place]].append(name)
            continue
        memory = watcher.find(tensor)
        is_new = memory is None or not memory.is_target
        writes = watcher.read(tensor, at, tensor.stride(), rest=is_new)
        for earlier in shown.get(storage, ()):
            writes = [
                write._replace(move=left.flipped())
                for write in writes
                for left in through_all([write.move.flipped()], earlier)[1]
            ]
        whole = move_of(tensor.shape, at, tensor.stride(), 0, (0,) * tensor.dim())
        if whole is not None:
            shown.setdefault(storage, []).append(whole)
        names[name] = []
        own = tuple(write._replace(move=write.move.shifted(-at)) for write in writes)
        final.append(FinalBuffer(describe(name, tensor), own, names[name]))
    return final


def _strays(watcher: Watcher) -> frozenset[str]:
    """Checkpoint tensors of which something was copied into memory that lives on and is none of the buffers."""
    names: set[str] = set()
    for memory in watcher.memories.values():
        if memory.root is None and not memory.is_target and not memory.is_born and memory.lives_on:
            names |= watcher.names_of(memory)
    return frozenset(names)


def tensors_of(buffers: Buffers) -> dict[str, torch.Tensor]:
    """The tensors by name; of a module its parameters and buffers, under all their names."""
    if not isinstance(buffers, torch.nn.Module):
        return dict(buffers)
    return {
        **dict(buffers.named_parameters(remove_duplicate=False)),
        **dict(buffers.named_buffers(remove_duplicate=False)),
    }


@contextmanager
def put_back(buffers: Buffers) -> Iterator[dict[str, torch.Tensor]]:
    """Hand out the tensors by name, and at the end give each the memory, and each module the tensors, it had."""
    before = tensors_of(buffers)
    data = [(tensor, tensor.data) for tensor in before.values()]
    try:
        yield before
    finally:
        for tensor, had in data:
            if id_of(tensor) != id_of(had) or tensor.shape != had.shape:
                tensor.data = had
        if isinstance(buffers, torch.nn.Module):
            now = tensors_of(buffers)
            for name, tensor in before.items():
                if now.get(name) is not tensor:
                    owner, _, last = name.rpartition(".")
                    module = buffers.get_submodule(owner)
                    delattr(module, last)
                    if isinstance(tensor, torch.nn.Parameter):
                        module.register_parameter(last, tensor)
                    else:
                        module.register_buffer(last, tensor)
