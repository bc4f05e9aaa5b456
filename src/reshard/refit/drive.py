"""Drive: the engines' part in the refits of one rank of the source, and what is told to them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reshard.errors import ConfigError
from reshard.refit.engines import SessionFacts
from reshard.refit.telling import text_of

if TYPE_CHECKING:
    from reshard.refit.call import Asked, Setup
    from reshard.refit.engines import Engines
    from reshard.transports.base import Deadline


@dataclass
class Drive:
    """The engines' part in the refits of one rank; nothing on ranks that drive none."""

    engines: Engines | None
    facts: SessionFacts | None
    pause_seconds: float | None = None
    """In the last refit: from the call to stop the engines until they went on."""

    engine_seconds: dict[str, float] = field(default_factory=dict)
    """In the last refit, by engine: the seconds for which it stood still."""

    _begun: int | None = None
    _stopped: float = 0.0

    def begin(self, asked: Asked | None, deadline: Deadline) -> None:
        """Tell the engines to join, and to receive a version if one was asked for."""
        if self.engines is None or self.facts is None:
            return
        self.pause_seconds, self.engine_seconds = None, {}
        self._begun = None if asked is None else asked.version
        facts = self.facts
        if asked is not None:
            facts = replace(facts, to=asked.to, names=asked.names, allow_rollback=asked.allow_rollback)
        self.engines.begin(facts, self._begun, deadline)

    def commit(self, deadline: Deadline) -> None:
        """Let the engines install."""
        if self.engines is None or self._begun is None:
            return
        self._stopped = time.perf_counter()
        self.engines.commit(self._begun, deadline)

    def done(self) -> None:
        """Let the engines go on."""
        if self.engines is None or self._begun is None:
            return
        self.engine_seconds = dict(self.engines.done(self._begun) or {})
        self._begun = None
        self.pause_seconds = max(self.engine_seconds.values(), default=time.perf_counter() - self._stopped)

    def failed(self, error: BaseException) -> str:
        """Tell the engines of a failure; what they do now, for the error's message."""
        if self.engines is None or self._begun is None:
            return ""
        version, self._begun = self._begun, None
        try:
            return self.engines.failed(version, error) or ""
        except Exception as second:
            return f"The engines could not be told of it: {text_of(second)}"


def make_drive(setup: Setup) -> Drive:
    """The drive of one rank: a real one on the first rank of a source that was given engines.

    Raises:
        ConfigError: A destination was given engines, or the store has no address that they could be told.
    """
    engines, me, options = setup.engines, setup.me, setup.options
    if engines is None:
        return Drive(None, None)
    if me.role != "source":
        raise ConfigError(f"World {me.world!r} joined as {me.role}: the source drives engines; pass engines= there.")
    if not isinstance(setup.store, str):
        raise ConfigError(
            f"engines= are told where to meet, and a {type(setup.store).__name__} has no address. Connect by the "
            f"address that serve_store gives."
        )
    if me.rank != 0:
        return Drive(None, None)
    facts = SessionFacts(
        setup.store,
        setup.session,
        me.world,
        dict(setup.expect),
        options.commit,
        options.verify,
        options.strategy,
        options.transport,
        options.staging_nbytes,
        setup.timeout.total_seconds(),
        tuple(sorted(world for world in setup.expect if world != me.world)),
        None if setup.topology is None else setup.topology.to_json(),
        routes=dict(options.routes),
    )
    return Drive(engines, facts)
