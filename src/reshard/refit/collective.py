"""The collectives: one tensor from the layout it has to the layout that is wanted, called by every rank of a group."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from reshard.errors import ConfigError, LayoutError, RefitTimeout
from reshard.layouts.dtensors import is_dtensor
from reshard.layouts.layout import Layout, mesh_from_device_mesh
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.refit.agreement import or_tell_peers
from reshard.refit.compile import compile_declared
from reshard.refit.compiled import DEFAULT_TIMEOUT, CompiledRefit, RunReport
from reshard.refit.declared import Declared, lay_out
from reshard.refit.group import Group
from reshard.refit.options import Options, check_timeout, make_options
from reshard.schedule.schedule import DEFAULT_STAGING_NBYTES
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    import torch.distributed as dist

NAME = "tensor"
"""What the tensor of a collective is called in plans and errors."""

_KEPT_CALLS = 64


Report = TypeVar("Report")


class Work(Generic[Report]):
    """What runs in the background; ``wait`` gives its report or raises its error."""

    def __init__(self, future: Future[Report]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> Report:
        """Block until it has ended; the collective's own deadline bounds this too.

        Raises:
            RefitTimeout: ``timeout`` expired first; the collective goes on.
        """
        try:
            return self._future.result(None if timeout is None else check_timeout(timeout, timeout).total_seconds())
        except TimeoutError:
            raise RefitTimeout(f"The call has not ended within {timeout}; it goes on in the background.") from None


class _Caller:
    """The calls of one group, in order: those in the background too."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.known: dict[tuple[bytes, ...], CompiledRefit] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reshard")
        self._last: Future[RunReport] | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, group: Group) -> _Caller:
        if not isinstance(group.caller, _Caller):
            group.caller = cls(group)
        return group.caller

    def submit(self, call: Callable[[], RunReport]) -> Work[RunReport]:
        """Run the call in the background, after those before it."""
        self._last = self._thread.submit(self._guarded, call)
        return Work(self._last)

    def run(self, call: Callable[[], RunReport]) -> RunReport:
        """Run the call now, after those in the background."""
        if self._last is not None and not self._last.done():
            self._last.exception()
        return self._guarded(call)

    def _guarded(self, call: Callable[[], RunReport]) -> RunReport:
        with self._lock:
            return call()


