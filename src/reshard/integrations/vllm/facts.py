"""Facts: what a worker is told of the session that it joins, checked where it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class WorkerFacts:
    """Arguments of ``connect``, and how the worker's model is read."""

    address: str
    world: str
    expect: Mapping[str, int]
    session: str = "default"
    commit: str = "staged"
    verify: str = "sum"
    strategy: str = "reshard"
    transport: str = "auto"
    staging_nbytes: int | str = "512MiB"
    topology: Mapping[str, Any] | None = None
    """What joins the ranks, as ``Topology.to_json`` gives it; found out if not given."""

    timeout_seconds: float = 60.0
    check: bool = True
    """Whether the trace of one layer of each kind is checked against a real load of random weights first."""

    whole: Mapping[str, str] = field(default_factory=dict)
    """Tensors that travel whole and go through the model's loader: patterns of names, each with the reason."""

    routes: Mapping[str, str] = field(default_factory=dict)
    """As ``connect`` takes them."""

    trainer: str = ""
    """Of the trainer's process: where another one comes in its place, the workers join anew."""

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_seconds)

    def __post_init__(self) -> None:
        if self.world not in self.expect:
            raise ConfigError(
                f"world={self.world!r} is not in expect= ({', '.join(map(repr, self.expect))}). Name the engine there, "
                f"with the number of its workers."
            )
        if self.commit != "staged":
            raise ConfigError(
                f"commit={self.commit!r}: a vLLM engine takes 'staged' only. In place, a trainer that dies would leave "
                f"an engine that answers with some layers old and some new, and does not know it."
            )
