"""What a ``WeightSource`` of vLLM's holds on this rank, as a session can offer it: 0.30 to 0.32, and 0.33."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import ManifestError
from reshard.integrations.vllm.private import module_of
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Lies = dict[str, tuple[int, torch.Size]]
"""Where each tensor lies, to see whether it still does."""


def read_source(source: Any, rank: int) -> tuple[Any, Lies | None]:
    """Read what a source has on this rank; runs the source's own collectives where it has only those.

    Args:
        source: A ``WeightSource``.
        rank: This process's rank among the trainer's.

    Returns:
        What ``Session.offer`` takes, and where its tensors lie (None for a module, which keeps them where they are).

    Raises:
        ManifestError: A tensor is not what the source's metadata says.
    """
    module = module_of(source)
    if module is not None:
        return module, None
    if callable(source.metadata):  # 0.30 to 0.32
        tensors = {name: tensor for name, tensor in source if tensor is not None}  # None: another rank has it
        _check_whole(tensors, source.metadata())
    elif source.implements_iter_local():
        tensors = dict(source.iter_local())
        return Manifest.from_views(list(_local_views(tensors, source.metadata, rank))), _lies(tensors)
    else:
        tensors = dict(source.iter_full())
        _check_whole(tensors, source.metadata)
    views = [(name, tuple(t.shape), (0,) * t.dim(), t.detach()) for name, t in tensors.items()]
    return Manifest.from_views(views), _lies(tensors)


def _lies(tensors: Mapping[str, torch.Tensor]) -> Lies:
    return {name: (tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items()}


def _check_whole(tensors: Mapping[str, torch.Tensor], metadata: Sequence[Any]) -> None:
    shapes = {meta.name: tuple(meta.shape) for meta in metadata}
    for name, tensor in tensors.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise _unlike(name, tensor, shapes.get(name))


def _local_views(
    tensors: Mapping[str, torch.Tensor], metadata: Sequence[Any], rank: int
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Each tensor as (name, global shape, start, local view), by the mesh and placements that 0.33 declares."""
    metas = {meta.name: meta for meta in metadata}
    for name, tensor in tensors.items():
        meta = metas.get(name)
        if meta is None:
            raise _unlike(name, tensor, None)
        shape, start = tuple(meta.shape), (0,) * len(meta.shape)
        wanted = shape
        if meta.placements is not None:
            axes = {f"mesh{i}": size for i, size in enumerate(meta.mesh_shape)}
            layout = Layout.from_placements(
                shape, meta.dtype, Mesh(axes, ranks=meta.owners), meta.placements, name=name
            )
            boxes = [shard.box for shard in layout.shards(rank)]
            if not boxes and tensor.numel() == 0:
                continue  # torch.chunk leaves the last ones nothing
            start, wanted = boxes[0].start, boxes[0].shape
        if tuple(tensor.shape) != wanted:
            raise _unlike(name, tensor, wanted)
        yield name, shape, start, tensor.detach()


def _unlike(name: str, tensor: torch.Tensor, wanted: tuple[int, ...] | None) -> ManifestError:
    declared = "does not name it" if wanted is None else f"says {list(wanted)} for this rank"
    return ManifestError(
        f"{name!r}: the WeightSource yields {list(tensor.shape)}, and its metadata {declared}. Metadata and iteration "
        f"must agree.",
        tensor=name,
    )
