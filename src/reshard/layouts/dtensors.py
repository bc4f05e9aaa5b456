"""DTensors and modules, read by their attributes: which tensors there are, their readings, this rank's number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import ManifestError
from reshard.layouts.given import check_dense
from reshard.layouts.holding import Entry, Rule
from reshard.layouts.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.layouts.piece import TensorSpec


def is_dtensor(tensor: Any) -> bool:
    """Whether an object has a DTensor's mesh and placements."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def rank_in_mesh(device_mesh: Any) -> int | None:
    """The number that a DeviceMesh gives this process, or None where the process is not in it."""
    coordinate = device_mesh.get_coordinate()
    return None if coordinate is None else int(device_mesh.mesh[tuple(coordinate)])


def named_tensors(model: Any) -> dict[str, Any]:
    """The tensors of a module's state dict, or those given by name.

    Raises:
        ManifestError: Something that is not a dense tensor with a name, other than the extra state that some modules
            keep.
    """
    is_module = hasattr(model, "state_dict") and not isinstance(model, type)
    try:
        named = dict(model.state_dict(keep_vars=True) if is_module else model)
    except (TypeError, ValueError):
        if is_module:
            raise
        raise ManifestError(f"A {type(model).__name__} names no tensors. Give a module, or tensors by name.") from None
    unnamed = next((name for name in named if not isinstance(name, str)), None)
    if unnamed is not None:
        raise ManifestError(f"A tensor's name is a text, not a {type(unnamed).__name__}. Give tensors by name.")
    tensors = {name: value for name, value in named.items() if not name.endswith("_extra_state")}
    for name, value in tensors.items():
        check_dense(name, value)
    return tensors


def number_in_meshes(named: Mapping[str, Any]) -> int | None:
    """The number of this process in the meshes of its DTensors, which must be one and the same."""
    first: tuple[int, str] | None = None
    for name, tensor in named.items():
        here = rank_in_mesh(tensor.device_mesh) if is_dtensor(tensor) else None
        if here is None:
            continue
        first = first or (here, name)
        if here != first[0]:
            raise ManifestError(
                f"{first[1]!r} and {name!r} lie on meshes that number this process {first[0]} and {here}. Build all "
                f"meshes of a world over the same ranks.",
                tensors=(first[1], name),
            )
    return None if first is None else first[0]


def entry_of_dtensor(spec: TensorSpec, tensor: Any) -> tuple[Entry, tuple[Layout, ...]]:
    """The entry of a DTensor with every reading of its placements, and whether each fits this rank's local tensor."""
    layouts = Layout.candidates_from_dtensor(tensor, name=spec.name)
    shape = tuple(tensor.detach().to_local().shape)
    me = rank_in_mesh(tensor.device_mesh)
    fits = tuple(me is None or layout.local_shape(me) == shape for layout in layouts)
    readings = tuple(Rule(layout.mesh, layout.placement, layout.split) for layout in layouts)
    if fits == (True,):
        return Entry(spec, readings), layouts
    return Entry(spec, readings[:1], readings[1:], fits), layouts
