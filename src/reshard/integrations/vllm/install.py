"""Install: bring landed pieces to life in a live model, one install group at a time.

A group is taken back to the form that the loaders know, its pieces are copied to where the trace found them, or taken
where they landed, and vLLM processes and packs it into the memory that serves. All of it happens in the worker's own
thread, so that no request sees a group half done, and takes room for one group at a time.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import BindingError
from reshard.integrations.vllm.adopted import Adopted, adoptable
from reshard.integrations.vllm.groups import install_groups
from reshard.integrations.vllm.private import OpenGroup, repack
from reshard.transports.views import copy_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.integrations.traced import LoadTrace
    from reshard.integrations.vllm.groups import InstallGroup
    from reshard.layouts.piece import Piece

log = logging.getLogger("reshard.vllm")


class Installer:
    """Installs what has landed into one live model.

    Args:
        model: The worker's model.
        vllm_config: The worker's configuration.
        trace: Where each piece lies; of this model.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, trace: LoadTrace) -> None:
        self._model = model
        self._config = vllm_config
        self._groups = {group.name: group for group in install_groups(trace)}
        self._buffers = {buffer.name: buffer for buffer in trace.buffers}
        self._adopts = True
        """Whether layers may take what has landed where it is; not any more once one of them has kept it."""
        self._ties = _ties_of(model)
        self.seconds: dict[str, float] = {}
        """What all installs took since it was emptied: ``opening``, ``copying``, ``processing``."""

    @property
    def groups(self) -> tuple[InstallGroup, ...]:
        """In the order in which they are installed."""
        return tuple(self._groups.values())

    def group(self, name: str) -> InstallGroup:
        """A group by its name."""
        return self._groups[name]

    def install(self, name: str, landed: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        """Make the new weights of a group the ones that serve.

        Args:
            name: The group's.
            landed: Its pieces, each a tensor of the box's shape in the dtype that the model keeps.

        Raises:
            BindingError: Not all pieces of the group are there.
            Exception: What vLLM raises. ``error.untouched`` says whether the group is as it was; otherwise some of its
                layers are old and some new, each whole, and the model must not serve.
        """
        from vllm.config import set_current_vllm_config  # type: ignore[import-not-found,unused-ignore]

        group = self._groups[name]
        tensors = {(piece.name, piece.box): tensor for piece, tensor in landed}
        _check_complete(group, tensors)
        with torch.no_grad(), set_current_vllm_config(self._config):
            memory = adoptable(group.pieces, tensors, self._buffers) if self._adopts else {}
            adopted = {buffer: Adopted(tensor) for buffer, tensor in memory.items()}
            self._fill(group, tensors, landed, adopted)
            if kept := [buffer for buffer, one in adopted.items() if one.is_kept]:
                log.warning("%s keeps the memory that it is loaded from, so weights are copied from now on", kept[0])
                self._adopts = False
                self._fill(group, tensors, landed, {}, again=True)
            for first, layer in self._ties:
                if first in group.layers:
                    repack(layer)

    def _fill(
        self,
        group: InstallGroup,
        tensors: Mapping[tuple[str, Any], torch.Tensor],
        landed: Sequence[tuple[Piece, torch.Tensor]],
        adopted: Mapping[str, Adopted],
        *,
        again: bool = False,
    ) -> None:
        """Take a group out of service, fill it and put it back; ``again``, after it has been filled before."""
        with self._counted("opening"):
            given = {_within(group, buffer): one.take() for buffer, one in adopted.items()}
            part = OpenGroup(self._model.get_submodule(group.name), self._config.model_config, _inside(group), given)
            del given  # what the group does not take is copied
        try:
            with self._counted("copying"):
                self._write(group, tensors, landed)
            with self._counted("processing"):
                part.close()
        except Exception as error:
            error.untouched = part.restore() and not again  # type: ignore[attr-defined]
            raise

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def _write(
        self,
        group: InstallGroup,
        tensors: Mapping[tuple[str, Any], torch.Tensor],
        landed: Sequence[tuple[Piece, torch.Tensor]],
    ) -> None:
        buffers = _buffers_of(self._model, group.layers)
        pairs = [(one.region.of(buffers), tensors[one.piece.name, one.piece.box]) for one in group.pieces]
        pairs = [(view, piece) for view, piece in pairs if view.data_ptr() != piece.data_ptr()]  # others are adopted
        copy_all([view for view, _ in pairs], [piece.reshape(view.shape) for view, piece in pairs])
        for fill in group.fills:
            fill.region.of(buffers).fill_(fill.value)
        for copy in group.copies:
            copy.target.of(buffers).copy_(copy.source.of(buffers))
        if group.whole:
            whole = {piece.name: tensor for piece, tensor in landed}
            load: Any = self._model.load_weights
            load((tensor, whole[tensor]) for tensor in group.whole)


def _inside(group: InstallGroup) -> tuple[str, ...]:
    """The group's layers by their names in its module."""
    return tuple(_within(group, layer) for layer in group.layers)


def _within(group: InstallGroup, name: str) -> str:
    """A name of the model as one in the group's module."""
    return name[len(group.name) + 1 :] if group.name else name


def _buffers_of(model: torch.nn.Module, layers: Sequence[str]) -> dict[str, torch.Tensor]:
    buffers: dict[str, torch.Tensor] = {}
    for layer in layers:
        module = model.get_submodule(layer)
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            buffers[f"{layer}.{name}"] = tensor.data
    return buffers


def _check_complete(group: InstallGroup, tensors: Mapping[tuple[str, Any], torch.Tensor]) -> None:
    names = {name for name, _ in tensors}
    missing = [p.piece.name for p in group.pieces if (p.piece.name, p.piece.box) not in tensors]
    missing += [name for name in group.whole if name not in names]
    if missing:
        raise BindingError(
            f"Install group {group.name!r}: {missing[0]!r} has not landed ({len(missing)} of "
            f"{len(group.pieces) + len(group.whole)} pieces are missing), and vLLM processes a layer as a whole. "
            f"Refit all tensors of the group together.",
            tensor=missing[0],
            untouched=True,
        )


def _ties_of(model: torch.nn.Module) -> tuple[tuple[str, torch.nn.Module], ...]:
    """(layer, other layer) where the other has the first one's weight as its own: a tied head."""
    first: dict[int, str] = {}
    ties = []
    for name, layer in model.named_modules():
        for tensor in layer.parameters(recurse=False):
            owner = first.setdefault(id(tensor), name)
            if owner != name:
                ties.append((owner, layer))
    return tuple(ties)
