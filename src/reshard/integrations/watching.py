"""A dispatch mode that watches a loader: every copy is written down as strided moves, and none of them is made.

Checkpoint tensors are plain meta tensors. Views of them keep their storage there too, so narrow, chunk, transpose and
the like need no code: when something is copied, both sides say by storage, offset, sizes and strides what they are.
What makes a new memory out of old (clone, cat, index_select, pad) is written down in the same way and looked through at
the next copy. Any other operation makes its result opaque, under its own name. A later write wins over an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from reshard.integrations.moves import Move, TooIrregularError, move_of, through, through_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


FACTORIES: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda args: 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda args: 1),
    **dict.fromkeys(("full", "full_like", "new_full"), lambda args: args[1] if len(args) == 2 else args[2]),
    "scalar_tensor": lambda args: args[0],
    **dict.fromkeys(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"), lambda args: None),
}
"""Operations that make a tensor of one number, or of none, and how to tell the number."""

METADATA = {"t_", "transpose_", "squeeze_", "unsqueeze_", "detach_", "as_strided_"}
"""Operations in place that change how a tensor looks at its memory, not the memory."""

READERS = {"_local_scalar_dense", "equal", "is_nonzero"}
"""Operations that need values at once."""


class Root(NamedTuple):
    """A checkpoint tensor."""

    name: str


class Number(NamedTuple):
    """One number, everywhere the same."""

    value: float | int | bool | complex


class Unknown(NamedTuple):
    """Something that was computed, from these checkpoint tensors."""

    names: frozenset[str]
    reason: str


Source = Root | Number | Unknown


class Write(NamedTuple):
    """A move into a memory from a source; ``dtypes`` are those that the values went through, the source's first."""

    move: Move
    source: Source
    dtypes: tuple[torch.dtype, ...]


class ReadsValueError(BaseException):
    """The loader asks for a value of a tensor that has none. No Exception, so that no loader catches it."""

    def __init__(self, names: frozenset[str], operation: str) -> None:
        super().__init__(operation)
        self.names = names
        self.operation = operation


