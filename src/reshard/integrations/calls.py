"""A function mode for the calls of a loader that the dispatcher does not see as they were made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Calls(TorchFunctionMode):
    """Follow ``tensor.data = without_data``, which torch refuses, and lists as indices, which torch turns into no data.

    Where memory without data is to replace memory with data, the tensor stays as it is, and whatever is asked of it
    from then on is asked of the replacement.
    """

    def __init__(self) -> None:
        super().__init__()
        self._replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def now(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or what has replaced its memory."""
        return self._replaced[id(tensor)][1] if id(tensor) in self._replaced else tensor

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make a call, with what the class says."""
        del types
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.data.__set__ and args[1].is_meta and not args[0].is_meta:  # type: ignore[attr-defined]
            self._replaced[id(args[0])] = (args[0], self.now(args[1]))  # kept, so that the id stays its own
            return None
        if self._replaced:
            args, kwargs = tree_map(self._now, (args, kwargs))
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], _with_tensors(args[1]), *args[2:])
        return func(*args, **kwargs)

    def _now(self, x: Any) -> Any:
        return self.now(x) if isinstance(x, torch.Tensor) else x


def _with_tensors(index: Any) -> Any:
    """An index with its lists as tensors."""
    if isinstance(index, tuple):
        return tuple(map(_with_tensors, index))
    return torch.tensor(index, device="cpu") if isinstance(index, list) and index else index
