"""Landed: what whoever installs weights is handed at the commit, one install group at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from reshard.errors import ConfigError

if TYPE_CHECKING:
    from reshard.layouts.piece import Piece


@dataclass(frozen=True, eq=False)
class Landed:
    """The pieces of one install group, verified on all ranks, in memory of the session that the next refit writes."""

    group: str
    """The install group; ``""`` for what has none."""

    version: int
    pieces: tuple[tuple[Piece, Any], ...]
    """Each piece under the name that ``accept`` was given, with a contiguous tensor of the box's shape."""

    timeout_seconds: float
    """What is left of the call's time: whoever waits, waits no longer."""


Install: TypeAlias = Callable[[Landed], None]
Installed: TypeAlias = Callable[[str, int], None]
Committed: TypeAlias = Callable[[int], None]
Loader: TypeAlias = Callable[[str, Any], None]


@dataclass(frozen=True, eq=False)
class Hooks:
    """Whom a rank calls when it commits."""

    install: Install | None = None
    """Takes each group's pieces, where the session does not know the live memory."""

    installed: Installed | None = None
    """Is told the group and the version after the live weights of a group are the new ones."""

    committed: Committed | None = None
    """Is told the version after the last group of this rank, before the others are waited for."""

    loaders: Mapping[str, Loader] | None = None
    """By tensor: who takes it whole."""

    def check(self) -> None:
        """Refuse at once what could not be called at the commit, when the weights are being written.

        Raises:
            ConfigError: A hook that cannot be called, or loaders without patterns.
        """
        if self.loaders is not None and not isinstance(self.loaders, Mapping):
            raise ConfigError(f"loaders={self.loaders!r}: give a loader for each pattern of names.")
        hooks = {"install": self.install, "installed": self.installed, "committed": self.committed}
        hooks.update({f"loaders[{pattern!r}]": loader for pattern, loader in (self.loaders or {}).items()})
        for name, hook in hooks.items():
            if not callable(hook) and (hook is not None or name.startswith("loaders")):
                raise ConfigError(f"{name}={hook!r} cannot be called. Give a function.")