def reshard(
    src: torch.Tensor | None = None,
    dst: torch.Tensor | None = None,
    *,
    src_layout: Layout | None = None,
    dst_layout: Layout | None = None,
    group: dist.ProcessGroup | None = None,
    stream: Any = None,
    async_op: bool = False,
    strategy: str = "reshard",
    transport: str = "auto",
    verify: str = "none",
    staging_nbytes: int | str = DEFAULT_STAGING_NBYTES,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> RunReport | Work[RunReport]:
    """Bring one tensor from the layout that the sources hold to the layout that the destinations want.

    A collective: every rank of the group calls it. Roles follow from what a rank passes: a source passes ``src``, a
    destination ``dst``, a rank may pass both or neither. Layouts that a rank does not know are learnt from the others
    at the first call and kept, so later calls with the same layouts exchange one small message a rank.

    Args:
        src: This rank's shard, or a DTensor, read as it is at the call; None on ranks outside the source mesh.
        dst: This rank's shard, or a DTensor, overwritten; None on ranks outside the destination mesh.
        src_layout: Layout of ``src`` where it is a plain tensor; its mesh counts ranks of the group.
        dst_layout: Likewise for ``dst``.
        group: Any torch process group; the default group if not given.
        stream: A CUDA stream to work on; the current one if not given.
        async_op: Return a ``Work`` at once and move in the background; both tensors must be left alone until then.
        strategy: ``"reshard"``, ``"point-to-point"`` or ``"gather-broadcast"``.
        transport: ``"auto"``, ``"torch_p2p"`` or ``"shm"``.
        verify: ``"none"``, ``"sum"`` or ``"fingerprint"``.
        staging_nbytes: The most staging memory for a rank.
        timeout: For the whole call.

    Returns:
        What this rank did, or the ``Work`` that will tell.

    Raises:
        LayoutError, ManifestError, CoverageError: What does not fit, on every rank, before any byte moves.
        RefitTimeout: A rank did not call or did not answer; it is named.
    """
    state = Group.of(group, timeout)

    def call() -> RunReport:
        started, deadline = time.perf_counter(), Deadline.after(timeout)
        with or_tell_peers(state, "call"):
            options = make_options(strategy=strategy, transport=transport, verify=verify, staging_nbytes=staging_nbytes)
            declared = Declared(
                _side(src, src_layout, state.rank, "source"), _side(dst, dst_layout, state.rank, "destination"), options
            )
            signature = _signature(declared)
        return _carry_out(state, signature, lambda: declared, deadline, started)

    return _start(state, _on_stream(call, stream), async_op)


def xferdtensor(
    src_tensor: torch.Tensor | None,
    src_mesh: Any,
    src_placement: Sequence[Any] | None,
    dst_tensor: torch.Tensor | None,
    dst_mesh: Any,
    dst_placement: Sequence[Any] | None,
    process_group: dist.ProcessGroup | None,
    stream: Any = None,
) -> None:
    """``reshard`` with the arguments of existing frameworks, in their order.

    Args:
        src_tensor: This rank's shard (or a DTensor); None outside the source mesh.
        src_mesh: A DeviceMesh, a ``Mesh``, or the ranks of the group as a nested list or array, one axis a nesting.
        src_placement: One torch placement a mesh axis.
        dst_tensor: Where this rank's shard goes; None outside the destination mesh.
        dst_mesh: As ``src_mesh``.
        dst_placement: As ``src_placement``.
        process_group: The group that holds both meshes; the default group if None.
        stream: A CUDA stream; the current one if None.

    The global shape follows from the local shapes of all ranks, uneven shards included.

    Raises:
        LayoutError, ManifestError: As ``reshard``.
    """
    state = Group.of(process_group, DEFAULT_TIMEOUT)

    def call() -> RunReport:
        started, deadline = time.perf_counter(), Deadline.after(DEFAULT_TIMEOUT)
        with or_tell_peers(state, "call"):
            sides = [
                _loose_side(src_tensor, src_mesh, src_placement, "source"),
                _loose_side(dst_tensor, dst_mesh, dst_placement, "destination"),
            ]
            memory = [_memory_facts(t) for t in (src_tensor, dst_tensor)]
            signature = hashlib.sha256(json.dumps([sides, memory, "xferdtensor"]).encode()).digest()

        def declare() -> Declared:
            layouts = _learn_layouts(state, sides, deadline)
            with or_tell_peers(state, "declare"):
                src, dst = (
                    None if layout is None else lay_out(NAME, layout, state.rank, _local(tensor), side)
                    for layout, tensor, side in zip(
                        layouts, (src_tensor, dst_tensor), ("source", "destination"), strict=True
                    )
                )
            return Declared(src, dst, Options())

        return _carry_out(state, signature, declare, deadline, started)

    _start(state, _on_stream(call, stream), async_op=False)


def _start(state: Group, call: Callable[[], RunReport], async_op: bool) -> RunReport | Work[RunReport]:
    caller = _Caller.of(state)
    return caller.submit(call) if async_op else caller.run(call)


def _on_stream(call: Callable[[], RunReport], stream: Any) -> Callable[[], RunReport]:
    def on_stream() -> RunReport:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            return call()

    return on_stream


def _carry_out(
    state: Group, signature: bytes, declare: Callable[[], Declared], deadline: Deadline, started: float
) -> RunReport:
    """Move, with the plan of an equal earlier call where all ranks make one."""
    known = _Caller.of(state).known
    key = tuple(state.meeting.exchange("call", signature, deadline))
    compiled = known.pop(key, None)
    if compiled is None:
        compiled = compile_declared(state, declare(), None, deadline)
        while len(known) >= _KEPT_CALLS:
            known.pop(next(iter(known)))
    else:
        compiled.rebind(declare())
    known[key] = compiled  # last used, last dropped; equal on every rank, since all see the same keys
    return compiled.move(deadline, started)


def _side(tensor: torch.Tensor | None, layout: Layout | None, rank: int, side: str) -> Manifest | None:
    if tensor is not None and is_dtensor(tensor):
        return Manifest.from_torch({NAME: tensor}, world=side)
    if layout is not None:
        return lay_out(NAME, layout, rank, tensor, side)
    if tensor is not None:
        short = "src" if side == "source" else "dst"
        raise ConfigError(
            f"Rank {rank} passed a plain {side} tensor of shape {list(tensor.shape)} without a layout, so nobody knows "
            f"which part of the global tensor it is. Pass {short}_layout=, or a DTensor."
        )
    return None


def _signature(declared: Declared) -> bytes:
    """What must be equal for an earlier plan to serve again; private memory may differ, it is bound anew."""
    sides = [None if m is None else [m.to_json(), m.here] for m in (declared.src, declared.dst)]
    memory = [
        [_memory_facts(bound.view) for bound in manifest.local] if manifest is not None else None
        for manifest in (declared.src, declared.dst)
    ]
    text = json.dumps([sides, _if_shared(memory, declared), repr(declared.options)], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def _if_shared(memory: list[Any], declared: Declared) -> list[Any]:
    """Where the memory lies, as far as a plan depends on it: memory lent to others, or both sides in one."""
    lent = declared.src is not None and any(bound.view.is_shared() for bound in declared.src.local)
    mixed = declared.src is not None and declared.dst is not None
    return [memory[0] if lent or mixed else None, memory[1] if mixed else None]


def _memory_facts(tensor: torch.Tensor | None) -> list[Any] | None:
    local = _local(tensor)
    if local is None:
        return None
    return [local.data_ptr(), list(local.shape), list(local.stride())]


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


def _loose_side(
    tensor: torch.Tensor | None, mesh: Any, placements: Sequence[Any] | None, side: str
) -> dict[str, Any] | None:
    """One side of ``xferdtensor`` as plain data: mesh, placements and the local shape."""
    if tensor is not None and is_dtensor(tensor) and mesh is None:
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    if mesh is None:
        if tensor is not None:
            raise ConfigError(f"A {side} tensor of shape {list(tensor.shape)} was passed without its mesh.")
        return None
    ours = as_mesh(mesh)
    if placements is None or len(placements) != len(ours.axes):
        raise LayoutError(
            f"The {side} mesh has {len(ours.axes)} axes {dict(ours.axes)} and {len(placements or ())} placements. "
            f"Give one placement a mesh axis."
        )
    local = _local(tensor)
    return {
        "mesh": [list(axis) for axis in ours.axes],
        "ranks": list(ours.ranks),
        "placements": [_placement_fact(p) for p in placements],
        "shape": None if local is None else list(local.shape),
        "dtype": None if local is None else str(local.dtype).removeprefix("torch."),
    }


def as_mesh(mesh: Any) -> Mesh:
    """A mesh from a DeviceMesh, a Mesh, or ranks in a nested list or array (one axis a nesting)."""
    if isinstance(mesh, Mesh):
        return mesh
    if hasattr(mesh, "mesh") and hasattr(mesh, "get_coordinate"):
        return mesh_from_device_mesh(mesh)
    grid = torch.as_tensor(mesh)
    return Mesh(((f"dim{i}", n) for i, n in enumerate(grid.shape)), grid.flatten().tolist())


class _Placement:
    """A placement read back from the wire; its class name says its kind, as torch's does."""

    def __init__(self, dim: int | None, split_factor: int) -> None:
        self.dim = dim
        self.split_factor = split_factor


def _placement_fact(placement: Any) -> list[Any]:
    return [type(placement).__name__, getattr(placement, "dim", None), getattr(placement, "split_factor", 1) or 1]


def _placement_of(fact: Sequence[Any]) -> _Placement:
    kind, dim, factor = fact
    placement: _Placement = type(kind, (_Placement,), {})(dim, factor)
    return placement


def _learn_layouts(state: Group, sides: Sequence[dict[str, Any] | None], deadline: Deadline) -> list[Layout | None]:
    """The layouts of both sides, with the global shape that the local shapes of all ranks make."""
    told = [json.loads(v) for v in state.meeting.exchange("shapes", json.dumps(sides).encode(), deadline)]
    layouts: list[Layout | None] = []
    for at in range(2):
        known = {rank: row[at] for rank, row in enumerate(told) if row[at] is not None}
        if not known:
            layouts.append(None)
            continue
        mesh = Mesh((tuple(a) for a in next(iter(known.values()))["mesh"]), next(iter(known.values()))["ranks"])
        layouts.append(_layout_from_shapes(known, mesh, ("source", "destination")[at]))
    return layouts


def _layout_from_shapes(known: dict[int, dict[str, Any]], mesh: Mesh, side: str) -> Layout:
    first = next(iter(known.values()))
    for rank, row in known.items():
        if any(row[key] != first[key] for key in ("mesh", "ranks", "placements")):
            raise LayoutError(f"Rank {rank} passed another {side} mesh or placement than rank {next(iter(known))}.")
    absent = [r for r in mesh.ranks if r not in known or known[r]["shape"] is None]
    if absent:
        raise LayoutError(
            f"Rank {absent[0]} is in the {side} mesh {mesh.ranks} but passed no {side} tensor. "
            f"Every rank of the mesh passes its shard, an empty one too.",
            rank=absent[0],
        )
    placements = [_placement_of(fact) for fact in first["placements"]]
    shapes = [known[r]["shape"] for r in mesh.ranks]
    dims = len(shapes[0])
    probe = Layout.from_placements((0,) * dims, known[mesh.ranks[0]]["dtype"], mesh, placements, name=NAME)
    shape = tuple(_global_size(dim, probe, mesh, shapes) for dim in range(dims))
    candidates = Layout.candidates_from_placements(shape, known[mesh.ranks[0]]["dtype"], mesh, placements, name=NAME)
    for layout in candidates:
        if all(list(layout.local_shape(r)) == known[r]["shape"] for r in mesh.ranks):
            return layout
    wrong = next(r for r in mesh.ranks if list(candidates[0].local_shape(r)) != known[r]["shape"])
    raise LayoutError(
        f"The {side} shards do not make a tensor: with {list(shape)} in all, rank {wrong} should hold "
        f"{list(candidates[0].local_shape(wrong))} and passed {known[wrong]['shape']}.",
        rank=wrong,
    )


def _global_size(dim: int, layout: Layout, mesh: Mesh, shapes: Sequence[Sequence[int]]) -> int:
    """The sum of the local sizes over the places that split a dim, at index 0 of every other axis."""
    splitting = {step if isinstance(step, str) else step.axis for step in layout.placement[dim]}
    total = 0
    for position in range(mesh.size):
        place = zip(mesh.names, mesh.place(position), strict=True)
        if all(index == 0 or axis in splitting for axis, index in place):
            total += shapes[position][dim]
    return total