@dataclass(eq=False)
class Memory:
    """A storage and what the loader has written into it. It is kept alive, so that its identity stays its own."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    root: str | None = None
    is_target: bool = False
    is_born: bool = False
    """Made by an operation that was watched: a temporary of the loader."""
    writes: list[Write] = field(default_factory=list)

    @property
    def carries(self) -> bool:
        """Whether its contents are (also) what the trace says, not what the memory holds."""
        return self.root is not None or bool(self.writes)

    @property
    def lives_on(self) -> bool:
        """Whether anything but this object still has the storage."""
        return int(torch._C._storage_Use_Count(self.storage._cdata)) > 1


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Write down what a loader does to checkpoint tensors and targets, see the module's docstring.

    Args:
        moving: By name, what to do with the operations that move and do not compute.
    """

    def __init__(self, moving: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moving = moving
        self.memories: dict[int, Memory] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, for seconds, to keep it away from this mode

    # -- what is watched -------------------------------------------------------------------------------------------

    def add_root(self, name: str, tensor: torch.Tensor) -> None:
        """Watch a checkpoint tensor: contiguous, from the begin of its own storage."""
        self._memory(tensor).root = name

    def add_target(self, tensor: torch.Tensor) -> None:
        """Watch a buffer; nothing that the loader does to it is done."""
        self._memory(tensor).is_target = True

    def find(self, tensor: torch.Tensor) -> Memory | None:
        """The memory of a tensor where it is watched."""
        return self.memories.get(id_of(tensor))

    def _memory(self, tensor: torch.Tensor) -> Memory:
        key = id_of(tensor)
        if key not in self.memories:
            self.memories[key] = Memory(tensor.untyped_storage(), tensor.dtype)
        return self.memories[key]

    def _carries(self, tensor: torch.Tensor) -> bool:
        memory = self.find(tensor)
        return memory is not None and memory.carries

    def is_watched(self, tensor: torch.Tensor) -> bool:
        memory = self.find(tensor)
        return memory is not None and (memory.carries or memory.is_target)

    # -- reading and writing ---------------------------------------------------------------------------------------

    def read(self, view: torch.Tensor, dst: int, dst_strides: Sequence[int], *, rest: bool = True) -> list[Write]:
        """What a view holds, as writes to addresses that begin at ``dst`` and step by ``dst_strides``.

        With ``rest`` also what the trace knows nothing of.
        """
        whole = move_of(view.shape, dst, dst_strides, offset_of(view), view.stride())
        if whole is None:
            return []
        memory = self.find(view)
        if memory is not None and memory.carries and memory.dtype.itemsize != view.dtype.itemsize:
            return [_unknown(whole, self.names_of(memory), f"its bytes are read as {view.dtype}", view.dtype)]
        left = [whole]
        found: list[Write] = []
        for write in memory.writes if memory is not None else ():
            try:
                moves, left = through_all(left, write.move)
            except TooIrregularError:
                names = self.names_of(memory)
                return [_unknown(whole, names, "it is moved in a pattern of too many parts", view.dtype)]
            found += (Write(move, write.source, write.dtypes) for move in moves)
            if not left:
                return found
        if memory is not None and memory.root is not None:
            return [*found, *(Write(move, Root(memory.root), (memory.dtype,)) for move in left)]
        return found + [_unwritten(move, view, memory) for move in left if rest]

    def names_in(self, view: torch.Tensor) -> frozenset[str]:
        """The checkpoint tensors that any element of a view comes from."""
        if not self._carries(view):
            return frozenset()
        return _names(self.read(view, offset_of(view), view.stride()))

    def names_of(self, memory: Memory | None) -> frozenset[str]:
        """The checkpoint tensors that anything in a memory comes from."""
        if memory is None:
            return frozenset()
        return _names(memory.writes) | ({memory.root} if memory.root is not None else set())

    def assign(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Write down that ``src``, of the same shape, was copied into ``dst``."""
        memory = self._memory(dst)
        writes = self.read(src, offset_of(dst), dst.stride())
        source = self.find(src)
        from_dtype = src.dtype if source is None else source.dtype
        if dst.dtype.itemsize != memory.dtype.itemsize:
            self._blur(dst, _names(writes), f"it is written as {dst.dtype} into {memory.dtype}")
            return
        as_bits = src.dtype == dst.dtype
        if as_bits and memory.is_born and not memory.writes:
            memory.dtype = from_dtype  # a temporary of bits: it holds what the source holds
        plain = from_dtype == memory.dtype if as_bits else (src.dtype, dst.dtype) == (from_dtype, memory.dtype)
        if plain:
            writes = [_cast(write, memory.dtype) for write in writes]
        else:
            reason = f"the bits of {from_dtype} are kept as {memory.dtype}"
            writes = [_unknown(w.move, _names([w]), reason, memory.dtype) for w in writes]
        self._put(memory, writes)

    def fill(self, dst: torch.Tensor, value: float | int | bool | complex) -> None:
        """Write down that all of ``dst`` was set to a number."""
        memory = self._memory(dst)
        if dst.dtype != memory.dtype and value:
            self._blur(dst, frozenset(), f"bits are set through {dst.dtype}")
            return
        whole = move_of(dst.shape, offset_of(dst), dst.stride(), 0, (0,) * dst.dim())
        if whole is not None and dst.dtype.itemsize == memory.dtype.itemsize:
            rounded = torch.full((), value, dtype=dst.dtype).item()
            self._put(memory, [Write(whole, Number(rounded), (memory.dtype,))])
        elif whole is not None:
            self._blur(dst, frozenset(), f"bits are set through {dst.dtype}")

    def _blur(self, dst: torch.Tensor, names: frozenset[str], reason: str) -> None:
        """Write down that ``dst`` now holds something computed."""
        memory = self._memory(dst)
        if dst.dtype.itemsize == memory.dtype.itemsize:
            whole = move_of(dst.shape, offset_of(dst), dst.stride(), 0, (0,) * dst.dim())
        else:  # in elements of the memory, all of it
            whole = move_of((memory.storage.nbytes() // memory.dtype.itemsize,), 0, (1,), 0, (0,))
        if whole is not None:
            self._put(memory, [_unknown(whole, names, reason, memory.dtype)])

    def _put(self, memory: Memory, writes: Sequence[Write]) -> None:
        """Add writes that do not overlap each other; what they overwrite is taken from the earlier ones."""
        kept = memory.writes
        if kept and writes:
            lo = min(w.move.dst_span[0] for w in writes)
            hi = max(w.move.dst_span[1] for w in writes)
            kept = []
            for old in memory.writes:
                first, last = old.move.dst_span
                kept += [old] if last <= lo or hi <= first else _without(old, writes)
        memory.writes = [*kept, *writes]

    # -- operations ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Write an operation down, or do it where it has nothing to do with what is watched."""
        del types
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        name = func.overloadpacket.__name__
        if name in FACTORIES:
            return self._make(func, name, args, kwargs)
        if not any(map(self.is_watched, tensors)) or name in METADATA:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            if name in self.moving:
                return self.moving[name](self, func, *args, **kwargs)
            return self.mutate(func, args, kwargs, tensors)
        if func.is_view or name == "_unsafe_view" or not any(map(self._carries, tensors)):
            return func(*args, **kwargs)
        if name in self.moving:
            return self.moving[name](self, func, *args, **kwargs)
        return self.compute(func, args, kwargs, tensors)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation on tensors without data, for the shape of its result."""
        args, kwargs = tree_map(without_data, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)

    def born(self, out: torch.Tensor) -> torch.Tensor:
        """Watch the result of an operation."""
        self._memory(out).is_born = True
        return out

    def _make(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A new tensor that takes at most its shape from another."""
        if any(isinstance(x, torch.Tensor) and self._carries(x) for x in args):
            out = self.run(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        if not out.is_meta:
            return out  # its values can be read
        value = FACTORIES[name](args)
        if value is not None:
            self.fill(self.born(out), value)
        return out

    def mutate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Something is changed in place by an operation that is no plain copy."""
        names = frozenset[str]().union(*map(self.names_in, tensors))
        changed: list[torch.Tensor] = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            changed += [x for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)]
        for tensor in changed:
            self._blur(tensor, names, f"{func} computes with it")
        if not func._schema.returns:
            return None
        return changed[0] if len(func._schema.returns) == 1 else tuple(changed)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        """A new value from watched ones: opaque, or asked for at once and then beyond us."""
        names = frozenset[str]().union(*map(self.names_in, tensors))
        if func.overloadpacket.__name__ in READERS:
            raise ReadsValueError(names, str(func))
        try:
            out = self.run(func, args, kwargs)
        except NotImplementedError as error:  # no shape without values
            raise ReadsValueError(names, str(func)) from error
        results = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        if not results:
            raise ReadsValueError(names, str(func))
        for result in results:
            self._blur(self.born(result), names, f"{func} computes with it")
        return out


def id_of(tensor: torch.Tensor) -> int:
    """The number of a tensor's storage; data-free storages have one too."""
    return int(tensor.untyped_storage()._cdata)


def offset_of(tensor: torch.Tensor) -> int:
    """Where a tensor begins in its storage, in elements."""
    return int(tensor.storage_offset())


def without_data(x: Any) -> Any:
    """A tensor of the same kind on the meta device; anything else as it is."""
    if not isinstance(x, torch.Tensor) or x.is_meta:
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _names(writes: Iterable[Write]) -> frozenset[str]:
    names: set[str] = set()
    for write in writes:
        if isinstance(write.source, Root):
            names.add(write.source.name)
        elif isinstance(write.source, Unknown):
            names |= write.source.names
    return frozenset(names)


def _unknown(move: Move, names: frozenset[str], reason: str, dtype: torch.dtype) -> Write:
    still = Move(move.dst, 0, tuple(d._replace(src=0) for d in move.dims))
    return Write(still, Unknown(names, reason), (dtype,))


def _unwritten(move: Move, view: torch.Tensor, memory: Memory | None) -> Write:
    """A part of a view that the trace knows nothing of: a number, if the memory holds one everywhere there."""
    if view.is_meta or (memory is not None and memory.is_target):
        return _unknown(move, frozenset(), "memory that nothing has written", view.dtype)
    sizes, strides = [d.size for d in move.dims], [d.src for d in move.dims]
    values = torch.as_strided(view, sizes, strides, move.src)
    first = values[(0,) * values.dim()]
    if not bool((values == first).all()):
        return _unknown(move, frozenset(), "numbers that the loader makes itself", view.dtype)
    still = Move(move.dst, 0, tuple(d._replace(src=0) for d in move.dims))
    return Write(still, Number(first.item()), (view.dtype,))


def _cast(write: Write, dtype: torch.dtype) -> Write:
    if write.dtypes[-1] == dtype:
        return write
    if isinstance(write.source, Number):
        value = torch.full((), write.source.value, dtype=write.dtypes[-1]).to(dtype).item()
        return Write(write.move, Number(value), (dtype,))
    return write._replace(dtypes=(*write.dtypes, dtype))


def _without(old: Write, writes: Sequence[Write]) -> list[Write]:
    """What is left of a write where later ones are taken from it."""
    left = [old.move.flipped()]
    try:
        for write in writes:
            left = [part for move in left for part in through(move, write.move)[1]]
    except TooIrregularError:
        names = _names([old, *writes])
        return [_unknown(old.move, names, "it is overwritten in a pattern of too many parts", old.dtypes[-1])]
    return [old._replace(move=move.flipped()) for move in left]
